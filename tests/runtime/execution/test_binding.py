import threading
from pathlib import Path

import pytest
import torch
from small_programs import build_library, call, f32, linear_relu

from tune_model.runtime.execution.binding import BoundKernel, bind_kernel, body_kernel
from tune_model.runtime.execution.emission import KernelError
from tune_model.runtime.kernel import Aligned, CpuLaunch, CudaLaunch, Kernel, Workspace
from tune_model.runtime.launch.cpu_library import LibraryError, find_entry, load_library
from tune_model.runtime.launch.cuda_driver import DriverError
from tune_model.runtime.launch.machine_code import CodeLoader, CodeMissingError
from tune_model.runtime.program import Form, Parameter, bind_form

CPU = torch.device("cpu")

SOURCE = """
#include <algorithm>
#include <cstdint>
#include <cstring>

// pointers: x (m, k), w (n, k), b (n), out (m, n); sizes: m, n, k
extern "C" void linear_relu(void *const *pointers, const int64_t *sizes) {
  const float *x = (const float *)pointers[0], *w = (const float *)pointers[1], *b = (const float *)pointers[2];
  float *out = (float *)pointers[3];
  const int64_t m = sizes[0], n = sizes[1], k = sizes[2];
#pragma omp parallel for
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < n; j++) {
      float sum = b[j];
      for (int64_t l = 0; l < k; l++) sum += x[i * k + l] * w[j * k + l];
      out[i * n + j] = std::max(sum, 0.0f);
    }
}

// pointers: from, to; sizes: elements. Adds one.
extern "C" void add_one(void *const *pointers, const int64_t *sizes) {
  for (int64_t i = 0; i < sizes[0]; i++) ((float *)pointers[1])[i] = ((const float *)pointers[0])[i] + 1;
}

// pointers: from; fails loudly (by value) when the address is not a multiple of 64
extern "C" void address(void *const *pointers, const int64_t *sizes) {
  for (int64_t i = 0; i < sizes[0]; i++) ((float *)pointers[1])[i] = (float)((uintptr_t)pointers[0] % 64);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    return build_library(SOURCE, tmp_path_factory.mktemp("library"))


FORM = bind_form(linear_relu(), (5,))
SIZES = ("t1.size0", "t1.size1", "a0.size1")


def inputs(rows: int = 5) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(rows, 8), torch.randn(6, 8), torch.randn(6)]


def reference(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(x.double() @ w.double().T + b.double())


def close(seen: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(seen.double(), expected.double(), atol=1e-5, rtol=1e-5)


def linear(code: str) -> Kernel:
    return Kernel((CpuLaunch(code, "linear_relu", ("a0", "a1", "a2", "t1"), SIZES),))


def test_the_body_is_a_kernel():
    (out,) = bind_kernel(body_kernel(FORM), FORM, {}, CPU)(inputs())
    close(out, reference(*inputs()))


def test_a_library_function_gets_pointers_and_sizes(library: tuple[str, bytes]):
    bound = bind_kernel(linear(library[0]), FORM, dict([library]), CPU)
    (out,) = bound(inputs())
    close(out, reference(*inputs()))
    assert out.shape == (5, 6)


def test_given_outputs_are_written(library: tuple[str, bytes]):
    bound = bind_kernel(linear(library[0]), FORM, dict([library]), CPU)
    given = torch.full((5, 6), float("nan"))
    (out,) = bound(inputs(), [given])
    assert out is given
    close(given, reference(*inputs()))


def test_steps_share_workspaces_and_temporaries(library: tuple[str, bytes]):
    """A library writes a workspace, ATen reads it, a library finishes: all the ways a slot can be made."""
    kernel = Kernel(
        (
            CpuLaunch(library[0], "add_one", ("a0", "ws0"), ("a0.size0*a0.size1",)),
            call("aten.view.default", "@ws0", ("#a0.size0", "#a0.size1"), results=("u0",)),
            call("aten.linear.default", "@u0", "@a1", "@a2", results=("u1",)),
            call("aten.relu.default", "@u1", results=("u2",)),
            CpuLaunch(library[0], "add_one", ("u2", "t1"), ("t1.size0*t1.size1",)),
        ),
        (Workspace("ws0", "float32", "a0.size0*a0.size1"),),
    )
    x, w, b = inputs()
    (out,) = bind_kernel(kernel, FORM, dict([library]), CPU)([x, w, b])
    close(out, reference(x + 1, w, b) + 1)


def test_zeroed_workspaces_are_zero_at_every_call(library: tuple[str, bytes]):
    kernel = Kernel(
        (
            CpuLaunch(library[0], "add_one", ("ws0", "ws0"), (30,)),
            call("aten.view.default", "@ws0", (5, 6), results=("t1",)),
        ),
        (Workspace("ws0", "float32", 30, zeroed=True),),
    )
    bound = bind_kernel(kernel, FORM, dict([library]), CPU)
    for _ in range(2):
        assert torch.equal(bound(inputs())[0], torch.ones(5, 6))


def test_a_call_may_finish_what_a_launch_began(library: tuple[str, bytes]):
    kernel = Kernel((*linear(library[0]).steps, call("aten.mul_.Scalar", "@t1", 2.0, results=("t1",))))
    (out,) = bind_kernel(kernel, FORM, dict([library]), CPU)(inputs())
    close(out, 2 * reference(*inputs()))


def test_results_are_laid_out_as_the_form_says():
    """ATen may lay its result out otherwise; the form's type is a promise to whoever reads it."""
    form = Form(
        "pointwise",
        (),
        (Parameter("a0", f32(4, 3, strides=(1, 4))),),
        (call("aten.relu.default", "@a0", results=("t0",)),),
        (Parameter("t0", f32(4, 3)),),
    )
    x = torch.randn(3, 4).T
    (out,) = bind_kernel(body_kernel(form), form, {}, CPU)([x])
    assert out.stride() == (3, 1)
    assert torch.equal(out, torch.relu(x))


