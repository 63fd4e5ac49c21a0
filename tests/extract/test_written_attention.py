"""Attention written out in products and a softmax becomes one operator, where that says the same."""

from collections.abc import Callable

import pytest
import torch
from raw_programs import Example, Function, ops, raw_program, relative_error, run
from torch import Tensor

from tune_model.extract.plan import lower
from tune_model.extract.rewrite.spelling import spell
from tune_model.extract.rewrite.written_attention import recognise_written_attention
from tune_model.extract.tracing.front_end import Trace

BATCH, HEADS, QUERIES, KEYS, DEPTH = 2, 3, 5, 7, 8
LEAST = torch.finfo(torch.float32).min
OPERATOR = "scaled_dot_product_attention"


def normal(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


GIVEN: dict[str, Example] = {
    "q": (normal(BATCH, HEADS, QUERIES, DEPTH), ("batch", HEADS, "queries", DEPTH)),
    "k": (normal(BATCH, HEADS, KEYS, DEPTH, seed=8), ("batch", HEADS, "keys", DEPTH)),
    "v": (normal(BATCH, HEADS, KEYS, DEPTH, seed=9), ("batch", HEADS, "keys", DEPTH)),
    "bias": (normal(HEADS, QUERIES, KEYS, seed=10), (HEADS, "queries", "keys")),
    "padding": (normal(BATCH, 1, 1, KEYS, seed=11), ("batch", 1, 1, "keys")),
}


def recognised(function: Callable[..., object], given: dict[str, Example] = GIVEN, tolerance: float = 1e-6) -> bool:
    """Rewrite, and run the whole lowering as well: values must stay. Returns whether the operator is there."""
    raw = raw_program(Function(function), **given)
    tensors = {name: example for name, (example, _) in given.items()}
    expected = run(raw, tensors)
    rewritten = recognise_written_attention(spell(raw))
    for program in (rewritten, lower(Trace(raw, {})).trace.program):
        for actual, wanted in zip(run(program, tensors), expected, strict=True):
            assert actual.dtype == wanted.dtype
            assert relative_error(actual, wanted) < tolerance
    found = OPERATOR in ops(rewritten)
    assert not (found and "softmax.int" in ops(rewritten))
    return found


def test_products_softmax_and_a_scale():
    def attention(q, k, v, bias, padding):
        return (q @ k.transpose(-2, -1) / DEPTH**0.5).softmax(-1) @ v + 0 * (bias.sum() + padding.sum())

    assert recognised(attention)


def test_everything_that_is_added_is_one_mask():
    """MPNet adds a bias for every distance, then the padding."""

    def attention(q, k, v, bias, padding):
        scores = bias + q @ k.transpose(-2, -1) * 0.3
        return torch.softmax(scores + padding, dim=-1) @ v

    assert recognised(attention)


def test_a_factor_of_what_a_bias_is_added_to():
    """What `baddbmm` is taken apart into."""

    def attention(q, k, v, bias, padding):
        return torch.add(bias + padding, q @ k.transpose(-2, -1), alpha=0.3).softmax(-1) @ v

    def scaled_bias(q, k, v, bias, padding):
        return torch.add(q @ k.transpose(-2, -1), bias + padding, alpha=0.3).softmax(-1) @ v

    assert recognised(attention)
    assert not recognised(scaled_bias)


@pytest.mark.parametrize("fill", [float("-inf"), LEAST])
def test_keys_are_excluded(fill):
    """nanoGPT and its kind."""

    def attention(q, k, v, bias, padding):
        scores = (q @ k.transpose(-2, -1)) * 0.3
        scores = scores.masked_fill((padding > 0.5) & (bias > -3), fill)
        return scores.softmax(-1) @ v

    assert recognised(attention)


def test_a_bias_and_excluded_keys():
    def attention(q, k, v, bias, padding):
        return ((q @ k.transpose(-2, -1) + bias).masked_fill(padding > 0.5, LEAST)).softmax(-1) @ v

    assert recognised(attention)


def test_rows_that_see_nothing_get_the_mean_of_all_as_before():
    def attention(q, k, v, bias, padding):
        return (q @ k.transpose(-2, -1)).masked_fill(padding < 100, LEAST).softmax(-1) @ v + 0 * bias.sum()

    assert recognised(attention)


@pytest.mark.parametrize("returned", ["unfolded", "folded"])
def test_batch_and_heads_folded_around_the_products(returned):
    """BLOOM's and DeBERTa's way: a bias that is folded as well, a mask that is not."""

    def attention(q, k, v, bias, padding):
        folded = [x.flatten(0, 1) for x in (q, k, v)]
        every = bias.expand(q.shape[0], -1, -1, -1).flatten(0, 1)
        scores = torch.bmm(folded[0], folded[1].transpose(1, 2)) * 0.3 + every
        scores = scores.view(q.shape[0], HEADS, q.shape[2], k.shape[2]).masked_fill(padding > 0.5, LEAST)
        out = torch.bmm(scores.softmax(-1).flatten(0, 1), folded[2])
        return out.unflatten(0, (q.shape[0], HEADS)).transpose(1, 2).flatten(2) if returned == "unfolded" else out

    assert recognised(attention)


def test_in_half_precision_with_a_softmax_in_float32():
    def attention(q, k, v, bias, padding):
        scores = q @ k.transpose(-2, -1) * 0.25 + bias
        return torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v + 0 * padding.sum()

    half = {name: (example.bfloat16(), dims) for name, (example, dims) in GIVEN.items()}
    assert recognised(attention, half, tolerance=2e-2)


@pytest.mark.parametrize(
    "attention",
    [
        lambda q, k, v, bias, padding: ((q @ k.transpose(-2, -1) + bias) * 0.3).softmax(-1) @ v,  # scaled bias
        lambda q, k, v, bias, padding: (q @ k.transpose(-2, -1)).softmax(-2) @ v,
        lambda q, k, v, bias, padding: (q @ k.transpose(-2, -1)).masked_fill(padding > 0, -5.0).softmax(-1) @ v,
        lambda q, k, v, bias, padding: (q @ k[:, :1].transpose(-2, -1)).softmax(-1) @ v,  # one key head for all
        lambda q, k, v, bias, padding: (
            (q @ k.transpose(-2, -1) + bias).masked_fill(padding > 1, -torch.inf).softmax(-1) @ v
        ),
        lambda q, k, v, bias, padding: (q @ k.transpose(-2, -1)).sigmoid() @ v,
    ],
)
def test_what_says_something_else_stays(attention):
    assert not recognised(
        lambda q, k, v, bias, padding: attention(q, k, v, bias, padding) + 0 * (bias.sum() + padding.sum())
    )


def test_weights_that_are_returned_stay():
    def attention(q, k, v, bias, padding):
        weights = (q @ k.transpose(-2, -1) + bias + padding).softmax(-1)
        return weights @ v, weights

    assert not recognised(attention)
