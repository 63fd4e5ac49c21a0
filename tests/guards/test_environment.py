"""Environment variables are read in one file, so that what a run depends on can be read in one place.

Setting a variable for a library or a child process (`os.environ[name] = value`, `del`, `.update(...)`) is not reading
and is allowed anywhere; so is letting a child inherit the environment (`env=None`).
"""

import ast

from sources import room_modules

READER = "pipeline/environment.py"


def reads_environment(tree: ast.Module) -> list[int]:
    """Lines that read the process's environment."""
    writes: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            writes.add(id(node.value))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "update":
            writes.add(id(node.func.value))
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            if node.attr in {"getenv", "getenvb", "environb"} or (node.attr == "environ" and id(node) not in writes):
                lines.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            lines += [node.lineno for alias in node.names if alias.name in {"environ", "getenv", "environb"}]
    return lines


def test_only_one_file_reads_the_environment():
    readers = {str(path): lines for path, tree in room_modules() if (lines := reads_environment(tree))}
    assert set(readers) <= {READER}, readers


def test_the_guard_sees_every_way_to_read():
    for line in (
        "import os\nos.environ['A']",
        "import os\nos.getenv('A')",
        "from os import environ",
        "import os\ndict(os.environ)",
    ):
        assert reads_environment(ast.parse(line)), line
    for line in (
        "import os\nos.environ['A'] = '1'",
        "import os\nos.environ.update(A='1')",
        "import os\ndel os.environ['A']",
    ):
        assert not reads_environment(ast.parse(line)), line