def test_misaligned_activations_are_copied(library: tuple[str, bytes]):
    kernel = Kernel(
        (CpuLaunch(library[0], "address", ("a0", "t1"), (30,)),),
        requires=(Aligned("a0", 32), Aligned("a0", 64), Aligned("t1", 64)),
    )
    bound = bind_kernel(kernel, FORM, dict([library]), CPU)
    memory = torch.randn(5 * 8 + 1)
    x = memory[1:].view(5, 8)
    (out,) = bound([x, *inputs()[1:]])
    assert float(out.max()) == 0.0


def test_threads_do_not_mix_their_pointers(library: tuple[str, bytes]):
    bound = bind_kernel(linear(library[0]), FORM, dict([library]), CPU)
    wrong: list[float] = []

    def work(seed: int) -> None:
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))
        _, w, b = inputs()
        expected = reference(x, w, b)
        for _ in range(200):
            error = float((bound([x, w, b])[0].double() - expected).abs().max())
            if error > 1e-4:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_libraries_with_recycled_descriptors_are_not_confused(tmp_path: Path):
    """glibc hands out a library it has under the same name; the names of memory files repeat."""
    for value in (1.0, 2.0, 3.0):
        source = f'extern "C" void f(void *const *p, const long *) {{ *(float *)p[0] = {value}f; }}'
        code, data = build_library(source, tmp_path)
        form = Form("pointwise", (), (), (), (Parameter("t0", f32(1)),))
        bound = bind_kernel(Kernel((CpuLaunch(code, "f", ("t0",)),)), form, {code: data}, CPU)
        assert bound([])[0].item() == value


def test_libraries_load_where_memory_files_cannot_run(library: tuple[str, bytes], monkeypatch: pytest.MonkeyPatch):
    def refused(name: str, flags: int) -> int:
        raise PermissionError(13, "memory files are sealed against running")

    monkeypatch.setattr("os.memfd_create", refused)
    assert find_entry(load_library(library[1]), "linear_relu")


def test_bad_code_says_what_is_wrong(library: tuple[str, bytes]):
    with pytest.raises(CodeMissingError, match="abc is missing"):
        bind_kernel(linear("abc"), FORM, {}, CPU)
    with pytest.raises(LibraryError, match="does not load"):
        bind_kernel(linear("abc"), FORM, {"abc": b"not a library"}, CPU)
    with pytest.raises(LibraryError, match="no entry 'nothing'"):
        bind_kernel(Kernel((CpuLaunch(library[0], "nothing", ()),)), FORM, dict([library]), CPU)
    with pytest.raises(KernelError, match="'ws9'"):
        bind_kernel(Kernel((CpuLaunch(library[0], "add_one", ("a0", "ws9")),)), FORM, dict([library]), CPU)
    with pytest.raises(KernelError, match="'t1' unmade"):
        bind_kernel(Kernel(()), FORM, {}, CPU)


def test_code_is_loaded_once(library: tuple[str, bytes]):
    class Counting(dict[str, bytes]):
        reads = 0

        def __getitem__(self, key: str) -> bytes:
            self.reads += 1
            return super().__getitem__(key)

    code = Counting([library])
    loader = CodeLoader(code)
    kernels = [bind_kernel(linear(library[0]), FORM, loader, CPU) for _ in range(3)]
    assert code.reads == 1
    assert all(isinstance(kernel, BoundKernel) for kernel in kernels)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_cubin_without_a_driver_is_one_clear_error():
    launch = CudaLaunch("abc", "kernel", (1, 1, 1), 4, 0, ())
    with pytest.raises(DriverError, match="CUDA"):
        bind_kernel(Kernel((launch,)), FORM, {"abc": b""}, torch.device("cuda", 0))
