"""Row kernels on a real GPU, bound and launched as the runtime does, many corners of each space, against float64."""

import math

import pytest
import torch
from devices import current_cuda_target
from form_builder import FormBuilder, random_inputs
from form_runs import on_gpu
from nearness import assert_near
from row_forms import argmax, gelu_chain, normal_rope, rms_norm, rope, softmax

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.execution.binding import bind_kernel
from tune_model.runtime.program import Form
from tune_model.tune.candidate import Built, Candidate, Effort, label
from tune_model.tune.families import triton_pointwise, triton_rows, triton_split_rows

pytestmark = pytest.mark.gpu

ROWS, SPLIT, POINTWISE = triton_rows.FAMILY, triton_split_rows.FAMILY, triton_pointwise.FAMILY


def corners(family, form: Form, most: int) -> list:
    """The first configurations, and one for every value that a parameter takes."""
    configs = list(family.configurations(Task(form, NumericRules()), current_cuda_target(), Effort.BALANCED))
    seen = {pair: config for config in reversed(configs) for pair in config}
    return list(dict.fromkeys([*configs[:3], *seen.values()]))[:most]


def check(family, form: Form, inputs: list[torch.Tensor] | None = None, most: int = 14) -> None:
    inputs = random_inputs(form) if inputs is None else inputs
    task, target = Task(form, NumericRules()), current_cuda_target()
    moved = [on_gpu(t) for t in inputs]
    ran = 0
    for config in corners(family, form, most):
        built = family.build(task, config, target)
        if not isinstance(built, Built):
            assert built.reason in {"spills", "registers", "shared memory"}, (label(Candidate("", config)), built)
            continue
        bound = bind_kernel(built.kernel, form, built.code, torch.device("cuda"))
        for _ in range(2):  # counters must be back at zero
            results = [r.cpu() for r in bound(list(moved))]
            torch.cuda.synchronize()
            assert_near(form, inputs, results)
        ran += 1
    assert ran


def single(op: str, *arguments: object, shape: tuple[int, ...], dtype: str = "bfloat16", **keywords: object) -> Form:
    b = FormBuilder("reduction")
    return b.form(b.call(op, b.input(shape, dtype), *arguments, **keywords))


def special(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    x[1, columns // 2] = math.nan
    x[2] = -math.inf
    x[3, 5:] = -math.inf
    x[0] += 100.0
    return x.to(dtype)


@pytest.mark.parametrize(("family", "columns"), [(ROWS, 5000), (ROWS, 70000), (SPLIT, 70000)])
@pytest.mark.parametrize("op", ["softmax.int", "log_softmax.int", "argmax.default"])
def test_infinities_and_nan(op: str, family, columns: int):
    check(family, single(op, -1, shape=(4, columns)), [special(4, columns, torch.bfloat16)])


@pytest.mark.parametrize("op", ["sum.dim_IntList", "mean.dim", "logsumexp.default", "amax.default"])
def test_one_value_per_row(op: str):
    form = single(op, [-1], shape=(4, 100000))
    check(ROWS, form, [special(4, 100000, torch.bfloat16)])
    check(SPLIT, form, [special(4, 100000, torch.bfloat16)])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_variance_and_layer_norm(dtype: str):
    for form in (single("var.correction", [-1], shape=(4, 65536), dtype=dtype), layer_norm(4, 65536, dtype)):
        check(SPLIT, form)
    check(ROWS, layer_norm(300, 5000, dtype))


def layer_norm(rows: int, columns: int, dtype: str) -> Form:
    b = FormBuilder("reduction")
    x, w, c = b.input((rows, columns), dtype), b.input((columns,), dtype), b.input((columns,), dtype)
    return b.form(b.call("layer_norm.default", x, [columns], w, c))


def test_leading_dims():
    for rows, columns in ((4096, 1024), (70, 3000), (32768, 64)):
        b = FormBuilder("reduction")
        x = b.input((columns, rows), "bfloat16", (1, columns))
        form = b.form(b.call("sum.dim_IntList", x, [-1], True))
        check(ROWS, form)
        if any(True for _ in SPLIT.configurations(Task(form, NumericRules()), current_cuda_target(), Effort.QUICK)):
            check(SPLIT, form)


def test_short_rows_and_chains():
    check(ROWS, rms_norm(5000, 64))
    check(ROWS, softmax(3000, 100, "bfloat16"))
    check(POINTWISE, gelu_chain(300, 1000))
    check(POINTWISE, gelu_chain(7, 33))


def test_halves_of_heads():
    check(POINTWISE, rope(300, 40, 128))
    check(POINTWISE, rope(7, 3, 80, "float32"))
    check(ROWS, normal_rope(300, 8, 128))


def test_a_vocabulary():
    check(SPLIT, argmax(16, 128256))
    check(SPLIT, softmax(16, 128256, "bfloat16"))
