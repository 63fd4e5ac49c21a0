"""Whether a module still is what it was when programs took over its calls: submodules, hooks, functions, types.

Programs compute what was traced. Whoever puts an adapter in a layer's place, registers a hook or casts the model means
the module itself to be run. Every call looks, so looking is a handful of passes in C over flat lists, made beforehand;
only where one of them differs is each part compared, and the change named.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
from operator import attrgetter, call, contains, getitem, is_
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from tune_model.package.attach.matching import Unmatched

__all__ = ["Structure"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")

_IDLE_HOOKS = "transformers.utils.output_capturing"
"""Where transformers' hooks come from that record a layer's output for the call that asks for it: they stay after the
first such call, and do nothing in any other."""

_WITH_ADDRESS = (Tensor, nn.Parameter)
"""Tensors of other classes (lazy ones, say) may have none; a cast gives most of those another object."""

_forward_of = attrgetter("forward")


class _Kind(NamedTuple):
    """What a cast or a move changes in a tensor."""

    dtype: torch.dtype
    device: torch.device
    layout: torch.layout

    def __str__(self) -> str:
        layout = "" if self.layout == torch.strided else f" ({str(self.layout).removeprefix('torch.')})"
        return f"{self.dtype} on {self.device}{layout}"


class _Part(NamedTuple):
    """A module, and what makes it compute what it does.

    Attributes:
        name: Its path; empty for the outermost.
        module: Itself.
        type: Its class.
        forward: What its class computes.
        children: Submodules by name.
        hooks: Around its forward, by number, those before and those after it in turn.
        functions: Callables among its own attributes: an activation, a `forward` that hides the class's.
        tensors: Parameters and persistent buffers; `None` for those it does without.
    """

    name: str
    module: nn.Module
    type: type
    forward: Any
    children: Mapping[str, nn.Module | None]
    hooks: tuple[Mapping[int, Any], ...]
    functions: Mapping[str, Any]
    tensors: Mapping[str, _Kind | None]

    def inner(self, name: str) -> str:
        """Return the path of something inside."""
        return f"{self.name}.{name}" if self.name else name


class Structure:
    """What a module is made of.

    What is there when this is made counts as what was traced, hooks too (weight norms are some).

    Args:
        module: The outermost; its own hooks run around its `forward`, whatever that does, and are not looked at.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts = _parts(module)
        self._watched = _watch(self._parts)
        self._suspect: _Part | None = None

    def check(self) -> None:
        """Compare the module with what it was; one that trains is left to the caller.

        Raises:
            Unmatched: Something in it was replaced, added, removed, cast or moved.
        """
        if self._module.training or self._watched.same():
            return
        for change in self._changes():
            raise Unmatched(change)
        self._watched = _watch(_parts(self._module))  # put back in other dicts, or into other memory

    def _changes(self) -> Iterator[str]:
        """Say what differs; begins with what did the last time, since a change mostly stays for many calls."""
        if any(_global_hooks()):
            yield "a forward hook for all modules is registered"
        suspect = self._suspect
        for old in self._parts if suspect is None else (suspect, *self._parts):
            self._suspect = old
            yield from _differences(old, _part(old.name, old.module))
        self._suspect = None


def _differences(old: _Part, new: _Part) -> Iterator[str]:
    title = old.name or "the module"
    for name in _unlike(old.children, new.children):
        yield f"the submodule {old.inner(name)} was {_how(old.children, new.children, name)}"
    if old.type is not new.type:
        yield f"{title} is a {new.type.__name__}; expected a {old.type.__name__}, as when attached"
    if old.forward is not new.forward:
        yield f"the forward of {old.type.__name__} was replaced"
    if old.hooks != new.hooks:
        yield f"the forward hooks of {title} are not those it had when attached"
    for name in _unlike(old.functions, new.functions):
        yield f"{old.inner(name)} was {_how(old.functions, new.functions, name)}"
    if new.module.training and old.name:
        yield f"{title} trains"
    for name in {**old.tensors, **new.tensors}:
        before, after = old.tensors.get(name), new.tensors.get(name)
        if before == after:
            continue
        if before and after:
            yield f"{old.inner(name)} is {after}; expected {before}, as when attached"
        else:
            yield f"{old.inner(name)} was {_how(old.tensors, new.tensors, name)}"


