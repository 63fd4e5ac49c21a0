"""Machine code by its SHA-256, loaded into the process at most once per device."""

import threading
from collections.abc import Callable, Mapping
from ctypes import CDLL
from typing import TypeVar

import torch

from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.kernel import CpuLaunch, CudaLaunch
from tune_model.runtime.launch.cpu_library import CpuFunction, find_entry, load_library
from tune_model.runtime.launch.cuda_driver import CudaFunction, Module, activate, open_driver
from tune_model.runtime.replay import Replay

__all__ = ["CodeLoader", "CodeMissingError", "device_index"]

_K = TypeVar("_K")
_V = TypeVar("_V")


class CodeMissingError(TuneModelError):
    """A kernel names machine code that is not there."""


def device_index(device: torch.device) -> int:
    """Return a CUDA device's number; a device without one is the current one."""
    index: int | None = device.index
    return torch.cuda.current_device() if index is None else index


class CodeLoader:
    """Loads kernels' code and keeps it loaded while the loader or a kernel made from it lives.

    Args:
        code: Cubins and shared libraries by SHA-256; read when first needed.
    """

    def __init__(self, code: Mapping[str, bytes]) -> None:
        self._code = code
        self._lock = threading.RLock()
        self._libraries: dict[str, CDLL] = {}
        self._modules: dict[tuple[str, int], Module] = {}
        self._functions: dict[tuple[str, str, int, int, int], CudaFunction] = {}

    def _bytes(self, sha256: str) -> bytes:
        try:
            return self._code[sha256]
        except KeyError as error:
            raise CodeMissingError(f"machine code {sha256} is missing; {len(self._code)} kernels are there") from error

    def _once(self, known: dict[_K, _V], key: _K, make: Callable[[], _V]) -> _V:
        with self._lock:
            if key not in known:
                known[key] = make()
            return known[key]

    def cpu(self, launch: CpuLaunch) -> CpuFunction:
        """Return the library function of a CPU launch.

        Raises:
            CodeMissingError: No code has that hash.
            LibraryError: It does not load.
        """
        library = self._once(self._libraries, launch.code, lambda: load_library(self._bytes(launch.code)))
        return find_entry(library, launch.entry)

    def cuda(self, launch: CudaLaunch, device: torch.device) -> CudaFunction:
        """Return the kernel of a CUDA launch, loaded on `device`.

        Raises:
            CodeMissingError: No code has that hash.
            DriverError: It does not load.
        """
        index = device_index(device)
        blocks = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
        driver = open_driver()

        def load() -> CudaFunction:
            with torch.cuda.device(index):
                activate(torch.device("cuda", index))
                module = self._once(
                    self._modules,
                    (launch.code, index),
                    lambda: driver.load_module(self._bytes(launch.code), index),
                )
                return driver.load_function(module, launch.entry, index, launch.shared_bytes, blocks)

        return self._once(self._functions, (launch.code, launch.entry, index, launch.shared_bytes, blocks), load)

    def load_all(self, replay: Replay, device: torch.device) -> None:
        """Load every kernel that a device may be asked to run, so that even a first call inside a capture loads none.

        Raises:
            CodeMissingError: An entry's code is not there.
            DriverError: A cubin does not load.
            LibraryError: A shared library does not load.
        """
        for entry in (entry for entries in replay.forms.values() for entry in entries):
            for step in entry.kernel.steps:
                if isinstance(step, CudaLaunch):
                    self.cuda(step, device)
                elif isinstance(step, CpuLaunch):
                    self.cpu(step)
