"""The programs of a model made ready to run: once, however many threads come first."""

import threading
import time
from typing import Any

import pytest
import torch
from small_programs import empty_replay, language_model, language_weights

from tune_model.runtime.kv_cache import KVCache
from tune_model.runtime.tuned import ModelParts, TunedModel


def language() -> TunedModel:
    programs = (language_model("prefill"), language_model("decode"))
    return TunedModel(ModelParts(programs, {}, empty_replay(), {}), language_weights(), "cpu")


def test_threads_that_split_prompts_at_once_share_one_continuation(monkeypatch: pytest.MonkeyPatch):
    """It is made at its first use. A second thread found the executor but not yet what runs it, or made another one."""
    model = language()
    engine = model._engine
    phase = model.language().continuation
    assert phase is not None
    made: list[object] = []

    def slowly(name: str) -> None:
        original = getattr(engine, name)

        def slow(*args: Any) -> Any:
            result = original(*args)
            made.append(result)
            time.sleep(0.05)
            return result

        monkeypatch.setattr(engine, name, slow)

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
