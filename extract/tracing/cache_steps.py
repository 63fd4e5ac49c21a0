"""Turns a decoder's traced attention into steps on the key-value cache.

The cache is a program input, written in place: slots of `max_length` tokens, one row per sequence. Prefill attends to
the prompt's own keys, decode to the cache.
"""

from collections.abc import Mapping

import msgspec

from tune_model.extract.tracing.attention_step import ATTENTION
from tune_model.extract.tracing.front_end import TraceError
from tune_model.runtime.expression import Dim
from tune_model.runtime.program import Arg, Call, Input, Program, Ref, Step, TensorType

__all__ = ["add_cache"]


def add_cache(program: Program, *, max_length: int, decode: bool) -> Program:
    """Replace every `tune_model.attention` by an append and an attention over prompt or cache.

    Args:
        program: Raw, with a `positions` input and exactly one attention per layer that owns a cache.
        max_length: Cache slots per row.
        decode: Attend to the cache instead of the call's own keys.
    """
    types = _types(program)
    steps: list[Step] = []
    caches: list[Input] = []
    for step in program.steps:
        if not isinstance(step, Call) or step.op != ATTENTION:
            steps.append(step)
            continue
        layer = len(caches) // 2
        query, key, value, *settings, sinks = step.args
        if sinks is not None:
            settings.append(sinks)
        keys, values = (_cache(f"{n}_cache.{layer}", types, a, max_length) for n, a in (("k", key), ("v", value)))
        caches += [keys, values]
        positions, pair = Ref("positions"), (Ref(keys.name), Ref(values.name))
        steps.append(Call("tune_model.append_kv", (*pair, key, value, positions)))
        attend = (
            Call("tune_model.cached_attention", (query, *pair, positions, *settings), (), step.results)
            if decode
            else Call("tune_model.causal_attention", (query, key, value, *settings), (), step.results)
        )
        steps.append(attend)
    return msgspec.structs.replace(program, inputs=(*program.inputs, *caches), steps=tuple(steps))


def _types(program: Program) -> Mapping[str, TensorType]:
    types = {i.name: i.type for i in program.inputs}
    types |= {w.name: w.type for w in program.weights}
    types |= {c.name: c.type for c in program.constants}
    return types | program.values


def _cache(name: str, types: Mapping[str, TensorType], made: Arg, max_length: int) -> Input:
    if not isinstance(made, Ref):
        raise TraceError(f"attention takes {made!r} as keys or values; expected a tensor")
    type_ = types[made.name]
    shape: tuple[Dim, ...] = (type_.shape[0], type_.shape[1], max_length, type_.shape[3])
    return Input(name, TensorType(type_.dtype, shape), role="cache")
