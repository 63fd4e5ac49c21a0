"""What the process's environment says, read and mended here and nowhere else.

The rest of the project takes what it needs as arguments; libraries (torch, transformers, g++) read their own variables.
"""

import os
import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from tune_model.runtime.errors import TuneModelError

__all__ = ["Environment", "read_environment", "unset_spinning"]

_SPINNING: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
"""How long the threads of GNU's, LLVM's and Intel's OpenMP look for work before they sleep."""


class Environment(msgspec.Struct, frozen=True):
    """The settings taken from environment variables.

    Attributes:
        cache_dir: Where records and built kernels live unless the command names another place: `tune-model` in
            XDG_CACHE_HOME, else in the user's `.cache`. Need not exist.
    """

    cache_dir: Path


def unset_spinning() -> None:
    """Let OpenMP's threads come to rest as they do by default, in this process and those that it starts from now on.

    How they wait changes times, which are recorded without it; and threads that spin for ever after a call cannot be
    told from those that a kernel left running. To be called before torch is imported: OpenMP reads its variables once.
    """
    for name in _SPINNING:
        os.environ.pop(name, None)


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Read the environment variables this project looks at.

    A relative XDG_CACHE_HOME is ignored, as the XDG base directory specification asks.

    Raises:
        TuneModelError: Nothing says where the user's files live.
    """
    caches = Path(variables.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():
        caches = Path(variables.get("HOME", "") or _home_of_user()) / ".cache"
    return Environment(cache_dir=caches / "tune-model")


def _home_of_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError as error:
        msg = f"HOME is not set and user {os.getuid()} has no entry; set XDG_CACHE_HOME, or give --records FOLDER"
        raise TuneModelError(msg) from error
