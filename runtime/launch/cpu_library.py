"""Load shared libraries from bytes and call into them.

No file is left behind and no child process starts: the bytes go to an anonymous file in memory, or, where the system
forbids running those, to a private temporary file that is removed once it is mapped.
"""

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.execution.invoke import PreparedStep, Slots

__all__ = ["CpuFunction", "LibraryError", "find_entry", "load_library"]

CpuFunction = Callable[..., object]
"""`void entry(void *const *pointers, const int64_t *sizes)`."""


class LibraryError(TuneModelError):
    """A kernel's shared library does not load on this machine, or lacks the entry it should have."""


def _write(fd: int, code: bytes) -> None:
    with os.fdopen(fd, "wb", closefd=False) as file:
        file.write(code)


def _open_in_memory(code: bytes) -> ctypes.CDLL:
    fd = os.memfd_create("tune-model-kernel", os.MFD_CLOEXEC)
    try:
        _write(fd, code)
        # glibc returns a library it already has under the same *name*, and descriptor numbers are used again. So the
        # name spells the content's hash in components that mean nothing: equal names then hold equal code.
        bits = int.from_bytes(hashlib.sha256(code).digest()[:16], "big")
        spelled = "".join("/./" if bits >> i & 1 else "///" for i in range(128))
        return ctypes.CDLL(f"/proc/self/fd{spelled}{fd}", mode=os.RTLD_NOW | os.RTLD_LOCAL)
    finally:
        os.close(fd)


def _open_from_file(code: bytes) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="tune-model-") as folder:  # readable by this user alone
        path = Path(folder) / f"{hashlib.sha256(code).hexdigest()}.so"
        path.write_bytes(code)
        return ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)


def load_library(code: bytes) -> ctypes.CDLL:
    """Map a shared library into this process; it stays until the process ends.

    Symbols that the library leaves open, OpenMP's among them, resolve against what torch has loaded.

    Raises:
        LibraryError: It is no library for this machine.
    """
    try:
        return _open_in_memory(code)
    except OSError as first:
        try:
            return _open_from_file(code)
        except OSError as second:
            raise LibraryError(f"a kernel's shared library does not load: {second} (from memory: {first})") from second


def find_entry(library: ctypes.CDLL, entry: str) -> CpuFunction:
    """Return a library's function.

    Raises:
        LibraryError: It has no such symbol.
    """
    try:
        function = library[entry]
    except AttributeError as error:
        raise LibraryError(f"a kernel's shared library has no entry {entry!r}") from error
    function.restype = None
    return function


def prepare_cpu_call(function: CpuFunction, sizes: tuple[int, ...], indices: tuple[int, ...]) -> PreparedStep:
    """Prepare a call of a library function on the tensors at `indices` of a slot list.

    The pointer arrays are kept and reused; each concurrent caller takes its own.
    """
    size_array = (ctypes.c_int64 * max(len(sizes), 1))(*sizes)
    array_type = ctypes.c_uint64 * max(len(indices), 1)
    places = tuple(enumerate(indices))
    spare: list[ctypes.Array[ctypes.c_uint64]] = [array_type()]

    def run(slots: Slots) -> None:
        try:
            pointers = spare.pop()
        except IndexError:
            pointers = array_type()
        for place, index in places:
            pointers[place] = slots[index].data_ptr()
        function(pointers, size_array)
        spare.append(pointers)

    return run
