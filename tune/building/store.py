"""Built kernels on disk, shared by all models: code by content, and an index from what determines a build to it.

    objects/ab/abcdef...            machine code, named by its SHA-256
    index/12/1234....json           what one candidate built to: launch facts, or why it cannot be built

Files appear whole (written aside, then renamed). What is damaged or unreadable is a miss, never an error: it is built
again.
"""

import hashlib
import os
import tempfile
from pathlib import Path

import msgspec

from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.kernel import CpuLaunch, CudaLaunch, Kernel
from tune_model.tune.candidate import Built, Rejected

__all__ = ["KernelStore", "StoreError", "code_names"]


class StoreError(TuneModelError):
    """The store of built kernels cannot be written."""


class _Indexed(msgspec.Struct, frozen=True, tag="built", forbid_unknown_fields=True):
    kernel: Kernel
    registers: int
    spill_bytes: int
    build_s: float


class _Refused(msgspec.Struct, frozen=True, tag="refused", forbid_unknown_fields=True):
    reason: str
    detail: str


class KernelStore:
    """A folder of built kernels. Any number of processes may use it at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> Built | Rejected | None:
        """Return what a build key leads to, code included; `None` when it has to be built."""
        try:
            entry = msgspec.json.decode(self._index(key).read_bytes(), type=_Indexed | _Refused)
        except (OSError, msgspec.MsgspecError):
            return None
        if isinstance(entry, _Refused):
            return Rejected(entry.reason, entry.detail)
        code: dict[str, bytes] = {}
        for name in code_names(entry.kernel):
            content = self.read(name)
            if content is None:
                return None
            code[name] = content
        return Built(entry.kernel, code, entry.registers, entry.spill_bytes, entry.build_s)

    def put(self, key: str, result: Built | Rejected) -> None:
        """Remember a build. Code is written before the index entry that names it.

        Raises:
            StoreError: The disk is full or the folder cannot be written.
        """
        try:
            self._put(key, result)
        except OSError as error:
            msg = f"{self.folder}: cannot write built kernels ({error.strerror}); free space or choose another folder"
            raise StoreError(msg) from error

    def _put(self, key: str, result: Built | Rejected) -> None:
        entry: _Indexed | _Refused
        if isinstance(result, Rejected):
            entry = _Refused(result.reason, result.detail)
        else:
            for name, content in result.code.items():
                self._write(self._object(name), content)
            entry = _Indexed(result.kernel, result.registers, result.spill_bytes, result.build_s)
        self._write(self._index(key), msgspec.json.encode(entry, order="deterministic"))

    def read(self, name: str) -> bytes | None:
        """Return code by its SHA-256; `None`, and the file is gone, when its content is not what its name says."""
        path = self._object(name)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        if hashlib.sha256(content).hexdigest() == name:
            return content
        path.unlink(missing_ok=True)
        return None

    def _object(self, name: str) -> Path:
        return self.folder / "objects" / name[:2] / name

    def _index(self, key: str) -> Path:
        return self.folder / "index" / key[:2] / f"{key}.json"

    def _write(self, path: Path, content: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            Path(aside).replace(path)
        except BaseException:
            Path(aside).unlink(missing_ok=True)
            raise


def code_names(kernel: Kernel) -> list[str]:
    """Return the SHA-256 of every piece of code a kernel launches, each once."""
    names = [step.code for step in kernel.steps if isinstance(step, CudaLaunch | CpuLaunch)]
    return list(dict.fromkeys(names))
