"""What the process's environment says, read here and nowhere else.

The rest of the project takes what it needs as arguments; libraries (torch, transformers, g++) read their own variables.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

__all__ = ["Environment", "read_environment"]


class Environment(msgspec.Struct, frozen=True):
    """The settings taken from environment variables.

    Attributes:
        cache_dir: Where records and built kernels live unless the command names another place: `tune-model` in
            XDG_CACHE_HOME, else in the user's `.cache`. Need not exist.
    """

    cache_dir: Path


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Read the environment variables this project looks at.

    A relative XDG_CACHE_HOME is ignored, as the XDG base directory specification asks.
    """
    caches = Path(variables.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():
        home = variables.get("HOME", "")
        caches = (Path(home) if home else Path("~").expanduser()) / ".cache"
    return Environment(cache_dir=caches / "tune-model")
