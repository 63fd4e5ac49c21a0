"""Tokens against distributions worked out in float64."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tune_model.runtime.execution.executor import InputError
from tune_model.runtime.generation.sampling import Needs, Sampling, SamplingRows, needs_of, pick

CPU = torch.device("cpu")
VOCABULARY = 6
LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, 2.0])


def rows_of(*samplings: Sampling, prompt: list[int] | None = None, slots: int = 8) -> SamplingRows:
    rows = SamplingRows(len(samplings), VOCABULARY, slots, CPU)
    for row, sampling in enumerate(samplings):
        rows.set(row, sampling, torch.tensor(prompt or [0]), slots - len(prompt or [0]))
    return rows


def frequencies(sampling: Sampling, logits: Tensor = LOGITS, count: int = 6000) -> Tensor:
    """How often each token is drawn over the positions of one row."""
    rows = rows_of(sampling, slots=count + 1)
    needs = needs_of([sampling])
    drawn = [int(pick(logits[None], rows, 0, torch.tensor([[position]]), needs)) for position in range(1, count + 1)]
    return torch.bincount(torch.tensor(drawn), minlength=VOCABULARY).double() / count


def check(sampling: Sampling, expected: Tensor) -> None:
    found = frequencies(sampling)
    assert set(found.nonzero().flatten().tolist()) == set(expected.nonzero().flatten().tolist())
    assert float((found - expected).abs().max()) < 0.025


def test_draws_follow_the_tempered_distribution():
    check(Sampling(temperature=0.7, seed=3), torch.softmax(LOGITS.double() / 0.7, -1))


def test_top_k_keeps_the_most_likely():
    kept = LOGITS.double().masked_fill(LOGITS < 1.0, float("-inf"))
    check(Sampling(temperature=1.0, top_k=3, seed=4), torch.softmax(kept, -1))


def test_top_k_keeps_ties():
    kept = LOGITS.double().masked_fill(LOGITS < 2.0, float("-inf"))
    check(Sampling(temperature=1.0, top_k=1, seed=4), torch.softmax(kept, -1))


def test_top_p_keeps_what_holds_the_probability():
    probabilities = torch.softmax(LOGITS.double(), -1)
    # 0.36, 0.36, 0.13, ...: 0.75 needs the first three.
    assert probabilities[[0, 5]].sum() < 0.75 < probabilities[[0, 5, 1]].sum()
    kept = torch.where(LOGITS >= 1.0, probabilities, 0.0)
    check(Sampling(temperature=1.0, top_p=0.75, seed=5), kept / kept.sum())


def test_top_p_is_taken_of_what_top_k_left():
    """0.9 of the two that top k leaves needs both; of all six it would need more."""
    kept = LOGITS.double().masked_fill(LOGITS < 2.0, float("-inf"))
    check(Sampling(temperature=1.0, top_k=2, top_p=0.9, seed=6), torch.softmax(kept, -1))


def test_a_tiny_top_p_is_greedy():
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0, 0.0])
    found = frequencies(Sampling(temperature=1.0, top_p=0.01), logits, 50)
    assert float(found[1]) == 1.0


def test_greedy_rows_stay_greedy_beside_drawing_ones():
    greedy, drawing = Sampling(), Sampling(temperature=5.0, top_p=0.9, seed=1)
    rows = rows_of(greedy, drawing, greedy)
    logits = torch.randn(3, VOCABULARY)
    for position in range(1, 8):
        tokens = pick(logits, rows, 0, torch.full((3, 1), position), needs_of([greedy, drawing]))
        assert tokens[[0, 2], 0].tolist() == logits[[0, 2]].argmax(-1).tolist()


def test_the_repetition_penalty_lowers_what_a_row_has():
    logits = torch.tensor([[3.0, 2.0, -1.0, 1.9, -0.5, 0.0]] * 2)
    sampling = Sampling(repetition_penalty=2.0)
    rows = rows_of(sampling, Sampling(), prompt=[0, 2])
    position = torch.tensor([[3], [3]])
    needs = needs_of([sampling])
    tokens = pick(logits, rows, 0, position, needs)
    assert tokens.flatten().tolist() == [1, 0]  # 3.0 / 2 < 2.0; the second row has no penalty
    rows.note(0, tokens)
    assert pick(logits, rows, 0, position, needs).flatten().tolist() == [3, 0]
    negative = torch.tensor([[-1.0, -9.0, -1.2, -9.0, -1.5, -9.0]] * 2)  # -1.0 * 2 and -1.2 * 2 are below -1.5
    assert pick(negative, rows, 0, position, needs).flatten().tolist() == [4, 0]


def test_picking_changes_nothing():
    sampling = Sampling(temperature=1.0, top_k=3, repetition_penalty=1.5, seed=9)
    rows = rows_of(sampling)
    tokens = {int(pick(LOGITS[None], rows, 0, torch.tensor([[2]]), needs_of([sampling]))) for _ in range(5)}
    assert len(tokens) == 1


def test_a_moved_row_goes_on_as_before():
    sampling = Sampling(temperature=1.5, top_k=4, top_p=0.9, repetition_penalty=1.3, seed=21)
    rows = rows_of(sampling, Sampling(temperature=0.5, seed=1), prompt=[1, 5])
    needs = needs_of([sampling])
    positions = torch.arange(2, 8)[:, None, None]
    before = [int(pick(LOGITS[None], rows, 0, p, needs)) for p in positions]
    rows.move(0, 1)
    assert [int(pick(LOGITS[None], rows, 1, p, needs)) for p in positions] == before


def test_a_sum_that_reaches_one_early_cuts_nothing():
    """In float32 the probabilities of a flat distribution over many tokens add up to 1 before the last."""
    vocabulary = 50_000
    rows = SamplingRows(2, vocabulary, 4, CPU)
    rows.set(0, Sampling(temperature=1.0, seed=1), torch.tensor([0]), 3)
    rows.set(1, Sampling(temperature=1.0, top_p=0.5, seed=1), torch.tensor([0]), 3)
    logits = torch.randn(2, vocabulary, generator=torch.Generator().manual_seed(0))
    for position in (1, 2, 3):
        where = torch.full((2, 1), position)
        plain = pick(logits[:1], rows, 0, where[:1], Needs(draws=True))
        assert torch.equal(pick(logits, rows, 0, where, Needs(draws=True, cuts=True))[:1], plain)


def test_the_largest_draw_picks_a_possible_token():
    rows = rows_of(Sampling(temperature=1.0))
    rows._draws.fill_(1 - 2.0**-23)
    logits = torch.tensor([[0.0, 1.0, 2.0, float("-inf"), float("-inf"), float("-inf")]])
    assert int(pick(logits, rows, 0, torch.tensor([[1]]), Needs(draws=True))) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"repetition_penalty": 0.0},
        {"seed": 2**63},
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, float]):
    with pytest.raises(InputError, match=next(iter(fields))):
        Sampling(**fields)


@pytest.mark.parametrize("fields", [{"temperature": "hot"}, {"top_k": 2.5}, {"seed": 1.5}, {"top_p": None}])
def test_values_of_another_kind_are_refused(fields: dict[str, Any]):
    """A seed of 1.5 failed when its row started, inside a step that others shared; a top_k of 2.5 was rounded."""
    name, value = next(iter(fields.items()))
    with pytest.raises(InputError, match=f"sampling: {name} is {re.escape(repr(value))}; expected a"):
        Sampling(**fields)
