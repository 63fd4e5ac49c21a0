import threading
import time
from typing import Any

import pytest
import torch
from small_programs import (
    empty_replay,
    language_model,
    language_weights,
    softmax_program,
    softmax_reference,
    softmax_weights,
)

from tune_model.runtime.execution.executor import InputError
from tune_model.runtime.kv_cache import KVCache
from tune_model.runtime.tuned import ModelParts, TunedModel

WEIGHTS = softmax_weights()


@pytest.fixture(scope="module")
def model() -> TunedModel:
    parts = ModelParts((softmax_program(),), {"one": torch.ones(1)}, empty_replay(), {})
    return TunedModel(parts, WEIGHTS, "cpu")


def test_inputs_go_by_position_or_name(model: TunedModel):
    x = torch.randn(2, 3, 8)
    expected = softmax_reference(x, WEIGHTS)
    for out in (model(x), model(x=x), model.run("forward", {"x": x})["out"]):
        assert isinstance(out, torch.Tensor)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    assert model.coverage().totals()["miss"] >= 3


def test_wrong_calls_are_one_clear_error(model: TunedModel):
    x = torch.zeros(1, 1, 8)
    with pytest.raises(InputError, match="2 positional inputs"):
        model(x, x)
    with pytest.raises(InputError, match="'x' is given by position and by name"):
        model(x, x=x)
    with pytest.raises(InputError, match="no program 'decode'"):
        model.run("decode", {})
    with pytest.raises(InputError, match="generation needs prefill and decode"):
        model.complete([[1]], 1)


def language() -> TunedModel:
    programs = (language_model("prefill"), language_model("decode"))
    return TunedModel(ModelParts(programs, {}, empty_replay(), {}), language_weights(), "cpu")


def test_threads_that_split_prompts_at_once_share_one_continuation(monkeypatch: pytest.MonkeyPatch):
    """It is made at its first use. A second thread found the executor but not yet what runs it, or made another one."""
    model = language()
    phase = model.language().continuation
    assert phase is not None
    made: list[object] = []

    def slowly(name: str) -> None:
        original = getattr(model, name)

        def slow(*args: Any) -> Any:
            result = original(*args)
            made.append(result)
            time.sleep(0.05)
            return result

        monkeypatch.setattr(model, name, slow)

    slowly("_executor")
    slowly("_runner")
    failed: list[BaseException] = []

    def run(inputs: dict[str, torch.Tensor]) -> None:
        try:
            phase.run(inputs, {})
        except BaseException as error:  # noqa: BLE001 (a thread's failure must reach the test)
            failed.append(error)

    def call() -> dict[str, torch.Tensor]:
        ids, index = torch.tensor([[3, 1]]), torch.tensor([1])
        return {"input_ids": ids, "positions": torch.tensor([[0, 1]]), "logits_index": index, **caches(model)}

    threads = [threading.Thread(target=run, args=(call(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
        time.sleep(0.02)  # some arrive while the executor is made, some while what runs it is
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(made) == 2  # one executor and what runs it


def caches(model: TunedModel) -> dict[str, torch.Tensor]:
    return dict(KVCache(model.programs["decode"], 1, torch.device("cpu")).slice(0, 1))


def test_a_scheduler_of_nothing_is_refused_not_the_default():
    """0 rows and 0 tokens meant the defaults, without a word."""
    model = language()
    with pytest.raises(InputError, match="a cache of 0 rows asked for"):
        model.scheduler(0)
    for tokens in (0, -1):
        with pytest.raises(InputError, match=f"prompt_tokens is {tokens}; expected at least 1"):
            model.scheduler(2, prompt_tokens=tokens)
    assert model.scheduler().cache.rows == 8
    assert model.scheduler(2, prompt_tokens=1).prompt_tokens == 1
