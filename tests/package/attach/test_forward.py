"""Encoders and plain modules before and after `attach`."""

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import small_models
import torch
from torch import nn

import tune_model
from tune_model.extract.request import FactorySource, Phase, Request
from tune_model.package.verification.original import build_original

BERT = small_models.forward({"model_type": "bert", **small_models.SIZES}, batch=(1, 2), sequence=(8, 16))
MIXED = Request(
    FactorySource("small_models:make_mixed"),
    "float32",
    "forward",
    (Phase("forward", {"rows": (2, 4)}),),
    inputs=small_models.inputs(x=("rows", 8)),
)


def original(request: Request) -> nn.Module:
    return build_original(request, None, torch.device("cpu")).requires_grad_()


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def bert(write: Any) -> tuple[nn.Module, Any]:
    model = original(BERT)
    return model, tune_model.attach(model, write("bert", BERT))


def tokens(rows: int, length: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[-1, length // 2 :] = 0
    return {"input_ids": torch.randint(3, 128, (rows, length)), "attention_mask": mask}


def test_detaching_gives_back_a_forward_that_the_module_had_of_its_own(write: Any):
    """As libraries that hook modules put one there: it was lost."""
    model = original(MIXED)
    hooked = model.forward
    model.forward = hooked
    attached = tune_model.attach(model, write("mixed", MIXED))
    assert model.forward is not hooked
    attached.detach()
    assert vars(model)["forward"] is hooked


def test_an_encoder_answers_with_its_own_class(bert: tuple[nn.Module, Any]):
    model, attached = bert
    given = tokens(2, 11)
    expected = original(BERT)(**given)
    for out in (
        model(**given),
        model(given["input_ids"], given["attention_mask"]),
        model(**given, token_type_ids=torch.zeros(2, 11, dtype=torch.int64)),
    ):
        assert type(out) is type(expected)
        torch.testing.assert_close(out.last_hidden_state, expected.last_hidden_state, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(out.pooler_output, expected.pooler_output, atol=2e-5, rtol=2e-5)
    pair = model(**given, return_dict=False)
    torch.testing.assert_close(pair[0], expected[0], atol=2e-5, rtol=2e-5)
    assert (attached.answered, attached.unmatched()) == (4, {})


def test_a_mask_that_is_left_out_lets_everything_through(bert: tuple[nn.Module, Any]):
    ids = tokens(1, 8)["input_ids"]
    torch.testing.assert_close(bert[0](ids)[0], original(BERT)(ids)[0], atol=2e-5, rtol=2e-5)
    assert bert[1].answered == 1


def test_other_calls_of_an_encoder_run_the_original(bert: tuple[nn.Module, Any]):
    model, attached = bert
    given = tokens(1, 8)
    reference = original(BERT)
    for extra in (
        {"token_type_ids": torch.ones(1, 8, dtype=torch.int64)},
        {"position_ids": torch.arange(8)[None] + 1},
        {"output_attentions": True},
    ):
        torch.testing.assert_close(model(**given, **extra)[0], reference(**given, **extra)[0])
    with torch.enable_grad():
        assert model(**given)[0].requires_grad
    with pytest.raises(TypeError):
        model(**given, nonsense=1, attention_mask=None)
    reasons = set(attached.unmatched())
    assert {
        "token_type_ids are not all 0",
        "position_ids is given",
        "output_attentions is given",
        "gradients are enabled",
    } <= reasons
    assert attached.answered == 0


def test_a_configuration_that_asks_for_tuples_gets_them(bert: tuple[nn.Module, Any]):
    model, attached = bert
    expected = model(**tokens(1, 8))
    model.config.return_dict = False
    assert isinstance(model(**tokens(1, 8)), tuple)
    assert attached.unmatched() == {"the configuration has return_dict False": 1}
    model.config.return_dict = True
    assert type(model(**tokens(1, 8))) is type(expected)


def test_training_and_autocast_are_the_originals(write: Any):
    """Without gradients a module in training mode lost its dropout, and autocast its dtype."""
    for request, given in ((BERT, tokens(2, 8)), (MIXED, {"x": torch.randn(3, 8)})):
        model = original(request)
        attached = tune_model.attach(model, write("bert" if request is BERT else "mixed", request))
        with torch.autocast("cpu", torch.bfloat16):
            mixed = model(**given)
            expected = original(request)(**given)
        for name, value in expected.items():
            assert mixed[name].dtype == value.dtype
            torch.testing.assert_close(mixed[name], value)
        model.train()
        torch.manual_seed(4)
        trained = model(**given)
        attached.detach()
        torch.manual_seed(4)
        torch.testing.assert_close(trained, model(**given), rtol=0, atol=0)
        assert attached.unmatched() == {"autocast is on": 1, "the module trains": 1}


def test_numbers_that_are_no_tokens_are_the_originals_to_judge(bert: tuple[nn.Module, Any]):
    model, attached = bert
    given = tokens(1, 8)
    given["input_ids"][0, 3] = 128
    with pytest.raises(IndexError):
        model(**given)
    (reason,) = attached.unmatched()
    assert reason == "input 'input_ids' is 128 at [0, 3]; expected 0 to 127"


def test_sizes_out_of_range_run_the_original(bert: tuple[nn.Module, Any]):
    model, attached = bert
    given = tokens(1, 8)
    given["input_ids"] = given["input_ids"].int()
    assert model(**given)[0].shape == (1, 8, 64)
    (reason,) = attached.unmatched()
    assert "expected int64" in reason


def test_inputs_that_are_not_dense_are_the_originals_to_judge(write: Any):
    """A sparse one ended in an error of torch's although the original takes it."""
    model = original(MIXED)
    attached = tune_model.attach(model, write("mixed", MIXED))
    x = torch.randn(3, 8)
    expected = original(MIXED)(x)
    torch.testing.assert_close(model(x.to_sparse()), expected, atol=2e-5, rtol=2e-5)
    with pytest.raises(RuntimeError, match="meta"):
        model(x.to("meta"))
    assert attached.unmatched() == {
        "an input is a tensor of layout torch.sparse_coo": 1,
        "an input is a meta tensor": 1,
    }


def test_a_module_of_any_kind(write: Any):
    model = original(MIXED)
    attached = tune_model.attach(model, write("mixed", MIXED))
    x = torch.randn(3, 8)
    expected = original(MIXED)(x)
    for out in (model(x), model(x=x)):
        assert out.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(out[name], value)
    assert attached.answered == 2
    attached.detach()
    assert model(x).keys() == expected.keys()
    assert attached.answered == 2


def through_a_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("make", [copy.deepcopy, through_a_file, lambda model: copy.deepcopy(copy.deepcopy(model))])
def test_copies_compute_with_their_own_weights(write: Any, make: Callable[[nn.Module], nn.Module]):
    """A deep copy shared `forward`, and so computed with the weights of what it was copied from; saving failed."""
    model = original(MIXED)
    attached = tune_model.attach(model, write("mixed", MIXED))
    copied, reference = make(model), original(MIXED)
    for module in (copied, reference):
        for parameter in module.parameters():
            parameter.mul_(0.5)
    given = {"x": torch.randn(3, 8)}
    torch.testing.assert_close(copied(**given), reference(**given))
    assert attached.answered == 0
    torch.testing.assert_close(dict(model(**given)), original(MIXED)(**given), atol=2e-5, rtol=2e-5)
    assert attached.answered == 1


def test_a_module_is_attached_to_one_artifact_at_a_time(write: Any):
    """The first attachment answered nothing any more, and detaching it detached the second."""
    model = original(MIXED)
    first = tune_model.attach(model, write("mixed", MIXED))
    with pytest.raises(tune_model.OtherModelError, match="runs on an artifact already; expected to be detached first"):
        tune_model.attach(model, write("mixed", MIXED))
    first.detach()
    second = tune_model.attach(model, write("mixed", MIXED))
    first.detach()
    model(torch.randn(3, 8))
    assert (first.answered, second.answered) == (0, 1)
