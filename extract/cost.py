"""What one call of a concrete form costs at least: floating-point operations and bytes moved."""

import math
import re

from tune_model.runtime.expression import Dim, evaluate
from tune_model.runtime.program import Call, Form, Parameter, Ref, TensorType

__all__ = ["distinct_bytes", "element_bytes", "flops", "looked_up", "size_bytes", "type_bytes", "visible_keys"]

_BITS = re.compile(r"[a-z]+(\d+)")
_MATMULS = frozenset({"aten.linear.default", "aten.mm.default", "aten.bmm.default", "aten.matmul.default"})
_ATTENTION = frozenset(
    {"aten.scaled_dot_product_attention.default", "tune_model.cached_attention", "tune_model.causal_attention"}
)
_WINDOW = {"tune_model.cached_attention": 5, "tune_model.causal_attention": 4}
"""Where the sliding window is among an attention's arguments."""


def element_bytes(dtype: str) -> int:
    """Return the size of one element in bytes, which a dtype's name tells: `bfloat16`, `float8_e4m3fn`, `bool`.

    Raises:
        ValueError: It is no name of a dtype.
    """
    if dtype == "bool":
        return 1
    found = _BITS.match(dtype)
    if found is None:
        msg = f"{dtype!r} names no dtype; expected a kind and a number of bits, as in 'float32'"
        raise ValueError(msg)
    return max(1, int(found[1]) // 8)


def type_bytes(type_: TensorType) -> int:
    """Return the size of a tensor of fixed sizes without gaps, in bytes."""
    return math.prod(_sizes(type_.shape)) * element_bytes(type_.dtype)


def distinct_bytes(parameter: Parameter) -> int:
    """Return how many bytes of a concrete form's slot are distinct elements: broadcast dims hold one."""
    return _elements(parameter) * element_bytes(parameter.type.dtype)


def _sizes(shape: tuple[Dim, ...]) -> tuple[int, ...]:
    return tuple(evaluate(s, {}) for s in shape)


def _elements(parameter: Parameter) -> int:
    """Count distinct elements: broadcast dims hold one."""
    sizes = _sizes(parameter.type.shape)
    strides = parameter.type.strides
    if strides is None:
        return math.prod(sizes)
    return math.prod(n for n, s in zip(sizes, strides, strict=True) if s != 0)


def _slots(form: Form) -> dict[str, Parameter]:
    return {p.name: p for p in (*form.parameters, *form.results)}


def _operands(call: Call, slots: dict[str, Parameter]) -> list[Parameter]:
    return [slots[a.name] for a in call.args if isinstance(a, Ref) and a.name in slots]


def _operand(call: Call, slots: dict[str, Parameter], place: int) -> Parameter | None:
    """Return the slot that a call reads as its argument at a place; `None` where the form makes it."""
    arg = call.args[place]
    return slots.get(arg.name) if isinstance(arg, Ref) else None


def visible_keys(form: Form) -> int:
    """Return how many keys a query of an attention form sees, at the positions the form is measured with."""
    slots = _slots(form)
    for call in form.body:
        if call.op not in _ATTENTION:
            continue
        keys = _operand(call, slots, 1)
        if keys is None:
            continue
        length = _sizes(keys.type.shape)[2]
        positions = _operand(call, slots, 3) if call.op == "tune_model.cached_attention" else None
        if positions is not None and positions.values is not None:
            length = min(length, evaluate(positions.values.high, {}) + 1)
        window = call.args[_WINDOW[call.op]] if len(call.args) > _WINDOW.get(call.op, len(call.args)) else None
        return min(length, window) if isinstance(window, int) else length
    return 0


def _attention_flops(form: Form, call: Call) -> int:
    slots = _slots(form)
    # Queries that the form makes are like its result.
    q, v = (_operand(call, slots, place) or form.results[0] for place in (0, 2))
    batch, heads, queries, depth = _sizes(q.type.shape)
    keys = visible_keys(form)
    work = 2 * batch * heads * queries * keys * (depth + _sizes(v.type.shape)[3])
    causal = call.op == "tune_model.causal_attention" or (len(call.args) > 5 and call.args[5] is True)
    return work // 2 if causal and keys == queries else work


def flops(form: Form) -> int:
    """Return the floating-point operations of one call; what is no matmul counts one per element and step."""
    slots = _slots(form)
    widest = max((math.prod(_sizes(p.type.shape)) for p in (*form.parameters, *form.results)), default=0)
    if form.kind == "matmul":
        widest = math.prod(_sizes(form.results[0].type.shape))
    total = 0
    for call in form.body:
        if call.op in _ATTENTION:
            total += _attention_flops(form, call)
        elif call.op in _MATMULS:
            left, right, *_ = _operands(call, slots)
            rows = math.prod(_sizes(left.type.shape))
            columns = _sizes(right.type.shape)[0 if call.op == "aten.linear.default" else -1]
            total += 2 * rows * columns
        elif not call.op.startswith(("aten.slice", "aten.expand", "tune_model.")):
            total += widest
    return total


def looked_up(form: Form) -> dict[str, int]:
    """Return how many elements of each table a form's lookups read at most."""
    slots = _slots(form)
    found: dict[str, int] = {}
    for call in form.body:
        if call.op == "aten.embedding.default":
            table, numbers = _operands(call, slots)[:2]
            elements = math.prod(_sizes(numbers.type.shape)) * _sizes(table.type.shape)[1]
            found[table.name] = found.get(table.name, 0) + elements
    return found


def size_bytes(form: Form) -> int:
    """Return the least traffic of one call: every input read once, every output written once.

    Of a cache only what the queries see is read, and what is appended is written; of a table the rows looked up.
    """
    rows = looked_up(form)
    total = sum(
        min(_elements(p), rows.get(p.name, 2**63)) * element_bytes(p.type.dtype)
        for p in (*form.parameters, *form.results)
        if p.role != "cache"
    )
    caches = [p for p in form.parameters if p.role == "cache"]
    if not caches:
        return total
    reads = any(c.op == "tune_model.cached_attention" for c in form.body)
    for cache in caches:
        batch, heads, _, depth = _sizes(cache.type.shape)
        if reads:
            total += batch * heads * visible_keys(form) * depth * element_bytes(cache.type.dtype)
    for call in form.body:
        if call.op == "tune_model.append_kv":
            # New keys are as large as new values.
            v = _operand(call, _slots(form), 3)
            total += 0 if v is None else 2 * _elements(v) * element_bytes(v.type.dtype)
    return total
