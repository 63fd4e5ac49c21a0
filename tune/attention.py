"""What the families need to know of an attention form: which slot is what, read from its body once.

Accepted are bodies of one attention call, with or without the append of new keys and values to a cache. What makes the
queries and the new keys may be in the body too; a family says so if it can do that work.
"""

from typing import NamedTuple

from tune_model.runtime.program import Call, Form, Parameter, Ref, TensorType
from tune_model.tune.candidate import Rejected
from tune_model.tune.loops.body import Unsupported, read_body

__all__ = ["AttentionForm", "read_attention"]

_APPEND = "tune_model.append_kv"
_CACHED = "tune_model.cached_attention"
_CAUSAL = "tune_model.causal_attention"
_SDPA = "aten.scaled_dot_product_attention.default"


class AttentionForm(NamedTuple):
    """An attention form by roles.

    Attributes:
        op: `cached` (reads a cache up to each query's position), `causal` (fresh prefill) or `sdpa`.
        q: Slot of the queries [batch, heads, queries, head_dim]; where the form makes them, the value with its type.
        k: Slot of the keys that are read: the cache for `cached`.
        v: Slot of the values that are read.
        out: Slot of the result.
        positions: Slot of the positions [batch, queries]; `cached` only.
        append: The call that appends new keys and values, if the form holds one.
        made: Calls that make queries and new keys of slots, in order.
        mask: Slot of the additive or boolean mask; `sdpa` only.
        is_causal: Top-left causal mask.
        scale: Factor of the scores; `None` is head_dim ** -0.5.
        window: Each query sees this many positions up to its own; `None` is all.
        softcap: Scores become softcap * tanh(scores / softcap); `None` leaves them.
        sinks: Slot of one more score for each head [heads], which takes weight and gives nothing.
    """

    op: str
    q: Parameter
    k: Parameter
    v: Parameter
    out: Parameter
    positions: Parameter | None
    append: Call | None
    made: tuple[Call, ...]
    mask: Parameter | None
    is_causal: bool
    scale: float | None
    window: int | None
    softcap: float | None
    sinks: Parameter | None = None


def read_attention(form: Form, *, with_heads: bool = False) -> AttentionForm | Rejected:
    """Read a concrete attention form, or say what is not understood.

    Args:
        form: Concrete.
        with_heads: The body may also make the queries and the new keys.
    """
    core = [c for c in form.body if c.op in {_APPEND, _CACHED, _CAUSAL, _SDPA}]
    made = tuple(c for c in form.body if c not in core)
    append = core.pop(0) if core and core[0].op == _APPEND else None
    if len(core) != 1 or core[0].op == _APPEND or (made and not (with_heads and core[0].op == _CACHED)):
        return Rejected("unsupported", f"calls {[c.op for c in form.body]}; expected one attention call")
    call = core[0]
    slots = {p.name: p for p in form.parameters}
    if made:
        typed = _typed(form, made)
        if isinstance(typed, Rejected):
            return typed
        slots |= typed
    tensors = [slots.get(a.name) if isinstance(a, Ref) else None for a in call.args]
    if len(form.results) != 1 or call.results[:1] != (form.results[0].name,) or None in tensors[:3]:
        return Rejected("unsupported", "an attention call whose operands or result are not the form's slots")
    q, k, v = tensors[:3]
    if q is None or k is None or v is None or any(len(t.type.shape) != 4 for t in (q, k, v)):
        return Rejected("unsupported", "an attention call on tensors that are not four-dimensional")
    if call.op == _SDPA:
        return _read_sdpa(call, (q, k, v, form.results[0]), slots)
    positions = None
    values = [*call.args[3:], *(value for _, value in call.kwargs)]
    if call.op == _CACHED:
        positions = tensors[3]
        values = values[1:]
        if positions is None:
            return Rejected("unsupported", "positions that are not a slot of the form")
    last = values.pop() if len(values) > 3 else None
    sinks = slots.get(last.name) if isinstance(last, Ref) else None
    if sinks is None and last is not None:
        return Rejected("unsupported", "attention sinks that are not a slot of the form")
    numbers = [n if isinstance(n, int | float) else None for n in values] + [None] * 3
    scale, window, softcap = numbers[:3]
    return AttentionForm(
        "cached" if call.op == _CACHED else "causal",
        q,
        k,
        v,
        form.results[0],
        positions,
        append,
        made,
        None,
        call.op == _CAUSAL,
        scale,
        None if window is None else int(window),
        softcap,
        sinks,
    )


def _typed(form: Form, calls: tuple[Call, ...]) -> dict[str, Parameter] | Rejected:
    """Return the types of what calls make."""
    try:
        values = read_body(Form("pointwise", (), form.parameters, calls, ())).values
    except Unsupported as reason:
        return Rejected("unsupported", str(reason))
    names = [result for call in calls for result in call.results if result is not None]
    return {n: Parameter(n, TensorType(values[n].dtype, values[n].shape, values[n].strides)) for n in names}


def _read_sdpa(
    call: Call, tensors: tuple[Parameter, Parameter, Parameter, Parameter], slots: dict[str, Parameter]
) -> AttentionForm | Rejected:
    q, k, v, out = tensors
    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), call.args, strict=False))
    given.update(call.kwargs)
    if given.get("dropout_p", 0.0) != 0.0:
        return Rejected("unsupported", "attention with dropout")
    mask = given.get("attn_mask")
    if mask is not None and not (isinstance(mask, Ref) and mask.name in slots):
        return Rejected("unsupported", "an attention mask that is not a slot of the form")
    scale = given.get("scale")
    return AttentionForm(
        "sdpa",
        q,
        k,
        v,
        out,
        None,
        None,
        (),
        slots[mask.name] if isinstance(mask, Ref) else None,
        given.get("is_causal") is True,
        float(scale) if isinstance(scale, int | float) else None,
        None,
        None,
    )
