"""Print the requirements that pyproject.toml states, one a line, for pip's -r.

Usage: requirements.py project | GROUP ...   (`project` is [project] dependencies, GROUP a dependency group)
"""

import sys
import tomllib
from pathlib import Path


def main() -> None:
    """Print the requirements of every set named on the command line."""
    pyproject = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
    sets = {"project": pyproject["project"]["dependencies"], **pyproject["dependency-groups"]}
    for name in sys.argv[1:]:
        print("\n".join(sets[name]))


if __name__ == "__main__":
    main()
