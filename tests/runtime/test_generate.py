import pytest
import torch
from hand_made import (
    MAX_LENGTH,
    empty_replay,
    language_greedy,
    language_logits,
    language_model,
    language_weights,
)

from tune_model.runtime.executor import InputError
from tune_model.runtime.generate import context_hint
from tune_model.runtime.kv_cache import KVCache
from tune_model.runtime.sampling import Sampler, Sampling
from tune_model.runtime.tuned import ModelParts, TunedModel

WEIGHTS = language_weights()
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9]]
NEW = 8


@pytest.fixture(scope="module")
def model() -> TunedModel:
    programs = (language_model("prefill"), language_model("decode"))
    return TunedModel(ModelParts(programs, {}, empty_replay(), {}), WEIGHTS, "cpu")


def test_ragged_rows_generate_what_each_would_alone(model: TunedModel):
    expected = [language_greedy(prompt, NEW, WEIGHTS) for prompt in PROMPTS]
    assert len({tuple(row) for row in expected}) == len(expected)
    assert model.complete(PROMPTS, NEW) == expected
    assert [model.complete([prompt], NEW)[0] for prompt in PROMPTS] == expected


def test_tokens_stream_step_by_step_and_rows_end_at_eos(model: TunedModel):
    expected = [language_greedy(prompt, NEW, WEIGHTS) for prompt in PROMPTS]
    eos = expected[0][2]
    lengths = [row.index(eos) + 1 if eos in row else NEW for row in expected]
    steps = list(model.generate(PROMPTS, NEW, eos=[eos]))
    assert len(steps) == max(lengths)
    for row, tokens in enumerate(zip(*steps, strict=True)):
        assert list(tokens[: lengths[row]]) == expected[row][: lengths[row]]
        assert set(tokens[lengths[row] :]) <= {None}


def test_a_generation_may_start_while_another_is_open(model: TunedModel):
    """The model has one cache; a second generation must neither wait for it nor write to it."""
    first = model.generate([PROMPTS[0]], NEW)
    got = [next(first)[0]]
    assert model.complete([PROMPTS[1]], NEW)[0] == language_greedy(PROMPTS[1], NEW, WEIGHTS)
    got += [step[0] for step in first]
    assert got == language_greedy(PROMPTS[0], NEW, WEIGHTS)


def test_prompts_fill_the_cache_to_its_last_slot(model: TunedModel):
    prompt = [1] * (MAX_LENGTH - 3)
    assert model.complete([prompt], 4)[0] == language_greedy(prompt, 4, WEIGHTS)
    with pytest.raises(InputError, match=f"the cache holds {MAX_LENGTH} per row"):
        model.complete([prompt], 5)


def test_calling_the_model_gives_the_logits_after_the_last_token(model: TunedModel):
    ids = torch.tensor([[3, 1, 4], [1, 5, 9]])
    logits = model(ids)
    assert isinstance(logits, torch.Tensor)
    for row in range(2):
        expected = language_logits(ids[row].tolist(), WEIGHTS)
        torch.testing.assert_close(logits[row, 0].double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("prompts", "new", "message"),
    [
        ([], 1, "no prompt"),
        ([[1], []], 1, "prompt 1 is .* at least one token"),
        ([[[1]]], 1, "in one dim"),
        ([[1]], -1, "max_new_tokens is -1"),
    ],
)
def test_bad_prompts_are_one_clear_error(model: TunedModel, prompts: list[list[int]], new: int, message: str):
    with pytest.raises(InputError, match=message):
        model.complete(prompts, new)


def test_nothing_to_generate_is_nothing(model: TunedModel):
    assert model.complete([[1, 2]], 0) == [[]]


def test_a_cache_of_ones_own(model: TunedModel):
    cache = model.allocate_cache(3)
    assert cache.max_length == MAX_LENGTH
    assert cache.size_bytes == 2 * 3 * 2 * MAX_LENGTH * 4 * 4
    steps = list(model.generate(PROMPTS, NEW, cache=cache))
    assert [list(row) for row in zip(*steps, strict=True)] == [language_greedy(p, NEW, WEIGHTS) for p in PROMPTS]
    with pytest.raises(InputError, match="4 prompts given; the cache has 3 rows"):
        next(model.generate([[1]] * 4, 1, cache=cache))


def test_cache_slices_are_views_of_its_rows():
    cache = KVCache(language_model("decode"), 4, torch.device("cpu"))
    cache.slice(2, 3)["k_cache.0"].fill_(1.0)
    assert cache.slice(0, 4)["k_cache.0"].sum(dim=(1, 2, 3)).nonzero().flatten().tolist() == [2]
    with pytest.raises(InputError, match="rows 3 to 5"):
        cache.slice(3, 5)


def test_contexts_are_rounded_to_few_hints():
    decode = language_model("decode")
    hints = [context_hint(decode, n)["context"] for n in (1, 2, 3, 5, 9, 17, MAX_LENGTH, 1000)]
    assert hints == [1, 2, 4, 8, 16, MAX_LENGTH, MAX_LENGTH, MAX_LENGTH]
    assert context_hint(language_model("prefill"), 7) == {}


CPU = torch.device("cpu")


def drawn(sampling: Sampling, logits: torch.Tensor, count: int = 4000) -> torch.Tensor:
    tokens = Sampler(sampling, CPU).pick(logits.expand(count, -1))
    return torch.bincount(tokens, minlength=logits.shape[-1]) / count


def test_draws_follow_the_tempered_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    expected = torch.softmax(logits.double() / 0.7, -1)
    assert float((drawn(Sampling(temperature=0.7), logits) - expected).abs().max()) < 0.03


def test_top_k_and_top_p_cut_the_tail():
    logits = torch.log(torch.tensor([0.1, 0.5, 0.3, 0.1]))
    two = drawn(Sampling(temperature=1.0, top_k=2), logits)
    assert float(two[0] + two[3]) == 0.0
    assert abs(float(two[1]) - 5 / 8) < 0.03
    nucleus = drawn(Sampling(temperature=1.0, top_p=0.6), logits)
    assert float(nucleus[0] + nucleus[3]) == 0.0
    assert float(drawn(Sampling(temperature=1.0, top_p=0.01), logits)[1]) == 1.0


def test_equal_seeds_give_equal_tokens(model: TunedModel):
    def rows(seed: int) -> list[list[int]]:
        return model.complete(PROMPTS, NEW, sampling=Sampling(temperature=2.0, seed=seed))

    assert rows(1) == rows(1)
    assert rows(1) != rows(2)
