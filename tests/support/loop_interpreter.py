"""Runs a `LoopNest` with torch, node by node over the whole index space: the meaning of the loop form, spelled out."""

import math
from collections.abc import Mapping

import torch

from tune_model.runtime.expression import evaluate
from tune_model.runtime.program import Form, Parameter
from tune_model.runtime.replay import slot_sizes
from tune_model.tune.loops.ir import (
    Access,
    Bound,
    Cast,
    Constant,
    Index,
    Inside,
    Load,
    LoopNest,
    Op,
    Reduce,
)

_BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "floordiv": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "truncdiv": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "pow": torch.pow,
    "atan2": torch.atan2,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "not": torch.bitwise_not,
    "where": torch.where,
}


class Interpreter:
    """One run.

    Args:
        nest: What to run.
        flat: Storage of every slot, as 1-d tensors.
        values: Slot sizes; axes take their extents from it.
    """

    def __init__(self, nest: LoopNest, flat: Mapping[str, torch.Tensor], values: Mapping[str, int]) -> None:
        self.nest = nest
        self.flat = flat
        self.values = values
        self.shape = tuple(evaluate(a.extent, values) for a in nest.axes)
        self.rows = len(self.shape) - nest.inner
        self.results: list[torch.Tensor] = []

    def run(self) -> None:
        for node in self.nest.nodes:
            self.results.append(self._node(node))
        for store in self.nest.stores:
            value = self.results[store.value]
            address = self._linear(store.access.strides, store.access.offset)
            slot = self.flat[store.access.slot]
            assert value.dtype == slot.dtype, (store, value.dtype, slot.dtype)
            address, value = torch.broadcast_tensors(address, value)
            slot[address.reshape(-1)] = value.reshape(-1)

    def _linear(self, strides: tuple, offset: object) -> torch.Tensor:
        total = torch.full((1,) * len(self.shape), evaluate(offset, self.values))
        for k, (stride, size) in enumerate(zip(strides, self.shape, strict=True)):
            step = evaluate(stride, self.values)
            if step:
                view = [1] * len(self.shape)
                view[k] = size
                total = total + step * torch.arange(size).view(view)
        return total

    def _inside(self, bound: Bound) -> torch.Tensor:
        at = self._linear(bound.strides, bound.offset)
        return (bound.low <= at) & (at < bound.high)

    def _load(self, node: Load) -> torch.Tensor:
        access: Access = node.access
        address = self._linear(access.strides, access.offset)
        for gather in node.gather:
            rows = self.results[gather.node]
            assert not rows.numel() or bool(((rows >= 0) & (rows < gather.size)).all())
            address = address + rows * gather.stride
        valid = torch.ones_like(address, dtype=torch.bool)
        for bound in node.where:
            valid = valid & self._inside(bound)
        address, valid = torch.broadcast_tensors(address, valid)
        slot = self.flat[access.slot]
        assert slot.dtype == getattr(torch, node.dtype)
        used = address[valid]
        if 0 in self.shape:  # no iteration, so no address
            return torch.zeros(address.shape, dtype=slot.dtype)
        assert not used.numel() or (int(used.min()) >= 0 and int(used.max()) < len(slot)), "an address leaves the slot"
        loaded = torch.full(address.shape, 77, dtype=slot.dtype)  # a masked-off value must never be seen
        loaded[valid] = slot[used]
        return loaded

    def _node(self, node: object) -> torch.Tensor:
        dtype = getattr(torch, node.dtype)
        match node:
            case Load():
                return self._load(node)
            case Constant(value, _):
                return torch.full((1,) * len(self.shape), value, dtype=dtype)
            case Index(strides, offset, _):
                return self._linear(strides, offset).to(dtype)
            case Inside(bound, _):
                return self._inside(bound)
            case Cast(value, _):
                return self.results[value].to(dtype)
            case Op(name, args, _):
                operands = [self.results[a] for a in args]
                same = operands[1:] if name == "where" else operands
                assert len({o.dtype for o in same}) == 1, (node, [o.dtype for o in operands])
                function = _BINARY.get(name) or getattr(torch, name)
                out = function(*operands)
                assert out.dtype == dtype, (node, out.dtype)
                return out
            case Reduce():
                return self._reduce(node)
        raise AssertionError(node)

    def _reduce(self, node: Reduce) -> torch.Tensor:
        value = self.results[node.value]
        full = torch.broadcast_shapes(value.shape, (1,) * self.rows + self.shape[self.rows :])
        value = value.expand(full)
        count = math.prod(self.shape[self.rows :])
        flat = value.reshape(*value.shape[: self.rows], count)
        match node.kind:
            case "sum" | "prod":
                out = getattr(torch, node.kind)(flat, -1, dtype=getattr(torch, node.dtype))
            case "max" | "min":
                out = getattr(torch, f"a{node.kind}")(flat, -1)
            case kind:
                out = getattr(torch, kind)(flat, -1)
        return out.view(*out.shape, *(1,) * self.nest.inner)


def interpret(nest: LoopNest, slots: Mapping[str, torch.Tensor], values: Mapping[str, int]) -> None:
    """Run a nest; result slots are written in place."""
    flat = {}
    for name, tensor in slots.items():
        size = 1 + sum((s - 1) * t for s, t in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
        flat[name] = tensor.as_strided((size,), (1,))
    Interpreter(nest, flat, values).run()


def run_nest(nest: LoopNest, form: Form, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run a form's nest on inputs; results are poisoned before."""
    outputs = [_poisoned(r) for r in form.results]
    slots = {p.name: t for p, t in zip((*form.parameters, *form.results), (*inputs, *outputs), strict=True)}
    interpret(nest, slots, slot_sizes(form))
    return outputs


def _poisoned(result: Parameter) -> torch.Tensor:
    dtype = getattr(torch, result.type.dtype)
    poison = math.nan if dtype.is_floating_point else dtype == torch.bool or 99
    if result.type.strides is None:
        return torch.full(result.type.shape, poison, dtype=dtype)
    return torch.empty_strided(result.type.shape, result.type.strides, dtype=dtype).fill_(poison)
