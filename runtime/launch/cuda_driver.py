"""Load cubins and launch them through the CUDA driver, on torch's current stream.

Everything about a launch but its pointers and stream is packed once; nothing is compiled. torch owns the context: a
device must have been used through torch before code is loaded onto it.
"""

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.execution.invoke import PreparedStep, Slots

__all__ = ["CudaFunction", "Driver", "DriverError", "Geometry", "Module", "activate", "open_driver", "prepare_launch"]

_log = logging.getLogger(__name__)

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_NON_PORTABLE_CLUSTER = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_CACHE_PREFER_SHARED = 1  # CU_FUNC_CACHE_PREFER_SHARED
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_SHARED_WITHOUT_OPT_IN = 48 * 1024
_PORTABLE_CLUSTER = 8
_CAPTURING = frozenset({900, 906})  # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED and ..._IMPLICIT


class DriverError(TuneModelError):
    """The CUDA driver is missing or refused a call; the message holds the driver's own name for the code."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, padded to 8 bytes, and a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint32),
    )


class CudaFunction(NamedTuple):
    """A kernel that is loaded on one device.

    Attributes:
        handle: CUfunction.
        name: For messages.
        device: Index.
        module: Keeps the code loaded while the function is in use.
    """

    handle: int
    name: str
    device: int
    module: object


class Geometry(NamedTuple):
    """The launch facts that are plain numbers."""

    grid: tuple[int, int, int]
    num_warps: int
    shared_bytes: int
    cluster: tuple[int, int, int] = (1, 1, 1)
    programmatic: bool = False


class Module:
    """A loaded CUmodule; when nothing refers to it any more, the next load on its device unloads it.

    Python may drop it anywhere: in a thread without a context, while its kernels run, in the middle of a capture, which
    an unload would spoil. Graphs that others captured do not hold it: the model must outlive them.
    """

    def __init__(self, driver: "Driver", handle: int, device: int) -> None:
        self._driver, self._handle, self._device = driver, handle, device

    def __del__(self) -> None:
        self._driver.dropped.append((self._handle, self._device))


class Driver:
    """The CUDA driver's functions that launching needs.

    Args:
        library: libcuda, or a stand-in for tests.
        current_stream: Gives the handle of torch's current stream on a device.

    Attributes:
        dropped: Handles and devices of modules that nothing refers to any more.
    """

    def __init__(self, library: Any, current_stream: Callable[[int], int]) -> None:
        self.library = library
        self.current_stream = current_stream
        self.dropped: deque[tuple[int, int]] = deque()
        self._unloading = threading.Lock()

    def check(self, code: int, doing: str) -> None:
        """Raise when the driver refused.

        Raises:
            DriverError: With the driver's name for the code.
        """
        if code != 0:
            name = ctypes.c_char_p()
            known = self.library.cuGetErrorName(code, ctypes.byref(name)) == 0 and name.value
            raise DriverError(f"{doing}: {name.value.decode() if known and name.value else f'CUDA error {code}'}")

    def make_current(self, device: int) -> None:
        """Give this thread the device's primary context (torch's) if it has none."""
        context = ctypes.c_void_p()
        self.check(self.library.cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
        if context.value is None:
            self.check(self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
            self.check(self.library.cuCtxSetCurrent(context), "cuCtxSetCurrent")

    def load_module(self, cubin: bytes, device: int) -> "Module":
        """Load a cubin on the current device, and unload those that were dropped on it.

        Args:
            cubin: The code.
            device: Index of the current device, whose context this thread has.

        Raises:
            DriverError: It is damaged or made for another architecture.
        """
        self._unload_dropped(device)
        if not cubin.startswith(b"\x7fELF"):  # the driver would take PTX too, and compile it
            raise DriverError(f"loading a kernel: {len(cubin)} bytes that are no cubin")
        handle = ctypes.c_void_p()
        self.check(self.library.cuModuleLoadData(ctypes.byref(handle), cubin), "loading a kernel")
        return Module(self, handle.value or 0, device)

    def _unload_dropped(self, device: int) -> None:
        if not self.dropped or self._is_capturing(device):
            return
        with self._unloading:
            found = [self.dropped.popleft() for _ in range(len(self.dropped))]
            self.dropped.extend(pair for pair in found if pair[1] != device)
            handles = [handle for handle, where in found if where == device]
            if not handles:
                return
            code = self.library.cuCtxSynchronize()  # the last launches may be under way
            if code in _CAPTURING:  # in another thread: a device cannot be waited for then
                self.dropped.extend((handle, device) for handle in handles)
                return
            self.check(code, "waiting for the device before kernels are unloaded")
            for handle in handles:
                code = self.library.cuModuleUnload(ctypes.c_void_p(handle))
                if code:  # its memory stays taken, which is all
                    _log.warning("unloading a kernel from device %d: CUDA error %d", device, code)

    def _is_capturing(self, device: int) -> bool:
        status = ctypes.c_int()
        stream = ctypes.c_void_p(self.current_stream(device))
        return self.library.cuStreamIsCapturing(stream, ctypes.byref(status)) != 0 or status.value != 0

    def load_function(
        self, module: "Module", name: str, device: int, shared_bytes: int, blocks_per_cluster: int
    ) -> CudaFunction:
        """Find a kernel in a module and make it ready to launch, also inside a stream capture.

        Raises:
            DriverError: The module has no such kernel, or the device too little shared memory.
        """
        handle = ctypes.c_void_p()
        symbol = name.encode()
        found = self.library.cuModuleGetFunction(ctypes.byref(handle), ctypes.c_void_p(module._handle), symbol)
        self.check(found, f"finding kernel {name!r}")
        if shared_bytes > _SHARED_WITHOUT_OPT_IN:
            opt_in = self.library.cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED, shared_bytes)
            self.check(opt_in, f"kernel {name!r} needs {shared_bytes} bytes of shared memory")
            self.check(self.library.cuFuncSetCacheConfig(handle, _CACHE_PREFER_SHARED), f"configuring kernel {name!r}")
        if blocks_per_cluster > _PORTABLE_CLUSTER:
            large = self.library.cuFuncSetAttribute(handle, _NON_PORTABLE_CLUSTER, 1)
            self.check(large, f"kernel {name!r} needs clusters of {blocks_per_cluster}")
        if hasattr(self.library, "cuFuncLoad"):  # from driver 12.4 on; lazy loading would load at the first launch
            self.check(self.library.cuFuncLoad(handle), f"loading kernel {name!r}")
        return CudaFunction(handle.value or 0, name, device, module)


@lru_cache(maxsize=1)
def open_driver() -> Driver:
    """Return the CUDA driver of this machine.

    Raises:
        DriverError: There is none.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"the CUDA driver (libcuda.so.1) does not load: {error}") from error
    current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if current_stream is None:
        raise DriverError(f"torch {torch.__version__} is built without CUDA")
    return Driver(library, current_stream)


