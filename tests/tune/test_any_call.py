"""Any legal call of a tuned matmul gets the right values, from a legal kernel or from the form's own operators."""

import pytest
from devices import current_cuda_target
from matmul_calls import CALLS, Call, Server, first_builds, form_of

from tune_model.runtime.program import Form
from tune_model.tune.families import family_named
from tune_model.tune.machine.cpu import probe_cpu
from tune_model.tune.target import CudaTarget, Target

SIZES = (1, 16, 64)
TAILS = ("gelu", "residual", "swiglu")
CPU = ("aten", "cpp_gemv", "cpp_epilogue", "mkldnn_linear")
CUDA = (
    ("aten", {}),
    ("aten_transposed", {}),
    ("triton_epilogue", {"layout": "plain"}),
    ("triton_epilogue", {"layout": "transposed"}),
    ("library_halves", {"layout": "plain"}),
    ("library_halves", {"layout": "transposed"}),
    ("cublaslt", {"layout": "plain"}),
    ("cublaslt", {"layout": "transposed"}),
    ("triton_gemv", {"layout": "plain", "pdl": False}),
    ("triton_gemv", {"layout": "transposed", "prefetch": True}),
    ("triton_matmul", {"layout": "plain", "pdl": False}),
    ("triton_matmul", {"layout": "plain", "prefetch": True}),
    ("triton_matmul", {"layout": "transposed", "swap": True}),
    ("triton_split_k", {"layout": "plain", "pdl": False}),
    ("triton_split_k", {"layout": "transposed", "prefetch": True}),
    ("triton_persistent", {"layout": "plain", "pdl": False}),
    ("triton_persistent", {"layout": "transposed", "prefetch": True}),
    ("triton_persistent", {"layout": "plain", "store": True}),
)


def serve(family: str, form: Form, target: Target, chosen: dict[str, object] | None = None, offset: int = 0) -> Server:
    device = "cuda" if isinstance(target, CudaTarget) else "cpu"
    builds = first_builds(family_named(family), form, target, SIZES, chosen or {})
    if not builds:
        pytest.skip(f"{family} takes no such form with {chosen}")
    return Server(family, form, builds, device, offset=offset)


def check_all(server: Server, calls: tuple[Call, ...] = CALLS) -> None:
    outcomes = {call.name: server.check(call) for call in calls}
    assert {"exact", "near"} & set(outcomes.values()), outcomes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("family", CPU)
def test_on_a_cpu(family: str, tail: str, dtype: str):
    check_all(serve(family, form_of(tail, dtype), probe_cpu()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gate_and_up_apart_on_a_cpu(dtype: str):
    check_all(serve("library_halves", form_of("swiglu", dtype), probe_cpu()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_projection_in_parts_on_a_cpu(dtype: str):
    check_all(serve("aten_parts", form_of("", dtype), probe_cpu()))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["plain", "transposed"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_projection_in_parts_on_a_gpu(dtype: str, layout: str):
    check_all(serve("aten_parts", form_of("", dtype), current_cuda_target(), {"layout": layout}))


@pytest.mark.parametrize("offset", [1, 3])
@pytest.mark.parametrize("family", ["aten", "cpp_gemv", "cpp_epilogue"])
def test_weights_at_any_address_on_a_cpu(family: str, offset: int):
    check_all(serve(family, form_of("gelu", "float32"), probe_cpu(), offset=offset))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("family", "chosen"), CUDA)
def test_on_a_gpu(family: str, chosen: dict[str, object], tail: str, dtype: str):
    check_all(serve(family, form_of(tail, dtype), current_cuda_target(), chosen))


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [1, 4])
@pytest.mark.parametrize(("family", "chosen"), CUDA)
def test_weights_at_any_address_on_a_gpu(family: str, chosen: dict[str, object], offset: int):
    """Kernels that were promised 16 bytes are passed over: the form's own operators read any address."""
    server = serve(family, form_of("residual", "bfloat16"), current_cuda_target(), chosen, offset)
    for call in CALLS:
        outcome = server.check(call)
        assert outcome == "miss" or not family.startswith("triton_") or family == "triton_epilogue", call.name
