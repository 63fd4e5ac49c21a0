"""Batched products as extract hands them over: their canonical forms are tasks that the Triton families take."""

import pytest
import torch
from devices import cuda_target
from product_forms import batched
from raw_programs import Function, raw_program
from torch.nn import functional as F  # noqa: N812 - what it is called everywhere

from tune_model.extract.regions.group import group
from tune_model.extract.rewrite import rewrite
from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.expression import evaluate
from tune_model.runtime.kernel import CudaLaunch
from tune_model.runtime.program import Apply, Form, bind_form
from tune_model.runtime.replay import slot_sizes, unmet
from tune_model.tune.candidate import Built, Effort, Rejected
from tune_model.tune.families import families_for, family_named

HOPPER = cuda_target()


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).bfloat16()


def matmuls(module: Function, **inputs) -> list[Form]:
    """The matmul forms of a function, in order."""
    program = group(rewrite(raw_program(module, **inputs))).program
    forms = [program.forms[step.form] for step in program.steps if isinstance(step, Apply)]
    return [form for form in forms if form.kind == "matmul"]


def gated(q, k, v):
    """Two products with something between that is not a softmax, which would make them attention."""
    return torch.sigmoid(q @ k.transpose(-1, -2) * 0.3) @ v


def experts(x, w):
    return F.silu(torch.bmm(x.expand(3, -1, -1), w))


def crosswise(x, y):
    return torch.bmm(x.transpose(0, 1), y.transpose(0, 1))


def biased(q, k, c):
    return torch.baddbmm(c, q, k.transpose(1, 2), beta=0.5, alpha=0.25)


def summed(x, w):
    return torch.einsum("bhtd,hde->bthe", x, w)


def shared(x, w):
    """One matrix for all heads, another for each."""
    return torch.matmul(x, w[:, None])


HEADS = ("batch", 4, "sequence", 16)
CASES = {
    "gated": matmuls(
        Function(gated),
        q=(normal(2, 4, 5, 16), HEADS),
        k=(normal(2, 4, 5, 16), HEADS),
        v=(normal(2, 4, 5, 16), HEADS),
    ),
    "experts": matmuls(Function(experts, (3, 32, 16), dtype=torch.bfloat16), x=(normal(1, 5, 32), (1, "sequence", 32))),
    "biased": matmuls(
        Function(biased),
        q=(normal(6, 5, 16), ("batch", "sequence", 16)),
        k=(normal(6, 5, 16), ("batch", "sequence", 16)),
        c=(normal(6, 1, 5), ("batch", 1, "sequence")),
    ),
    "einsum": matmuls(Function(summed, (4, 16, 24), dtype=torch.bfloat16), x=(normal(2, 4, 5, 16), HEADS)),
    "broadcast": matmuls(Function(shared), x=(normal(2, 4, 5, 16), HEADS), w=(normal(2, 16, 24), ("batch", 16, 24))),
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
        assert "triton_split_k" not in accepting, "dot products this short have nothing to divide"
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


def test_few_batches_of_long_products_are_split_too():
    task = Task(batched(4, 16, 128, 4096, "bfloat16"), NumericRules())
    family = family_named("triton_split_k")
    assert family.accepts(task, HOPPER) is None
    for last_adds in (True, False):
        config = next(
            c for c in family.configurations(task, HOPPER, Effort.BALANCED) if dict(c)["last_adds"] == last_adds
        )
        built = family.build(task, config, HOPPER)
        assert isinstance(built, Built), built
        launches = [step for step in built.kernel.steps if isinstance(step, CudaLaunch)]
        sizes = slot_sizes(task.form)
        assert {evaluate(launch.grid[2], sizes) for launch in launches} == {4}
        parts = next(w for w in built.kernel.workspaces if not w.counters)
        assert evaluate(parts.size, sizes) == 4 * 16 * 128 * int(dict(config)["split_k"])
        if last_adds:
            (counters,) = [w for w in built.kernel.workspaces if w.counters]
            assert evaluate(counters.size, sizes) == 4 * evaluate(launches[0].grid[0], sizes)


def test_many_batches_fill_the_device_unsplit():
    task = Task(batched(1024, 64, 128, 4096, "bfloat16"), NumericRules())
    refused = family_named("triton_split_k").accepts(task, HOPPER)
    assert refused == Rejected("unsupported", "1024 of 64 x 128 x 4096 fills the device unsplit")
