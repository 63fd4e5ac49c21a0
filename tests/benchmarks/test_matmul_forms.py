"""The benchmark's forms are what extract makes of models, so its figures are about what models run."""

import pytest
import torch
from bench.plans import plan_of, task_of
from form_builder import random_inputs, run_results
from matmuls import forms
from matmuls.epilogues import layers
from matmuls.llama import DECODE, PREFILL
from matmuls.shapes import LARGE, MAX_AUTOTUNE_ROWS, REGRET, ROWS, merge_owners, suite_named
from raw_programs import Function, raw_program
from torch.nn import functional as F  # noqa: N812 - what it is called everywhere

from tune_model.extract.plan import extract
from tune_model.extract.regions.group import group
from tune_model.extract.rewrite import rewrite
from tune_model.extract.task import task_key
from tune_model.pipeline.config import load_config
from tune_model.pipeline.request import make_request
from tune_model.runtime.program import Form, bind_form
from tune_model.tune.estimate import program_bytes

M, N, K = 16, 48, 32


def extracted(function, *weights: tuple[int, ...], residual: bool = False) -> Form:
    """Return what extract makes of a function of x, maybe a residual, and weights, at M rows."""
    x = torch.randn(5, K, dtype=torch.bfloat16)
    inputs = {"x": (x, ("rows", K))}
    if residual:
        inputs["r"] = (torch.randn(5, N, dtype=torch.bfloat16), ("rows", N))
    program = group(rewrite(raw_program(Function(function, *weights, dtype=torch.bfloat16), **inputs))).program
    (form,) = program.forms.values()
    return bind_form(form, (M,))


def test_forms_equal_extracts():
    weight, bias = (N, K), (N,)
    assert forms.linear_form(M, N, K) == extracted(F.linear, weight)
    assert forms.linear_form(M, N, K, bias=True) == extracted(F.linear, weight, bias)
    assert forms.gelu_form(M, N, K) == extracted(lambda x, w, b: F.gelu(F.linear(x, w, b)), weight, bias)
    assert forms.residual_form(M, N, K) == extracted(lambda x, r, w: r + F.linear(x, w), weight, residual=True)
    assert forms.residual_form(M, N, K, bias=True) == extracted(
        lambda x, r, w, b: F.linear(x, w, b) + r, weight, bias, residual=True
    )


def test_llama_has_exactly_these_matmuls():
    """Layers are alike, so two of them give every task. SwiGLU's order of operands follows from sizes: these are it."""
    loaded = load_config("llama-3-8b.yaml", ("model.config.num_hidden_layers=2",))
    grid = loaded.config.workload
    assert (tuple(grid.decode.batch), tuple(grid.prefill.sequence)) == (DECODE, PREFILL)
    tasks = extract(make_request(loaded.config, loaded.folder), check=False).plan.tasks
    found = {task.key for task in tasks if task.task.form.kind == "matmul"}
    assert found == {task_key(task_of(form)) for form in forms.llama_forms(DECODE, PREFILL)}


@pytest.mark.parametrize("layer", layers((3,), scale=64), ids=lambda layer: layer.name)
def test_linear_then_rest_is_the_fused_form(layer):
    inputs = random_inputs(layer.fused)
    (whole,) = run_results(layer.fused, inputs)
    own = len(layer.linear.parameters)
    (product,) = run_results(layer.linear, inputs[:own])
    given = inputs[own:]
    parts = len(layer.tail.parameters) - len(given)
    values = [*product.chunk(parts, -1), *given]
    shaped = [v.reshape(p.type.shape) for v, p in zip(values, layer.tail.parameters, strict=True)]
    (end,) = run_results(layer.tail, shaped)
    assert torch.equal(end.reshape(whole.shape), whole)


def test_a_plan_reads_more_than_a_cache_and_keeps_the_order():
    """Small weights alone would be timed warm, and the tuner begins with the heaviest."""
    wanted = [forms.linear_form(row.m, row.n, row.k) for row in LARGE]
    plan = plan_of(wanted)
    assert [task.task.form for task in plan.tasks] == wanted
    assert min(program_bytes(plan).values()) >= 1 << 32
    work = [task.weight * (3 + max(task.size_bytes / 2e6, task.flops / 3e8)) for task in plan.tasks]
    assert work == sorted(work, reverse=True)
    assert work[-1] > 0


def test_every_distinct_shape_is_there_once():
    assert len({row.name for row in LARGE}) == len(LARGE) == 19 * len(ROWS)
    owners = {(row.n, row.k): row.owners for row in LARGE}
    assert owners[6144, 4096] == ("Llama-3-8B qkv", "Qwen3-8B qkv")
    assert owners[768, 768] == ("BERT-base o", "ViT-B/16 o")
    assert merge_owners([("a", "x", 1, 2), ("b", "y", 1, 2)]) == {(1, 2): ("a x", "b y")}


def test_max_autotune_meets_llama_and_comes_first():
    compared = suite_named(small=False).max_autotune
    assert LARGE[: len(compared)] == compared
    assert len(compared) == 5 * len(MAX_AUTOTUNE_ROWS)
    assert all(any(owner.startswith("Llama-3-8B ") for owner in row.owners) for row in compared)
    assert len(REGRET) == 12
