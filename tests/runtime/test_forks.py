"""A model loaded before a fork: an error that says so, where torch itself would hang."""

import os
import signal
from collections.abc import Callable

import pytest
import torch
from small_programs import empty_replay, language_model, language_weights, softmax_program, softmax_weights

from tune_model.runtime.tuned import ForkedProcessError, ModelParts, TunedModel


def in_a_child(work: Callable[[], bool]) -> str:
    """Run something in a forked child; returns how that went."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a hang ends here
        try:
            os._exit(0 if work() else 1)
        except ForkedProcessError:
            os._exit(42)
        except BaseException:  # noqa: BLE001 (the parent is told by the exit code)
            os._exit(2)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    return {0: "right", 1: "wrong", 42: "refused"}.get(os.WEXITSTATUS(status), "failed")


@pytest.fixture(scope="module")
def models() -> tuple[TunedModel, TunedModel]:
    forward = TunedModel(
        ModelParts((softmax_program(),), {"one": torch.ones(1)}, empty_replay(), {}), softmax_weights(), "cpu"
    )
    programs = (language_model("prefill"), language_model("decode"))
    return forward, TunedModel(ModelParts(programs, {}, empty_replay(), {}), language_weights(), "cpu")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_to_load_for_itself(models: tuple[TunedModel, TunedModel]):
    forward, language = models
    x = torch.randn(2, 3, 8)
    expected, text = forward(x), language.complete([[1, 2]], 4)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert in_a_child(lambda: forward(x) is not None) == "refused"
        assert in_a_child(lambda: language.complete([[1, 2]], 4) is not None) == "refused"
        assert in_a_child(lambda: language.scheduler(1) is not None) == "refused"
    finally:
        torch.set_num_threads(before)

    def alone() -> bool:
        torch.set_num_threads(1)
        return torch.equal(forward(x), expected) and language.complete([[1, 2]], 4) == text

    assert in_a_child(alone) == "right"
    assert torch.equal(forward(x), expected)