def _unlike(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    names = [name for name in old if name not in new or new[name] is not old[name]]
    return [*names, *(name for name in new if name not in old)]


def _how(old: Mapping[str, Any], new: Mapping[str, Any], name: str) -> str:
    if new.get(name) is None:
        return "removed"
    return "added" if old.get(name) is None else "replaced"


# --------------------------------------------------------------------------------------------------- taking stock


def _global_hooks() -> tuple[dict[int, Any], ...]:
    return torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks


def _parts(module: nn.Module) -> list[_Part]:
    # Scripted ones run what was compiled from them; putting one in another's place is seen from outside.
    plain = (found for found in module.named_modules() if not isinstance(found[1], torch.jit.ScriptModule))
    return [_part(name, inner) for name, inner in plain]


def _part(name: str, module: nn.Module) -> _Part:
    own = vars(module)
    cls = type(module)
    functions = {key: value for key, value in own.items() if callable(value)}
    # The outermost module's is what asks; and whoever wraps a method for a while may leave the same one behind.
    if "forward" in functions and (not name or functions["forward"] == MethodType(cls.forward, module)):
        del functions["forward"]
    hooks = tuple(_working(own[key]) if name else {} for key in _HOOKS)
    kinds = {key: None if tensor is None else _kind(tensor) for _, key, tensor in _tensors(module)}
    return _Part(name, module, cls, cls.forward, dict(module._modules), hooks, functions, kinds)


def _working(hooks: Mapping[int, Any]) -> dict[int, Any]:
    return {number: hook for number, hook in hooks.items() if getattr(hook, "__module__", None) != _IDLE_HOOKS}


def _tensors(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor | None]]:
    """Return the module's own parameters and persistent buffers, each with the dict that it lies in."""
    yield from ((module._parameters, name, tensor) for name, tensor in module._parameters.items())
    for name, tensor in module._buffers.items():
        if name not in module._non_persistent_buffers_set:
            yield module._buffers, name, tensor


def _kind(tensor: Tensor) -> _Kind:
    return _Kind(tensor.dtype, tensor.device, tensor.layout)


# ------------------------------------------------------------------------------------------------- looking quickly


class _Watched(NamedTuple):
    """Flat lists: what to look at, and (`*_as`) what was there.

    Comparing lists and dicts asks for identity first. Tensors are compared by identity alone, and by address: a cast or
    a move gives the same parameter other memory.
    """

    unhooked: list[dict[int, Any]]
    hooked: list[dict[int, Any]]
    hooked_as: list[dict[int, Any]]
    attributes: list[dict[str, Any]]
    without_forward: list[dict[str, Any]]
    modules: list[nn.Module]
    types_as: list[type]
    classes: list[type]
    forwards_as: list[Any]
    children: list[dict[str, Any]]
    children_as: list[dict[str, Any]]
    owners: list[dict[str, Any]]
    keys: list[str]
    values_as: list[Any]
    addresses: list[Callable[[], int]]
    addresses_as: list[int]

    def same(self) -> bool:
        """Say whether nothing differs."""
        try:
            return (
                not any(self.unhooked)
                and self.children == self.children_as
                and list(map(type, self.modules)) == self.types_as
                and not any(map(contains, self.without_forward, repeat("forward")))
                and not any(map(getitem, self.attributes, repeat("training")))
                and all(map(is_, map(getitem, self.owners, self.keys), self.values_as))
                and list(map(call, self.addresses)) == self.addresses_as
                and list(map(_forward_of, self.classes)) == self.forwards_as
                and self.hooked == self.hooked_as
            )
        except KeyError:  # an attribute was deleted
            return False


def _watch(parts: list[_Part]) -> _Watched:
    modules = [part.module for part in parts]
    attributes = [vars(module) for module in modules[1:]]
    hooks = [own[key] for own in attributes for key in _HOOKS]
    classes = list({part.type: None for part in parts})
    held: list[tuple[dict[str, Any], str, Any]] = []
    addresses: list[Callable[[], int]] = []
    for part in parts:
        own = vars(part.module)
        names = set(part.functions) | ({"forward"} & own.keys() if part.name else set())
        held += ((own, name, own[name]) for name in names)
        for owner, name, tensor in _tensors(part.module):
            held.append((owner, name, tensor))
            if tensor is not None and type(tensor) in _WITH_ADDRESS and tensor.layout == torch.strided:
                addresses.append(tensor.data_ptr)
    return _Watched(
        unhooked=[*_global_hooks(), *(h for h in hooks if not h)],
        hooked=[h for h in hooks if h],
        hooked_as=[dict(h) for h in hooks if h],
        attributes=attributes,
        without_forward=[own for own in attributes if "forward" not in own],
        modules=modules,
        types_as=[part.type for part in parts],
        classes=classes,
        forwards_as=[_forward_of(cls) for cls in classes],
        children=[module._modules for module in modules if module._modules],
        children_as=[dict(module._modules) for module in modules if module._modules],
        owners=[owner for owner, _, _ in held],
        keys=[key for _, key, _ in held],
        values_as=[value for _, _, value in held],
        addresses=addresses,
        addresses_as=[address() for address in addresses],
    )
