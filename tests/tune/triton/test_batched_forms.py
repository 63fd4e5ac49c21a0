"""Batched products as extract hands them over: their canonical forms are tasks that the Triton families take."""

import pytest
import torch
from devices import cuda_target
from raw_programs import Function, raw_program
from torch.nn import functional as F  # noqa: N812 - what it is called everywhere

from tune_model.extract.regions.group import group
from tune_model.extract.rewrite import rewrite
from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.kernel import CudaLaunch
from tune_model.runtime.program import Apply, Form, bind_form
from tune_model.runtime.replay import slot_sizes, unmet
from tune_model.tune.candidate import Built
from tune_model.tune.families import families_for, family_named

HOPPER = cuda_target()


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).bfloat16()


def matmuls(module: Function, **inputs) -> list[Form]:
    """The matmul forms of a function, in order."""
    program = group(rewrite(raw_program(module, **inputs))).program
    forms = [program.forms[step.form] for step in program.steps if isinstance(step, Apply)]
    return [form for form in forms if form.kind == "matmul"]


def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) * 0.3, -1) @ v


def experts(x, w):
    return F.silu(torch.bmm(x.expand(3, -1, -1), w))


def crosswise(x, y):
    return torch.bmm(x.transpose(0, 1), y.transpose(0, 1))


HEADS = ("batch", 4, "sequence", 16)
CASES = {
    "attention": matmuls(
        Function(attention),
        q=(normal(2, 4, 5, 16), HEADS),
        k=(normal(2, 4, 5, 16), HEADS),
        v=(normal(2, 4, 5, 16), HEADS),
    ),
    "experts": matmuls(Function(experts, (3, 32, 16), dtype=torch.bfloat16), x=(normal(1, 5, 32), (1, "sequence", 32))),
    "crosswise": matmuls(
        Function(crosswise), x=(normal(5, 3, 16), ("batch", 3, 16)), y=(normal(16, 3, 24), (16, 3, 24))
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_batched_products_are_raced(name: str):
    assert CASES[name]
    for symbolic in CASES[name]:
        task = Task(bind_form(symbolic, (8, 24)[: len(symbolic.dims)]), NumericRules())
        accepting = [f.name for f in families_for(HOPPER) if "matmul" in f.kinds and f.accepts(task, HOPPER) is None]
        assert "triton_matmul" in accepting
        assert "triton_split_k" not in accepting
        family = family_named("triton_matmul")
        built = family.build(task, family.start(task, HOPPER), HOPPER)
        assert isinstance(built, Built), built
        (launch,) = [step for step in built.kernel.steps if isinstance(step, CudaLaunch)]
        assert launch.grid[2] != 1
        assert not [p for r in built.kernel.requires if (p := unmet(r, slot_sizes(task.form), {}))]


def test_another_batch_and_other_rows_are_served_by_the_same_kernel():
    (symbolic,) = CASES["experts"]
    task = Task(bind_form(symbolic, (8,)), NumericRules())
    family = family_named("triton_matmul")
    built = family.build(task, family.start(task, HOPPER), HOPPER)
    assert isinstance(built, Built)
    other = slot_sizes(bind_form(symbolic, (100,)))
    assert not [p for r in built.kernel.requires if (p := unmet(r, other, {}))]


def test_single_rows_of_batches_have_the_gemv_too():
    (symbolic,) = CASES["experts"]
    task = Task(bind_form(symbolic, (1,)), NumericRules())
    assert family_named("triton_gemv").accepts(task, HOPPER) is None
