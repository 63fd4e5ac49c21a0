"""Cubins launched through the driver on a real GPU."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from small_programs import f32

from tune_model.runtime.execution.binding import BoundKernel, bind_kernel
from tune_model.runtime.kernel import CudaLaunch, Integer, Kernel, Null, Pointer, Scalar
from tune_model.runtime.launch.cuda_driver import DriverError
from tune_model.runtime.launch.machine_code import CodeLoader
from tune_model.runtime.program import Form, Parameter, TensorType

pytestmark = pytest.mark.gpu

BLOCK = 256
SIGNATURE = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32", "scale": "fp32"}


def arch() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def form(n: int) -> Form:
    return Form("pointwise", (), (Parameter("a0", f32(n)), Parameter("a1", f32(n))), (), (Parameter("t0", f32(n)),))


def add_kernel(*, programmatic: bool = False, scale: float = 0.5) -> tuple[Kernel, dict[str, bytes]]:
    import launch_kernels

    function = launch_kernels.add_scaled_programmatic if programmatic else launch_kernels.add_scaled
    code, cubin, metadata = launch_kernels.build(function, SIGNATURE, arch(), {"num_warps": 4}, block=BLOCK)
    launch = CudaLaunch(
        code,
        metadata.name,
        (f"cdiv(a0.size0, {BLOCK})", 1, 1),
        metadata.num_warps,
        metadata.shared,
        (Pointer("a0"), Pointer("a1"), Pointer("t0"), Integer("a0.size0"), Scalar(scale), Null(), Null()),
        programmatic=programmatic,
    )
    return Kernel((launch,)), {code: cubin}


@pytest.fixture(scope="module")
def added() -> tuple[Kernel, dict[str, bytes]]:
    return add_kernel()


def bound(added: tuple[Kernel, dict[str, bytes]], n: int, device: str = "cuda") -> BoundKernel:
    torch.empty(1, device=device)
    return bind_kernel(added[0], form(n), added[1], torch.device(device))


@pytest.mark.parametrize("n", [0, 1, 255, 256, 257, 1_000_003])
def test_values_are_right_at_every_size(added: tuple[Kernel, dict[str, bytes]], n: int):
    run = bound(added, n)
    for _ in range(3):
        x, y = torch.randn(2, n, device="cuda").unbind()
        x, y = x.clone(), y.clone()
        assert torch.equal(run([x, y])[0], x + 0.5 * y)


def test_launches_follow_torchs_current_stream(added: tuple[Kernel, dict[str, bytes]]):
    """The input is written late, on a side stream: a launch anywhere else reads zeros."""
    n = 1 << 20
    run = bound(added, n)
    x, y = torch.zeros(n, device="cuda"), torch.zeros(n, device="cuda")
    run([x, y])
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(3.0)
        (out,) = run([x, y])
    side.synchronize()
    assert bool((out == 3.0).all())
    torch.cuda._sleep(50_000_000)
    x.fill_(5.0)
    (out,) = run([x, y])  # and back on the default stream
    assert bool((out == 5.0).all())


def test_programmatic_launches_see_their_predecessors_writes():
    n = 1 << 22
    run = bound(add_kernel(programmatic=True, scale=1.0), n)
    one = torch.ones(n, device="cuda")
    total = torch.zeros(n, device="cuda")
    buffers = [torch.empty(n, device="cuda") for _ in range(2)]
    for i in range(20):
        (total,) = run([total, one], [buffers[i % 2]])
    assert bool((total == 20.0).all())


def test_a_kernel_with_more_than_48_kb_of_shared_memory():
    import launch_kernels

    signature = {"a": "*bf16", "b": "*bf16", "c": "*fp32", "m": "i32", "n": "i32", "k": "i32"}
    options = {"num_warps": 8, "num_stages": 4}
    code, cubin, metadata = launch_kernels.build(
        launch_kernels.multiply, signature, arch(), options, block_m=128, block_n=128, block_k=64
    )
    assert metadata.shared > 48 * 1024
    sizes = (Integer("c.size0"), Integer("c.size1"), Integer("a.size1"))
    launch = CudaLaunch(
        code,
        metadata.name,
        ("cdiv(c.size0, 128)", "cdiv(c.size1, 128)", 1),
        metadata.num_warps,
        metadata.shared,
        (Pointer("a"), Pointer("b"), Pointer("c"), *sizes, Null(), Null()),
    )
    m, n, k = 300, 200, 512
    parameters = (Parameter("a", TensorType("bfloat16", (m, k))), Parameter("b", TensorType("bfloat16", (n, k))))
    matmul = Form("matmul", (), parameters, (), (Parameter("c", f32(m, n)),))
    a, b = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16()
    (out,) = bind_kernel(Kernel((launch,)), matmul, {code: cubin}, torch.device("cuda"))([a, b])
    torch.testing.assert_close(out.double(), a.double() @ b.double().T, atol=1e-2, rtol=1e-4)


FIRST_CALL = """
import pickle, sys, torch
from pathlib import Path
from tune_model.runtime.execution.binding import bind_kernel
kernel, code, form = pickle.loads(Path(sys.argv[1]).read_bytes())
x, y, out = (torch.full((1000,), float(i), device="cuda") for i in range(3))
run = bind_kernel(kernel, form, code, torch.device("cuda"))
side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
torch.cuda.synchronize()
with torch.cuda.stream(side):
    graph.capture_begin()
    run([x, y], [out])
    graph.capture_end()
