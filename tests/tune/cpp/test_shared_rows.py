"""Few long rows, each cut between threads, as the tuner builds them and the runtime binds them."""

import math

import pytest
import torch
from family_runs import run
from form_builder import FormBuilder, random_inputs
from nearness import assert_near

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.program import Form
from tune_model.tune.candidate import Built, Effort
from tune_model.tune.cpp.shared_rows import can_share
from tune_model.tune.families import cpp_rows
from tune_model.tune.loops.ir import LoopNest
from tune_model.tune.loops.lower import lower
from tune_model.tune.machine.cpu import probe_cpu
from tune_model.tune.target import CpuTarget

TARGET = probe_cpu()
COLUMNS = 20011


def check(form: Form, inputs: list[torch.Tensor] | None = None, chunks: int = 3) -> None:
    inputs = random_inputs(form) if inputs is None else inputs
    config = (("unroll", 2), ("keep", "costly"), ("grain", 16384), ("chunks", chunks))
    made = cpp_rows.FAMILY.build(Task(form, NumericRules()), config, TARGET)
    assert isinstance(made, Built), made
    assert_near(form, inputs, run(made, form, [t.clone() for t in inputs]))


def single(op: str, *arguments: object, rows: int = 3, dtype: str = "float32", **keywords: object) -> Form:
    b = FormBuilder("reduction")
    return b.form(b.call(op, b.input((rows, COLUMNS), dtype), *arguments, **keywords))


def special() -> torch.Tensor:
    x = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(0))
    x[0, 15000] = math.nan
    x[1] = -math.inf
    x[2, 7:] = -math.inf
    return x


@pytest.mark.parametrize("op", ["softmax.int", "log_softmax.int", "argmax.default", "argmin.default"])
def test_infinities_and_nan(op: str):
    check(single(op, -1), [special()])


@pytest.mark.parametrize("op", ["sum.dim_IntList", "mean.dim", "amax.default", "logsumexp.default"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_value_per_row(op: str, dtype: str):
    check(single(op, [-1], dtype=dtype))


def test_variance_truth_and_products():
    check(single("var.correction", [-1]))
    b = FormBuilder("reduction")
    x = b.input((2, COLUMNS), "bool")
    check(b.form(b.call("any.dim", x, -1), b.call("all.dim", x, -1)))
    form = single("prod.dim_int", -1, rows=1)
    check(form, [1 + 1e-4 * random_inputs(form)[0]])


def test_layer_norm_and_the_sum_before_it():
    b = FormBuilder("reduction")
    x, y, w = b.input((2, COLUMNS)), b.input((2, COLUMNS)), b.input((COLUMNS,))
    total = b.call("add.Tensor", x, y)
    check(b.form(total, b.call("layer_norm.default", total, [COLUMNS], w, w)))


@pytest.mark.parametrize("chunks", [2, 5, 64])
def test_any_number_of_chunks(chunks: int):
    """The last ones may have nothing to do."""
    check(single("softmax.int", -1, rows=1), chunks=chunks)
    b = FormBuilder("reduction")
    x = b.input((1, 100))
    check(b.form(b.call("argmax.default", x, -1), b.call("sum.dim_IntList", x, [-1])), chunks=chunks)


def test_it_is_offered_for_few_long_rows_only():
    target = CpuTarget(TARGET.machine, TARGET.isa, TARGET.name, 8, 1 << 20, 1 << 25, TARGET.compiler, TARGET.torch)

    def offered(form: Form) -> set[int]:
        configs = cpp_rows.FAMILY.configurations(Task(form, NumericRules()), target, Effort.BALANCED)
        return {int(dict(config)["chunks"]) for config in configs}

    assert offered(single("softmax.int", -1)) == {1, 8, 32}
    assert offered(single("softmax.int", -1, rows=64)) == {1}
    b = FormBuilder("reduction")
    assert offered(b.form(b.call("softmax.int", b.input((1, 1000)), -1))) == {1}


def test_concatenated_rows_are_not_cut():
    b = FormBuilder("reduction")
    joined = b.call("cat.default", [b.input((2, 9000)), b.input((2, 9000))], 1)
    nest = lower(b.form(b.call("softmax.int", joined, -1)))
    assert isinstance(nest, LoopNest)
    assert not can_share(nest)
