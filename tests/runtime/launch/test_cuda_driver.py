"""Packing of launches against a stand-in for libcuda; the real driver is tested on a GPU."""

import ctypes
import struct
from typing import Any

import pytest
import torch

from tune_model.runtime.launch.cuda_driver import CudaFunction, Driver, DriverError, Geometry, prepare_launch

INVALID_VALUE, OUT_OF_MEMORY = 1, 2
CUBIN = b"\x7fELF"


class FakeLibrary:
    """Records calls; reads a launch as the driver would, through the pointers it is given."""

    def __init__(self, sizes: tuple[int, ...] = ()) -> None:
        self.launches: list[dict[str, Any]] = []
        self.attributes: list[tuple[int, int]] = []
        self.sizes = sizes
        self.fail: dict[str, int] = {}
        self.context = 0
        self.capturing = False
        self.modules = 76
        self.calls: list[tuple[str, int]] = []

    def cuGetErrorName(self, code: int, name: Any) -> int:  # noqa: N802 (libcuda's names)
        if code != OUT_OF_MEMORY:
            return INVALID_VALUE
        name._obj.value = b"CUDA_ERROR_OUT_OF_MEMORY"
        return 0

    def cuModuleLoadData(self, module: Any, image: bytes) -> int:  # noqa: N802
        self.modules += 1
        module._obj.value = self.modules
        return self.fail.get("load", 0)

    def cuModuleUnload(self, module: Any) -> int:  # noqa: N802
        self.calls.append(("unload", module.value))
        return self.fail.get("unload", 0)

    def cuStreamIsCapturing(self, stream: Any, status: Any) -> int:  # noqa: N802
        status._obj.value = int(self.capturing)
        return 0

    def cuCtxSynchronize(self) -> int:  # noqa: N802
        self.calls.append(("synchronize", self.context))
        return self.fail.get("synchronize", 0)

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:  # noqa: N802
        function._obj.value = 99
        return self.fail.get("function", 0)

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:  # noqa: N802
        self.attributes.append((attribute, value))
        return self.fail.get("attribute", 0)

    def cuFuncSetCacheConfig(self, function: Any, config: int) -> int:  # noqa: N802
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context._obj.value = self.context or None
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:  # noqa: N802
        context._obj.value = 5 + device
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:  # noqa: N802
        self.context = context.value
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, arguments: Any, extra: None) -> int:  # noqa: N802
        config = config._obj
        values = [ctypes.string_at(arguments[i], size) for i, size in enumerate(self.sizes)]
        attributes = [(a.id, tuple(a.value[:3])) for a in config.attributes[: config.attribute_count]]
        self.launches.append(
            {
                "grid": tuple(config.grid),
                "block": tuple(config.block),
                "shared": config.shared_bytes,
                "stream": config.stream,
                "attributes": attributes,
                "function": function.value,
                "values": values,
            }
        )
        return self.fail.get("launch", 0)


FUNCTION = CudaFunction(99, "kernel", 0, None)


def test_arguments_are_read_back_as_packed():
    library = FakeLibrary(sizes=(8, 4, 8, 8, 4, 8, 8))
    streams = iter([7, 7, 8])
    driver = Driver(library, lambda device: next(streams))
    arguments = (0, struct.pack("<i", -3), 1, struct.pack("<q", 1 << 40), struct.pack("<f", 0.5), bytes(8), 0)
    run = prepare_launch(driver, FUNCTION, Geometry((4, 5, 6), 8, 1000), (2, 0), arguments)
    for _ in range(3):
        x, y = torch.zeros(3), torch.zeros(4)
        run([y, None, x])
        launch = library.launches[-1]
        p, q = struct.pack("<Q", x.data_ptr()), struct.pack("<Q", y.data_ptr())
        assert launch["values"] == [p, arguments[1], q, arguments[3], arguments[4], bytes(8), p]
    assert library.launches[0] | {"values": None} == {
        "grid": (4, 5, 6),
        "block": (256, 1, 1),
        "shared": 1000,
        "stream": 7,
        "attributes": [],
        "function": 99,
        "values": None,
    }
    assert library.launches[2]["stream"] == 8


def test_the_default_stream_is_null():
    library = FakeLibrary()
    prepare_launch(Driver(library, lambda _: 0), FUNCTION, Geometry((1, 1, 1), 1, 0), (), ())([])
    assert library.launches[0]["stream"] is None


def test_launch_attributes():
    library = FakeLibrary()
    geometry = Geometry((2, 1, 1), 4, 0, (2, 1, 1), programmatic=True)
    prepare_launch(Driver(library, lambda _: 0), FUNCTION, geometry, (), ())([])
    cluster, programmatic = library.launches[0]["attributes"]
    assert cluster == (4, (2, 1, 1))
    assert programmatic[0] == 6
    assert programmatic[1][0] == 1