torch.cuda.synchronize()
assert bool((out == 2.0).all()), "capturing must not run"
x.fill_(7.0)
graph.replay()
torch.cuda.synchronize()
assert bool((out == 7.5).all())
assert "triton" not in sys.modules
"""


def test_the_very_first_launch_may_be_inside_a_capture(added: tuple[Kernel, dict[str, bytes]], tmp_path: Path):
    import pickle

    (tmp_path / "kernel").write_bytes(pickle.dumps((added[0], added[1], form(1000))))
    command = [sys.executable, "-c", FIRST_CALL, str(tmp_path / "kernel")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_threads_launch_side_by_side(added: tuple[Kernel, dict[str, bytes]]):
    """Also the first launch of a thread that has not used CUDA before."""
    n = 4096
    run = bound(added, n)
    inputs = [torch.full((n,), float(i), device="cuda") for i in range(8)]
    wrong: list[object] = []

    def work(i: int) -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(200):
                    (out,) = run([inputs[i], inputs[i]])
                    if float(out.max()) != 1.5 * i or float(out.min()) != 1.5 * i:
                        wrong.append((i, float(out.max())))
        except BaseException as error:  # noqa: BLE001 (a thread's failure must reach the test)
            wrong.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_bad_cubins_are_one_clear_error(added: tuple[Kernel, dict[str, bytes]]):
    kernel, code = added
    (key,) = code
    with pytest.raises(DriverError, match="loading a kernel: CUDA_ERROR_"):
        bind_kernel(kernel, form(8), {key: b"\x7fELF" + bytes(1000)}, torch.device("cuda"))
    launch = kernel.steps[0]
    assert isinstance(launch, CudaLaunch)
    other = Kernel((CudaLaunch(key, "no_such_kernel", (1, 1, 1), 4, 0, ()),))
    with pytest.raises(DriverError, match="finding kernel 'no_such_kernel': CUDA_ERROR_NOT_FOUND"):
        bind_kernel(other, form(8), code, torch.device("cuda"))
    greedy = Kernel((CudaLaunch(key, launch.entry, (1, 1, 1), 4, 1 << 20, launch.arguments),))
    with pytest.raises(DriverError, match="needs 1048576 bytes of shared memory"):
        bind_kernel(greedy, form(8), code, torch.device("cuda"))


def test_modules_are_unloaded_with_their_last_kernel(added: tuple[Kernel, dict[str, bytes]]):
    """The tuner loads thousands; memory must come back."""
    kernel, code = added
    for _ in range(50):
        run = bind_kernel(kernel, form(8), CodeLoader(code), torch.device("cuda"))
    x = torch.ones(8, device="cuda")
    assert float(run([x, x])[0][0]) == 1.5


@pytest.mark.skipif("torch.cuda.device_count() < 2")
def test_kernels_run_on_another_device_than_the_current_one(added: tuple[Kernel, dict[str, bytes]]):
    x = torch.ones(8, device="cuda:1")
    (out,) = bound(added, 8, "cuda:1")([x, x])
    assert out.device == x.device
    assert bool((out == 1.5).all())
