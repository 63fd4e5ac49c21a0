"""What users change in an attached model: it is seen, the model itself runs, and once it is undone programs answer.

Tuned answers came out as if nothing had been changed, whatever was put in a layer's place.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import pytest
import small_models
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrize

import tune_model
from tune_model.extract.request import FactorySource, Phase, Request
from tune_model.package.attach.matching import Unmatched
from tune_model.package.attach.structure import Structure
from tune_model.package.verification.original import build_original

LLAMA = small_models.decoder("llama", eos_token_id=None, pad_token_id=0)
GATED = Request(
    FactorySource("small_models:make_gated"),
    "float32",
    "forward",
    (Phase("forward", {"rows": (2, 4)}),),
    inputs=small_models.inputs(x=("rows", 8)),
)
Undo = Callable[[], object]
Change = Callable[[Any], Undo]


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Adapter(nn.Module):
    """A low-rank adapter around a linear layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def replaced(path: str, name: str, make: Callable[[Any], Any]) -> Change:
    """Put something in an attribute's place."""

    def change(model: Any) -> Undo:
        owner = model.get_submodule(path)
        before = getattr(owner, name)
        setattr(owner, name, make(before))
        return lambda: setattr(owner, name, before)

    return change


def own_forward(model: Any) -> Undo:
    layer = model.get_submodule("model.layers.1.mlp.down_proj")
    layer.forward = lambda x: -nn.Linear.forward(layer, x)
    return lambda: delattr(layer, "forward")


def class_of_a_layer(model: Any) -> Undo:
    layer = model.get_submodule("model.layers.0.mlp")
    before = type(layer)
    layer.__class__ = type("Other", (before,), {"forward": lambda self, x: 2 * before.forward(self, x)})
    return lambda: setattr(layer, "__class__", before)


def forward_of_a_class(model: Any) -> Undo:
    cls = type(model.get_submodule("model.norm"))
    before = cls.forward
    cls.forward = lambda self, x: 2 * before(self, x)
    return lambda: setattr(cls, "forward", before)


def parametrized(model: Any) -> Undo:
    layer = model.get_submodule("model.layers.0.self_attn.v_proj")
    weight = layer.weight
    parametrize.register_parametrization(layer, "weight", Twice())

    def undo() -> None:
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
        layer.weight = weight

    return undo


def layer_left_out(model: Any) -> Undo:
    layer = model.model.layers[1]
    del model.model.layers[1]
    return lambda: model.model.layers.append(layer)


def after_hook(model: Any) -> Undo:
    return model.get_submodule("model.layers.0.mlp").register_forward_hook(lambda module, given, out: 2 * out).remove


def before_hook(model: Any) -> Undo:
    return (
        model.get_submodule("model.layers.0.mlp").register_forward_pre_hook(lambda module, given: (-given[0],)).remove
    )


def scale_norms(module: nn.Module, given: Any, out: Any) -> Any:
    return 2 * out if type(module).__name__.endswith("RMSNorm") else None


def turn_linears(module: nn.Module, given: Any) -> Any:
    return (-given[0],) if isinstance(module, nn.Linear) else None


def submodule_trains(model: Any) -> Undo:
    attention = model.get_submodule("model.layers.0.self_attn")
    attention.attention_dropout = 0.5
    attention.train()
    return attention.eval


def bias_added(model: Any) -> Undo:
    layer = model.get_submodule("model.layers.0.self_attn.o_proj")
    layer.bias = nn.Parameter(torch.ones(layer.out_features))
    return lambda: setattr(layer, "bias", None)