def test_structures_have_the_drivers_layout():
    """Sizes of CUlaunchAttribute and CUlaunchConfig in cuda.h (64-bit)."""
    from tune_model.runtime.launch import cuda_driver

    assert ctypes.sizeof(cuda_driver._Attribute) == 72
    assert cuda_driver._Attribute.value.offset == 8
    assert ctypes.sizeof(cuda_driver._Config) == 56
    assert cuda_driver._Config.stream.offset == 32
    assert cuda_driver._Config.attribute_count.offset == 48


def test_an_empty_grid_launches_nothing():
    library = FakeLibrary()
    prepare_launch(Driver(library, lambda _: 0), FUNCTION, Geometry((0, 1, 1), 4, 0), (), ())([])
    assert library.launches == []


def test_large_shared_memory_and_clusters_are_asked_for():
    library = FakeLibrary()
    driver = Driver(library, lambda _: 0)
    module = driver.load_module(CUBIN, 0)
    driver.load_function(module, "small", 0, 48 * 1024, 1)
    assert library.attributes == []
    assert driver.load_function(module, "large", 0, 48 * 1024 + 1, 16).handle == 99
    assert library.attributes == [(8, 48 * 1024 + 1), (14, 1)]


def test_a_thread_without_a_context_gets_torchs():
    library = FakeLibrary()
    driver = Driver(library, lambda _: 0)
    driver.make_current(1)
    assert library.context == 6
    library.context = 42
    driver.make_current(1)
    assert library.context == 42


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("load", "loading a kernel: CUDA_ERROR_OUT_OF_MEMORY"),
        ("function", "finding kernel 'k': CUDA_ERROR_OUT_OF_MEMORY"),
        ("attribute", "kernel 'k' needs 100000 bytes of shared memory: CUDA_ERROR_OUT_OF_MEMORY"),
        ("launch", "launching kernel 'k': CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_errors_carry_the_drivers_name(what: str, message: str):
    library = FakeLibrary()
    library.fail = {what: OUT_OF_MEMORY}
    driver = Driver(library, lambda _: 0)

    def load_and_launch() -> None:
        function = driver.load_function(driver.load_module(CUBIN, 0), "k", 0, 100000, 1)
        prepare_launch(driver, function, Geometry((1, 1, 1), 1, 0), (), ())([])

    with pytest.raises(DriverError, match=message):
        load_and_launch()


def test_unknown_error_codes_keep_their_number():
    with pytest.raises(DriverError, match="doing: CUDA error 4711"):
        Driver(FakeLibrary(), lambda _: 0).check(4711, "doing")


def test_text_is_never_compiled():
    """The driver compiles PTX given where a cubin is expected."""
    with pytest.raises(DriverError, match="14 bytes that are no cubin"):
        Driver(FakeLibrary(), lambda _: 0).load_module(b".version 8.0\n\n", 0)


def test_modules_are_unloaded_by_the_next_load_on_their_device(caplog: pytest.LogCaptureFixture):
    """They were unloaded by whatever thread dropped them: without the context, under running kernels, in captures."""
    library = FakeLibrary()
    driver = Driver(library, lambda _: 0)
    first, second, elsewhere = driver.load_module(CUBIN, 0), driver.load_module(CUBIN, 0), driver.load_module(CUBIN, 1)
    del first, second, elsewhere
    library.capturing = True
    driver.load_module(CUBIN, 0)
    assert library.calls == []
    library.capturing = False
    kept = driver.load_module(CUBIN, 0)
    assert library.calls == [("synchronize", 0), ("unload", 77), ("unload", 78), ("unload", 80)]
    driver.load_function(kept, "k", 0, 0, 1)
    library.calls.clear()
    library.fail = {"unload": INVALID_VALUE}
    driver.load_module(CUBIN, 1)
    assert library.calls == [("synchronize", 0), ("unload", 79)]
    assert "unloading a kernel from device 1: CUDA error 1" in caplog.text


def test_a_load_beside_a_capture_in_another_thread_leaves_unloading_to_the_next():
    """It failed, and forgot what there was to unload: no device can be waited for while a stream of it captures."""
    library = FakeLibrary()
    driver = Driver(library, lambda _: 0)
    driver.load_module(CUBIN, 0)
    library.fail = {"synchronize": 900}
    kept = driver.load_module(CUBIN, 0)
    library.fail = {}
    also_kept = driver.load_module(CUBIN, 0)
    assert library.calls == [("synchronize", 0), ("synchronize", 0), ("unload", 77)]
    assert kept is not also_kept


def test_a_fault_of_the_device_is_told_before_code_is_unloaded():
    library = FakeLibrary()
    driver = Driver(library, lambda _: 0)
    driver.load_module(CUBIN, 0)
    library.fail = {"synchronize": OUT_OF_MEMORY}
    with pytest.raises(DriverError, match="waiting for the device before kernels are unloaded: CUDA_ERROR_OUT_OF_MEM"):
        driver.load_module(CUBIN, 0)
    assert [what for what, _ in library.calls] == ["synchronize"]
