import msgspec
import pytest
import torch
from small_programs import (
    MAX_LENGTH,
    empty_replay,
    language_greedy,
    language_logits,
    language_model,
    language_weights,
)

from tune_model.extract.tracing.likeliest import add_likeliest_token
from tune_model.runtime.execution.executor import InputError
from tune_model.runtime.generation.completion import Generation
from tune_model.runtime.generation.decoder import context_hint
from tune_model.runtime.generation.sampling import Sampling
from tune_model.runtime.kv_cache import KVCache
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


def with_choice(op: str) -> TunedModel:
    """The model with a decode program that chooses tokens itself."""
    decode = add_likeliest_token(language_model("decode"))
    chosen = msgspec.structs.replace(decode.steps[-1], op=op)
    decode = msgspec.structs.replace(decode, steps=(*decode.steps[:-1], chosen))
    return TunedModel(ModelParts((language_model("prefill"), decode), {}, empty_replay(), {}), WEIGHTS, "cpu")


def test_the_program_chooses_greedy_tokens(model: TunedModel):
    expected = model.complete(PROMPTS, NEW)
    assert with_choice("aten.argmax.default").complete(PROMPTS, NEW) == expected
    # What the program chooses is what is taken: one that chooses the least likely token is believed.
    other = with_choice("aten.argmin.default")
    assert [row[0] for row in other.complete(PROMPTS, NEW)] == [row[0] for row in expected]
    assert all(a[1:] != b[1:] for a, b in zip(other.complete(PROMPTS, NEW), expected, strict=True))


def test_penalised_and_drawn_tokens_are_not_the_programs_choice(model: TunedModel):
    """A penalty changes which token is the most likely; a drawing row beside a greedy one changes neither's tokens."""
    chosen = with_choice("aten.argmax.default")
    samplings = [Sampling(repetition_penalty=1.9), Sampling(temperature=1.3, seed=4), Sampling()]
    expected = model.complete(PROMPTS, NEW, sampling=samplings)
    assert expected != model.complete(PROMPTS, NEW)
    assert chosen.complete(PROMPTS, NEW, sampling=samplings) == expected


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
        ([[1], []], 1, r"prompt 1: .* is \(0,\); expected at least one token"),
        ([[[1]]], 1, "in one dim"),
        ([[1]], -1, "max_new_tokens is -1"),
        ([[1]], 1.5, "max_new_tokens is 1.5"),
        ([[1], [2, 99]], 1, "prompt 1: token 1 of the prompt is 99; expected 0 to 31"),
        (torch.tensor([[1], [-2]]), 1, "prompt 1: token 0 of the prompt is -2; expected 0 to 31"),
        ([1, 2], 1, "prompt 0: a prompt is"),
    ],
)
def test_bad_prompts_are_one_clear_error(model: TunedModel, prompts: list[list[int]], new: int, message: str):
    with pytest.raises(InputError, match=message):
        model.complete(prompts, new)


def test_nothing_to_generate_is_nothing(model: TunedModel):
    assert model.complete([[1, 2]], 0) == [[]]


def test_cache_slices_are_views_of_its_rows():
    cache = KVCache(language_model("decode"), 4, torch.device("cpu"))
    cache.slice(2, 3)["k_cache.0"].fill_(1.0)
    assert cache.slice(0, 4)["k_cache.0"].sum(dim=(1, 2, 3)).nonzero().flatten().tolist() == [2]
    with pytest.raises(InputError, match="rows 3 to 5"):
        cache.slice(3, 5)


def test_hints_stay_within_a_programs_bounds():
    decode = language_model("decode")
    assert [context_hint(decode, n)["context"] for n in (0, 5, 1000)] == [1, 5, MAX_LENGTH]
    assert context_hint(language_model("prefill"), 7) == {}


def test_equal_seeds_give_equal_tokens(model: TunedModel):
    def rows(seed: int) -> list[list[int]]:
        return model.complete(PROMPTS, NEW, sampling=Sampling(temperature=2.0, seed=seed))

    assert rows(1) == rows(1)
    assert rows(1) != rows(2)


def test_equal_prompts_get_different_answers_under_one_seed(model: TunedModel):
    same = model.complete([PROMPTS[0]] * 3, NEW, sampling=Sampling(temperature=9.0, seed=1))
    assert len({tuple(row) for row in same}) == 3


def test_a_row_draws_the_same_whoever_shares_the_batch(model: TunedModel):
    """Neighbours change the number of rows, the kind of sampling that runs and nothing else."""
    mine = Sampling(temperature=1.5, seed=11)
    others = [
        Sampling(temperature=0.9, top_k=3, seed=5),
        Sampling(repetition_penalty=1.7),
        Sampling(temperature=1.2, top_p=0.4, seed=2),
    ]
    alone = model.complete([PROMPTS[0]], NEW, sampling=[mine])[0]
    for count in range(1, 4):
        prompts = [PROMPTS[0], *[*PROMPTS[1:], [7, 7]][:count]]
        assert model.complete(prompts, NEW, sampling=[mine, *others[:count]])[0] == alone


def test_as_many_samplings_as_prompts(model: TunedModel):
    with pytest.raises(InputError, match="2 samplings given for 3 prompts"):
        model.complete(PROMPTS, NEW, sampling=[Sampling()] * 2)


def test_more_prompts_than_rows_wait_their_turn(model: TunedModel):
    """The model has 8 rows; 20 prompts of different lengths take them in turn."""
    prompts = [[1 + i % 5] * (1 + i % 7) for i in range(20)]
    assert model.complete(prompts, 5) == [language_greedy(p, 5, WEIGHTS) for p in prompts]


def test_an_abandoned_generation_leaves_the_model_usable(model: TunedModel):
    stream = model.generate(PROMPTS, NEW)
    next(stream)
    stream.close()
    assert model.complete(PROMPTS, NEW) == [language_greedy(p, NEW, WEIGHTS) for p in PROMPTS]


def test_ends_are_given_as_configurations_of_models_give_them(model: TunedModel):
    """A tensor of ends never matched a token, and one number alone was a TypeError."""
    end = model.complete(PROMPTS[:1], NEW)[0][2]
    expected = model.complete(PROMPTS[:1], NEW, eos=[end])
    assert len(expected[0]) <= 3
    for given in (end, {end}, torch.tensor([end])):
        assert model.complete(PROMPTS[:1], NEW, eos=given) == expected
    assert model.complete(PROMPTS[:1], NEW, eos=None) == model.complete(PROMPTS[:1], NEW)
    for wrong in ("x", [1.5], ["2"]):
        with pytest.raises(InputError, match=r"eos is .*; expected token numbers"):
            model.complete(PROMPTS[:1], NEW, eos=wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"eos is .*; expected a set of token numbers"):
        Generation(3, frozenset({"x"}))  # type: ignore[arg-type]


def test_prompts_and_samplings_of_another_kind_are_one_clear_error(model: TunedModel):
    assert model.complete(iter(PROMPTS), NEW) == model.complete(PROMPTS, NEW)  # type: ignore[arg-type]
    for prompts in (None, "abc", {1: 2}, torch.tensor([1, 2])):
        with pytest.raises(InputError, match=r"prompts is a .*; expected"):
            model.complete(prompts, 1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="sampling is a dict; expected a Sampling"):
        model.complete(PROMPTS, 1, sampling={"temperature": 1})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="sampling is a str; expected a Sampling"):
        model.complete([[1]], 1, sampling=["greedy"])  # type: ignore[list-item]