CHANGES: list[tuple[str, Change]] = [
    (
        "the submodule model.layers.1.self_attn.q_proj was replaced",
        replaced("model.layers.1.self_attn", "q_proj", Adapter),
    ),
    (
        "the submodule model.layers.0.mlp.act_fn was replaced",
        replaced("model.layers.0.mlp", "act_fn", lambda _: nn.ReLU()),
    ),
    ("the submodule lm_head was replaced", replaced("", "lm_head", lambda old: nn.Sequential(old, Twice()))),
    ("the submodule model.layers.1 was removed", layer_left_out),
    ("model.layers.1.mlp.down_proj.forward was added", own_forward),
    ("model.layers.0.mlp is a Other; expected a LlamaMLP, as when attached", class_of_a_layer),
    ("the forward of LlamaRMSNorm was replaced", forward_of_a_class),
    ("the submodule model.layers.0.self_attn.v_proj.parametrizations was added", parametrized),
    ("the forward hooks of model.layers.0.mlp are not those it had when attached", after_hook),
    ("the forward hooks of model.layers.0.mlp are not those it had when attached", before_hook),
    ("a forward hook for all modules is registered", lambda _: register_module_forward_hook(scale_norms).remove),
    ("a forward hook for all modules is registered", lambda _: register_module_forward_pre_hook(turn_linears).remove),
    ("model.layers.0.self_attn trains", submodule_trains),
    ("model.layers.0.self_attn.o_proj.bias was added", bias_added),
]


def llama() -> Any:
    return build_original(LLAMA, None, torch.device("cpu")).requires_grad_()


def logits(of: Callable[..., Any]) -> Tensor:
    ids = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    made: Tensor = of(ids, logits_to_keep=1, use_cache=False).logits
    return made


@pytest.mark.parametrize(("reason", "change"), CHANGES)
def test_a_change_is_seen_and_so_is_its_end(write: Any, reason: str, change: Change):
    model = llama()
    original = MethodType(type(model).forward, model)
    attached = tune_model.attach(model, write("llama", LLAMA))
    plain = logits(original)
    undo = change(model)
    try:
        changed = logits(MethodType(type(model).forward, model))
        assert not torch.allclose(changed, plain)
        for _ in range(2):
            torch.testing.assert_close(logits(model), changed, rtol=0, atol=0)
        assert (attached.answered, attached.unmatched()) == (0, {reason: 2})
    finally:
        undo()
    torch.testing.assert_close(logits(model), plain)
    assert (attached.answered, attached.unmatched()) == (1, {reason: 2})


def test_functions_among_the_attributes_are_watched(write: Any):
    model = build_original(GATED, None, torch.device("cpu"))
    attached = tune_model.attach(model, write("gated", GATED))
    x = torch.randn(3, 8)
    plain = model(x)
    before, model.inner.activation = model.inner.activation, torch.tanh
    torch.testing.assert_close(model(x), type(model).forward(model, x), rtol=0, atol=0)
    assert not torch.allclose(model(x), plain)
    model.inner.activation = nn.GELU()
    torch.testing.assert_close(model(x), type(model).forward(model, x), rtol=0, atol=0)
    del model.inner.activation
    with pytest.raises(AttributeError, match="activation"):
        model(x)
    assert attached.unmatched() == {
        "inner.activation was replaced": 2,
        "the submodule inner.activation was added": 1,
        "inner.activation was removed": 1,
    }
    model.inner.activation = before
    torch.testing.assert_close(model(x), plain)
    assert attached.answered == 2


def test_strict_says_what_was_changed(write: Any):
    model = llama()
    tune_model.attach(model, write("llama", LLAMA), strict=True)
    model.model.layers[0].mlp.act_fn = nn.ReLU()
    with pytest.raises(
        tune_model.NotAnsweredError, match=r"the submodule model\.layers\.0\.mlp\.act_fn was replaced; the"
    ):
        logits(model)


def test_what_was_there_when_attached_belongs_to_the_model(write: Any):
    """Weight norms are hooks, and libraries put a `forward` of their own in a layer's place."""
    model = llama()
    layer, calls = model.model.layers[0].mlp, []
    handle = layer.register_forward_hook(lambda *_: calls.append(1))
    layer.gate_proj.forward = partial(nn.Linear.forward, layer.gate_proj)
    attached = tune_model.attach(model, write("llama", LLAMA))
    plain = logits(model)
    assert (attached.answered, calls) == (1, [])
    handle.remove()
    torch.testing.assert_close(logits(model), plain)
    del layer.gate_proj.forward
    torch.testing.assert_close(logits(model), plain)
    assert set(attached.unmatched()) == {"the forward hooks of model.layers.0.mlp are not those it had when attached"}


