import copy
import pickle
import re

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
from torch._subclasses.fake_tensor import FakeTensorMode

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


def test_a_language_model_takes_tokens_alone():
    """A mask passed after the tokens was taken for their positions: wrong logits, without a word."""
    model = language()
    ids = torch.tensor([[3, 1, 4]])
    with pytest.raises(InputError, match=r"2 positional inputs given; the model takes \['input_ids'\]"):
        model(ids, torch.ones_like(ids))
    with pytest.raises(InputError, match=r"unknown: \['attention_mask'\]"):
        model(ids, attention_mask=torch.ones_like(ids))


def test_calls_that_fit_no_program_say_so_of_what_was_given():
    """They named the cache or positions, which no caller passes, and made a cache of any number of rows first."""
    model = language()
    with pytest.raises(InputError, match="'input_ids' has size 0 in dim 0; expected batch from 1 to 8"):
        model(torch.zeros(0, 3, dtype=torch.int64))
    with pytest.raises(InputError, match="'input_ids' has size 10000000000 in dim 0"):
        model(torch.zeros(1, 3, dtype=torch.int64).expand(10_000_000_000, 3))
    with pytest.raises(InputError, match=r"'input_ids' (has size|has) \d+"):
        model(torch.zeros(1, 10_000, dtype=torch.int64))
    with pytest.raises(InputError, match=r"'input_ids' is of shape \(3,\); expected"):
        model(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(InputError, match="'input_ids' is a list; expected a tensor"):
        model([[1, 2]])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="'input_ids' is missing; expected a tensor"):
        model()


NOT_DENSE: dict[str, torch.Tensor] = {
    "a meta tensor": torch.zeros(1, 3).long().to("meta"),
    "a tensor of layout torch.sparse_coo": torch.ones(1, 3).long().to_sparse(),
    "a nested tensor (torch.jagged)": torch.nested.nested_tensor([torch.ones(3).long()], layout=torch.jagged),
    "not initialised (of a lazy module)": torch.nn.LazyLinear(4).weight,
    "a FakeTensor": FakeTensorMode().from_tensor(torch.ones(1, 3).long()),
}


@pytest.mark.parametrize("seen", NOT_DENSE)
def test_tensors_without_values_at_strides_are_refused(seen: str):
    """They failed deep in torch; a fake one has no memory, and reading it ended the process."""
    says = f"input 'input_ids' is {seen}; expected a dense tensor (torch.strided) with values"
    with pytest.raises(InputError, match=re.escape(says)):
        language()(NOT_DENSE[seen])


def test_copying_a_model_says_that_it_cannot_be_copied(model: TunedModel):
    for copied in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="load its artifact again"):
            copied(model)  # type: ignore[operator]
