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
