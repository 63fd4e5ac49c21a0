"""A transformers model before and after `attach`: the same tokens, whatever is done with it."""

import copy
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import small_models
import torch
from torch import nn

import tune_model
from tune_model.package.attach import Attachment
from tune_model.package.attach.attachment import NotAnsweredError, OtherModelError
from tune_model.package.verification.original import build_original

REQUEST = small_models.decoder("llama", eos_token_id=None, pad_token_id=0)
SLOTS = REQUEST.max_length
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def original() -> nn.Module:
    return build_original(REQUEST, None, torch.device("cpu")).requires_grad_()


class Pair(NamedTuple):
    model: nn.Module
    attached: Attachment
    reference: nn.Module


@pytest.fixture
def pair(write: Any) -> Pair:
    model = original()
    return Pair(model, tune_model.attach(model, write("llama", REQUEST)), original())


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def ids(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(seed))


def left_padded(lengths: list[int]) -> dict[str, torch.Tensor]:
    tokens = ids(len(lengths), max(lengths), seed=3)
    starts = max(lengths) - torch.tensor(lengths)[:, None]
    mask = (torch.arange(max(lengths)) >= starts).long()
    return {"input_ids": tokens * mask, "attention_mask": mask}


@pytest.mark.parametrize("rows", [1, 3])
def test_generate_gives_the_same_tokens(pair: Pair, rows: int):
    tokens = ids(rows, 9)
    expected = pair.reference.generate(tokens, max_new_tokens=20, **GREEDY)
    assert torch.equal(pair.model.generate(tokens, max_new_tokens=20, **GREEDY), expected)
    assert len(set(expected[0, 9:].tolist())) > 2
    assert pair.attached.answered == 20
    assert pair.attached.unmatched() == {}
    assert pair.attached.tuned.coverage().totals()["miss"] == 0


def test_left_padded_rows_run_at_their_own_lengths(pair: Pair):
    given = left_padded([9, 2, 14, 1])
    expected = pair.reference.generate(**given, max_new_tokens=16, **GREEDY)
    assert torch.equal(pair.model.generate(**given, max_new_tokens=16, **GREEDY), expected)
    assert (pair.attached.answered, pair.attached.unmatched()) == (16, {})


def test_a_finished_row_does_not_disturb_the_others(pair: Pair):
    tokens = ids(3, 6, seed=5)
    free = pair.reference.generate(tokens, max_new_tokens=12, **GREEDY)
    stop = {**GREEDY, "eos_token_id": int(free[0, 8])}
    expected = pair.reference.generate(tokens, max_new_tokens=12, **stop)
    assert torch.equal(pair.model.generate(tokens, max_new_tokens=12, **stop), expected)


def test_logits_and_cache_are_those_of_the_original(pair: Pair):
    tokens = ids(2, 7)
    ours, theirs = (m(tokens, logits_to_keep=1, use_cache=True) for m in (pair.model, pair.reference))
    assert type(ours) is type(theirs)
    torch.testing.assert_close(ours.logits, theirs.logits)
    (cache,), (expected,) = ([v for k, v in o.items() if k != "logits"] for o in (ours, theirs))
    assert cache.get_seq_length() == 7
    for mine, own in zip(cache.layers, expected.layers, strict=True):
        torch.testing.assert_close(mine.keys, own.keys)
        torch.testing.assert_close(mine.values, own.values)
    assert pair.attached.answered == 1


def test_a_conversation_goes_on_over_its_cache(pair: Pair):
    answers = []
    for model in (pair.model, pair.reference):
        first = model.generate(ids(1, 5), max_new_tokens=6, return_dict_in_generate=True, **GREEDY)
        longer = torch.cat([first.sequences, ids(1, 4, seed=9)], 1)
        cache = {k: v for k, v in first.items() if k in {"cache", "past_key_values"}}
        answers.append(model.generate(longer, max_new_tokens=6, **cache, **GREEDY))
    assert torch.equal(*answers)
    assert pair.attached.unmatched() == {}


def test_beams_are_searched_as_before(pair: Pair):
    """Beams reorder the cache, so after the prompt the original goes on, over copies of what was computed."""
    options = {**GREEDY, "num_beams": 3, "max_new_tokens": 8}
    tokens = ids(1, 9)
    assert torch.equal(pair.model.generate(tokens, **options), pair.reference.generate(tokens, **options))
    assert pair.attached.unmatched() == {"the cache was filled or changed by other code": 7}


def test_the_original_takes_over_when_the_cache_is_full(pair: Pair):
    tokens = ids(1, 9)
    expected = pair.reference.generate(tokens, max_new_tokens=SLOTS + 3, **GREEDY)
    assert torch.equal(pair.model.generate(tokens, max_new_tokens=SLOTS + 3, **GREEDY), expected)
    assert pair.attached.unmatched()[f"the cache holds {SLOTS} tokens per row"] == 1
    assert pair.attached.answered == SLOTS - 9 + 1


