"""A transformers model before and after `attach`: the same tokens, whatever is done with it."""

import copy
import inspect
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import small_models
import torch
from small_programs import empty_replay
from torch import nn

import tune_model
from tune_model.extract.plan import extract
from tune_model.package.attach import Attachment
from tune_model.package.attach.attachment import NotAnsweredError, OtherModelError
from tune_model.package.attach.decoder import DecoderCalls
from tune_model.package.attach.sessions import CacheMemory, SessionStore
from tune_model.package.verification.original import build_original
from tune_model.runtime.generation.prompts import PromptRunner
from tune_model.runtime.tuned import ModelParts, TunedModel

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


def under_autocast(model: nn.Module) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return model(ids(1, 4), logits_to_keep=1)


def other_cache(model: nn.Module) -> Any:
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=20)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(ids(1, 4), logits_to_keep=1, **{name: cache})


UNMATCHED = {
    "the logits of every position are asked for": lambda m: m(ids(1, 4)),
    "logits_to_keep is no number": lambda m: m(ids(1, 4), logits_to_keep=torch.tensor([1])),
    "output_hidden_states is given": lambda m: m(ids(1, 4), logits_to_keep=1, output_hidden_states=True),
    "labels is given": lambda m: m(ids(1, 4), labels=ids(1, 4)),
    "inputs_embeds is given": lambda m: m(inputs_embeds=torch.ones(1, 4, 64), logits_to_keep=1),
    "the module trains": lambda m: m.train()(ids(1, 4), logits_to_keep=1),
    "autocast is on": under_autocast,
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


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_outputs_that_the_configuration_asks_for_are_the_originals(pair: Pair, name: str):
    """They were left out, although the model's own answers have them."""
    pair.model.set_attn_implementation("eager")
    setattr(pair.model.config, name, True)
    out = pair.model(ids(1, 4), logits_to_keep=1)
    assert len(out[name.removeprefix("output_")]) >= REQUEST.source.config["num_hidden_layers"]
    assert (pair.attached.answered, pair.attached.unmatched()) == (0, {f"the configuration has {name} True": 1})
    setattr(pair.model.config, name, False)
    pair.model(ids(1, 4), logits_to_keep=1)
    assert pair.attached.answered == 1


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
        assert store.spare == 1
    kept = pair.model(ids(1, 5), logits_to_keep=1, use_cache=True)
    assert store.spare == 0
    del kept
    assert store.spare == 1


def test_a_copied_cache_keeps_its_memory(pair: Pair):
    """Memory went to the next call when the first of two cache objects that share layers was gone."""
    first = pair.model(ids(1, 5), logits_to_keep=1, use_cache=True)
    name = next(k for k in first if k != "logits")
    copied = copy.copy(first[name])
    del first
    assert pair.attached._calls._store.spare == 0
    pair.model.generate(ids(1, 7, seed=4), max_new_tokens=3, **GREEDY)
    outputs = [pair.model(ids(1, 1, seed=2), **{name: copied}).logits]
    expected = pair.reference(torch.cat([ids(1, 5), ids(1, 1, seed=2)], 1), logits_to_keep=1).logits
    torch.testing.assert_close(outputs[0], expected)


def test_caches_come_back_in_the_middle_of_anything(pair: Pair):
    """The garbage collector gives caches back on any thread, in the middle of a search for one as well."""
    store: SessionStore = pair.attached._calls._store
    one, two, three = (store.memory(rows) for rows in (1, 2, 3))

    class Interrupted(deque[CacheMemory]):
        def popleft(self) -> CacheMemory:
            found = super().popleft()
            if late:
                store.give_back(late.pop())
            return found

    late = [three]
    store._spare = Interrupted([one, two], maxlen=3)
    assert store.memory(2) is two
    assert store.memory(3) is three
    assert store.spare == 1
    made = [store.memory(1 + i % 2) for i in range(9)]
    for memory in made:
        store.give_back(memory)
    assert store.spare == 3


class FakeStream:
    """As a CUDA stream's order, without a device."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: "FakeStream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class FakeCache:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record_stream(self, stream: FakeStream) -> None:
        self.log.append(f"memory of {stream.name}")


def test_memory_that_is_used_again_waits_for_the_stream_that_had_it():
    log: list[str] = []
    first, second = FakeStream("first", log), FakeStream("second", log)
    current = [first]
    memory = CacheMemory(FakeCache(log), lambda: current[0])  # type: ignore[arg-type]
    memory.take()
    memory.used()
    assert log == ["memory of first"]
    memory.take()
    assert log == ["memory of first"] * 2
    current[0] = second
    memory.take()
    memory.used()
    assert log[2:] == ["second waits for first", "memory of second"]
    current[0] = first
    memory.used()
    memory.take()
    assert log[4:] == ["memory of first", "first waits for second", "memory of first"]


def attached_to(device: str) -> tuple[nn.Module, Attachment]:
    """A model whose programs run plain operators, on any device."""
    found = extract(REQUEST, check=False)
    model = build_original(REQUEST, None, torch.device(device))
    parts = ModelParts(found.plan.programs, found.constants, empty_replay(), {})
    tuned = TunedModel(parts, model, device, share=True)
    calls = DecoderCalls(model, tuned, inspect.signature(model.forward))
    return model, Attachment(model, tuned, calls, strict=True)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_caches_go_from_call_to_call(device: str):
    """On CUDA a call on a second stream gets the cache that the first stream may still be writing."""
    model, attached = attached_to(device)
    tokens = [ids(1, 9, seed=turn).to(device) for turn in range(20)]
    reference = build_original(REQUEST, None, torch.device(device))
    expected = [reference(given, logits_to_keep=1, use_cache=False).logits for given in tokens]
    streams = [torch.cuda.Stream() for _ in range(2)] if device == "cuda" else []
    if streams:
        torch.cuda.synchronize()
    outputs = []
    for turn, given in enumerate(tokens):
        with torch.cuda.stream(streams[turn % 2]) if streams else nullcontext():
            if streams:
                torch.cuda._sleep(1_000_000)
            outputs.append(model(given, logits_to_keep=1, use_cache=False).logits)
    if streams:
        torch.cuda.synchronize()
    for ours, theirs in zip(outputs, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    assert (attached.answered, attached._calls._store.spare) == (20, 1)


def test_threads_share_an_attached_model_and_others_have_their_own(pair: Pair, write: Any):
    other = original()
    tune_model.attach(other, write("llama", REQUEST), strict=True)
    wanted = [ids(1 + i % 2, 3 + i, seed=i) for i in range(6)]
    expected = [pair.reference.generate(tokens, max_new_tokens=6, **GREEDY) for tokens in wanted]
    made: dict[tuple[int, int], torch.Tensor] = {}

    def generate(number: int, model: nn.Module) -> None:
        with torch.no_grad():
            for index, tokens in enumerate(wanted):
                made[number, index] = model.generate(tokens, max_new_tokens=6, **GREEDY)

    threads = [threading.Thread(target=generate, args=(i, m)) for i, m in enumerate((pair.model, pair.model, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(made[number, index], expected[index]) for number in range(3) for index in range(6))
    assert (pair.attached.answered, pair.attached.unmatched()) == (72, {})


@pytest.mark.parametrize("number", [-1, 128])
def test_tokens_that_are_none_are_the_originals_to_judge(pair: Pair, number: int):
    with pytest.raises(IndexError):
        pair.model(torch.tensor([[3, number]]), logits_to_keep=1)
    assert pair.attached.unmatched() == {"input_ids are not from 0 to 127": 1}


def test_a_prompt_that_fails_leaves_the_cache_object_empty(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    from transformers import DynamicCache

    cache = DynamicCache(config=pair.model.config)
    name = "cache" if "cache" in inspect.signature(pair.model.forward).parameters else "past_key_values"
    with monkeypatch.context() as patched:
        patched.setattr(PromptRunner, "run", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("out of luck")))
        with pytest.raises(torch.OutOfMemoryError):
            pair.model(ids(1, 5), logits_to_keep=1, **{name: cache})
    assert pair.attached._calls._store.spare == 1
    out = pair.model(ids(1, 5), logits_to_keep=1, **{name: cache})
    torch.testing.assert_close(out.logits, pair.reference(ids(1, 5), logits_to_keep=1).logits)
    assert cache.get_seq_length() == 5
    assert pair.attached.answered == 1


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
    with pytest.raises(OtherModelError, match=r"attached to a NoneType; expected a torch\.nn\.Module"):
        tune_model.attach(None, path)  # type: ignore[arg-type]
    with pytest.raises(OtherModelError, match=r"scripted module; expected the torch\.nn\.Module it was made from"):
        tune_model.attach(torch.jit.script(nn.Linear(2, 2)), path)