def test_hooks_of_the_attached_module_itself_run_around_its_answers(write: Any):
    model = llama()
    attached = tune_model.attach(model, write("llama", LLAMA))
    plain = logits(model)
    model.register_forward_hook(lambda module, given, out: type(out)(logits=2 * out.logits))
    torch.testing.assert_close(logits(model), 2 * plain)
    assert attached.answered == 2


def test_hooks_that_record_outputs_on_request_do_not_count(write: Any):
    """transformers leaves them on every layer after the first call that asks for hidden states."""
    model = llama()
    attached = tune_model.attach(model, write("llama", LLAMA))
    ids = torch.randint(3, 128, (1, 5))
    assert len(model(ids, logits_to_keep=1, output_hidden_states=True).hidden_states) == 3
    for _ in range(2):
        logits(model)
    assert (attached.answered, attached.unmatched()) == (2, {"output_hidden_states is given": 1})
    model.model.layers[0].register_forward_hook(lambda *_: None)
    logits(model)
    assert attached.answered == 2


CASTS: list[tuple[str, str, Callable[[Any], object]]] = [
    ("model.embed_tokens.weight", "torch.bfloat16 on cpu", lambda model: model.to(torch.bfloat16)),
    ("model.embed_tokens.weight", "torch.float16 on cpu", lambda model: model.half()),
    ("model.embed_tokens.weight", "torch.float32 on meta", lambda model: model.to("meta")),
    (
        "model.layers.1.mlp.up_proj.weight",
        "torch.float64 on cpu",
        lambda model: model.model.layers[1].mlp.up_proj.double(),
    ),
]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(("name", "seen", "cast"), CASTS)
def test_a_model_that_was_cast_or_moved_runs_itself(
    write: Any, name: str, seen: str, cast: Callable[[Any], object], *, overwrite: bool
):
    """Answers kept the type that was tuned."""
    model = llama()
    attached = tune_model.attach(model, write("llama", LLAMA))
    torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
    try:
        cast(model)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    outcomes = []
    for call in (model, MethodType(type(model).forward, model)):
        try:
            outcomes.append(logits(call))
        except (RuntimeError, NotImplementedError) as error:  # of two types in one model, or without values
            outcomes.append(type(error))
    assert isinstance(outcomes[0], type) or outcomes[0].dtype == outcomes[1].dtype == model.lm_head.weight.dtype
    assert (outcomes[0] is outcomes[1]) or torch.equal(outcomes[0], outcomes[1])
    reason = f"{name} is {seen}; expected torch.float32 on cpu, as when attached"
    assert (attached.answered, attached.unmatched()) == (0, {reason: 1})


def test_a_cast_after_reloading_is_seen_and_undone(write: Any):
    """The weights that were loaded last came from no module, so that none was looked at."""
    model = llama()
    attached = tune_model.attach(model, write("llama", LLAMA))
    plain = logits(model)
    attached.tuned.reload_weights({name: tensor.clone() for name, tensor in model.state_dict().items()})
    torch.testing.assert_close(logits(model), plain)
    model.double()
    assert logits(model).dtype == torch.float64
    model.float()
    attached.tuned.reload_weights(model)
    torch.testing.assert_close(logits(model), plain)
    assert attached.answered == 3


def test_threads_and_copies_see_their_own(write: Any):
    model = llama()
    attached = tune_model.attach(model, write("llama", LLAMA))
    copied = copy.deepcopy(model)
    copied.model.layers[0].mlp.act_fn = nn.ReLU()
    logits(copied)
    logits(model)
    assert (attached.answered, attached.unmatched()) == (1, {})


def test_every_kind_of_module_can_be_watched():
    """Scripted modules keep their attributes elsewhere."""
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    model = nn.ModuleDict({"scripted": scripted, "list": nn.ParameterList([torch.ones(3)]), "lazy": nn.LazyLinear(3)})
    model.eval()
    structure = Structure(model)
    structure.check()
    model["scripted"] = nn.Identity()
    with pytest.raises(Unmatched, match="the submodule scripted was replaced"):
        structure.check()