def test_the_original_reads_what_was_computed_before(pair: Pair):
    """One step, then a call that asks for every position's logits over the same cache."""
    outputs = []
    for model in (pair.model, pair.reference):
        first = model(ids(1, 5), logits_to_keep=1, use_cache=True)
        cache = {k: v for k, v in first.items() if k != "logits"}
        outputs.append(model(ids(1, 3, seed=2), **cache).logits)
    torch.testing.assert_close(*outputs)
    assert pair.attached.unmatched() == {"the logits of every position are asked for": 1}


def other_cache(model: nn.Module) -> Any:
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=20)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(ids(1, 4), logits_to_keep=1, **{name: cache})


UNMATCHED = {
    "the logits of every position are asked for": lambda m: m(ids(1, 4)),
    "output_hidden_states is given": lambda m: m(ids(1, 4), logits_to_keep=1, output_hidden_states=True),
    "labels is given": lambda m: m(ids(1, 4), labels=ids(1, 4)),
    "inputs_embeds is given": lambda m: m(inputs_embeds=torch.ones(1, 4, 64), logits_to_keep=1),
    "the module trains, or gradients are enabled": lambda m: m.train()(ids(1, 4), logits_to_keep=1),
    "position_ids do not count up from 0": lambda m: m(
        ids(1, 4), position_ids=torch.tensor([[3, 4, 5, 6]]), logits_to_keep=1
    ),
    "attention_mask leaves out tokens after the first that it lets through": lambda m: m(
        ids(1, 4), attention_mask=torch.tensor([[1, 1, 0, 1]]), logits_to_keep=1
    ),
    f"5 rows of 4 tokens; the cache holds {REQUEST.max_batch} of {SLOTS}": lambda m: m(ids(5, 4), logits_to_keep=1),
    "the cache is a StaticCache": other_cache,
}


@pytest.mark.parametrize("reason", UNMATCHED)
def test_other_calls_run_the_original_and_are_counted(pair: Pair, reason: str):
    call = UNMATCHED[reason]
    ours = call(pair.model)
    assert pair.attached.unmatched() == {reason: 1}
    pair.attached.detach()
    torch.testing.assert_close(ours.logits, call(pair.model).logits, rtol=0, atol=0)


def test_training_an_attached_model_trains_what_it_runs_on(pair: Pair):
    tokens = ids(2, 6)
    with torch.enable_grad():
        optimizer = torch.optim.SGD(pair.model.parameters(), lr=0.5)
        pair.model(tokens, labels=tokens).loss.backward()
        optimizer.step()
    assert pair.attached.tuned.shared_memory().copied == ()
    reference = copy.deepcopy(original())
    reference.load_state_dict({k: v.clone() for k, v in pair.model.state_dict().items()})
    expected = reference.generate(tokens, max_new_tokens=8, **GREEDY)
    assert torch.equal(pair.model.generate(tokens, max_new_tokens=8, **GREEDY), expected)
    assert not torch.equal(expected, pair.reference.generate(tokens, max_new_tokens=8, **GREEDY))
    assert pair.attached.answered == 8


def test_other_models_beside_it_are_untouched(pair: Pair):
    compiled = torch.compile(pair.reference, backend="eager")
    tokens = ids(1, 5)
    before = pair.reference(tokens).logits
    pair.model.generate(tokens, max_new_tokens=3, **GREEDY)
    assert "forward" not in vars(pair.reference)
    torch.testing.assert_close(compiled(tokens).logits, before)
    torch.testing.assert_close(torch.compile(pair.model, backend="eager")(tokens).logits, before)


def test_caches_that_are_gone_make_room_for_the_next(pair: Pair):
    store = pair.attached._calls._store
    for _ in range(3):
        pair.model.generate(ids(1, 5), max_new_tokens=3, **GREEDY)
        assert len(store._spare) == 1
    kept = pair.model(ids(1, 5), logits_to_keep=1, use_cache=True)
    assert len(store._spare) == 0
    del kept
    assert len(store._spare) == 1


def test_strict_says_what_is_not_answered(write: Any):
    model = original()
    tune_model.attach(model, write("llama", REQUEST), strict=True)
    with pytest.raises(NotAnsweredError, match="the logits of every position are asked for"):
        model(ids(1, 4))


def test_another_model_is_refused(write: Any, tmp_path: Path):
    path = write("llama", REQUEST)
    other = build_original(small_models.decoder("llama", rms_norm_eps=0.5), None, torch.device("cpu"))
    with pytest.raises(OtherModelError, match=r"was tuned for rms_norm_eps 1e-06; the module has 0.5"):
        tune_model.attach(other, path)
    with pytest.raises(OtherModelError, match=r"was tuned for torch.float32; the module is torch.bfloat16"):
        tune_model.attach(original().bfloat16(), path)
    with pytest.raises(OtherModelError, match="no parameters"):
        tune_model.attach(nn.Identity(), path)