def activate(device: torch.device) -> None:
    """Make sure that this thread can launch on `device`, which must be torch's current one."""
    open_driver().make_current(device.index or 0)


class _Frame:
    """The memory of one launch in flight: configuration, argument cells and the array that points at them.

    Pointer arguments come first among the cells, in the order their slots are given, so filling them is a short loop.
    """

    __slots__ = ("arguments", "attributes", "cells", "config", "config_reference", "stream")

    def __init__(self, geometry: Geometry, pointers: int, arguments: tuple[int | bytes, ...]) -> None:
        constants = [a for a in arguments if isinstance(a, bytes)]
        self.cells = (ctypes.c_uint64 * max(pointers + len(constants), 1))()
        base = ctypes.addressof(self.cells)
        addresses = []
        filled = pointers
        for argument in arguments:
            if isinstance(argument, int):
                addresses.append(base + 8 * argument)
                continue
            ctypes.memmove(base + 8 * filled, argument, len(argument))
            addresses.append(base + 8 * filled)
            filled += 1
        self.arguments = (ctypes.c_void_p * max(len(addresses), 1))(*addresses)
        self.attributes = _attributes(geometry)
        block = (geometry.num_warps * 32, 1, 1)
        count = _attribute_count(geometry)
        self.config = _Config(geometry.grid, block, geometry.shared_bytes, None, self.attributes, count)
        self.config_reference = ctypes.byref(self.config)
        self.stream = 0


def _attribute_count(geometry: Geometry) -> int:
    return int(geometry.cluster != (1, 1, 1)) + int(geometry.programmatic)


def _attributes(geometry: Geometry) -> "ctypes.Array[_Attribute]":
    attributes = (_Attribute * max(_attribute_count(geometry), 1))()
    used = 0
    if geometry.cluster != (1, 1, 1):
        attributes[used].id = _CLUSTER_DIMENSION
        attributes[used].value[0:3] = geometry.cluster
        used += 1
    if geometry.programmatic:
        attributes[used].id = _PROGRAMMATIC
        attributes[used].value[0] = 1
    return attributes


def prepare_launch(
    driver: Driver,
    function: CudaFunction,
    geometry: Geometry,
    indices: tuple[int, ...],
    arguments: tuple[int | bytes, ...],
) -> PreparedStep:
    """Prepare a launch on the tensors at `indices` of a slot list.

    Frames are kept and reused; each concurrent caller takes its own. A grid with a 0 launches nothing.

    Args:
        driver: Whose `cuLaunchKernelEx` is called.
        function: What to launch.
        geometry: Grid, threads, shared memory and attributes.
        indices: Slot of each distinct pointer argument.
        arguments: In the kernel's order: a position in `indices`, or the bytes of a constant (at most 8).
    """
    if 0 in geometry.grid:
        return lambda _: None
    launch = driver.library.cuLaunchKernelEx
    handle = ctypes.c_void_p(function.handle)
    places = tuple(enumerate(indices))
    device = function.device
    current_stream = driver.current_stream
    spare = [_Frame(geometry, len(indices), arguments)]

    def run(slots: Slots) -> None:
        try:
            frame = spare.pop()
        except IndexError:
            frame = _Frame(geometry, len(indices), arguments)
        cells = frame.cells
        for place, index in places:
            cells[place] = slots[index].data_ptr()
        stream = current_stream(device)
        if stream != frame.stream:
            frame.config.stream = frame.stream = stream
        code = launch(frame.config_reference, handle, frame.arguments, None)
        spare.append(frame)
        if code:
            driver.check(code, f"launching kernel {function.name!r}")

    return run
