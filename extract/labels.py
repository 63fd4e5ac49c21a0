"""Concrete forms in a few words: `matmul 1x4096x28672 bf16 + swiglu`."""

from tune_model.extract.cost import visible_keys
from tune_model.extract.layout import VIEWS
from tune_model.runtime.program import Call, Form, Parameter, Ref, TensorType

__all__ = ["label"]

_DTYPES = {
    "float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64", "int64": "i64", "int32": "i32"
}  # fmt: skip
_ACTIVATIONS = frozenset({"silu", "gelu", "relu", "tanh", "sigmoid", "hardswish", "elu", "mish", "softplus", "erf"})
_GATED = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu", "sigmoid": "glu"}
_MATMULS = frozenset({"linear", "mm", "bmm", "matmul"})
_ATTENTION = frozenset({"scaled_dot_product_attention", "cached_attention", "causal_attention"})
_REDUCTIONS = frozenset(
    {"rms_norm", "layer_norm", "softmax", "log_softmax", "sum", "mean", "var", "std", "amax", "amin", "argmax",
     "argmin", "any", "all", "prod", "logsumexp", "linalg_vector_norm", "group_norm"}
)  # fmt: skip
_ROTATION = frozenset({"cat", "neg", "slice", "mul", "add"})
"""What a rotary embedding of interleaved halves is made of."""


def label(form: Form) -> str:
    """Return a concrete form for people."""
    match form.kind:
        case "matmul":
            return _matmul(form)
        case "attention":
            return _attention(form)
        case "reduction":
            return _reduction(form)
        case _:
            return _pointwise(form)


def _name(call: Call) -> str:
    return call.op.split(".")[1]


def _dtype(type_: TensorType) -> str:
    return _DTYPES.get(type_.dtype, type_.dtype)


def _shape(type_: TensorType) -> str:
    return "x".join(map(str, type_.shape)) or "scalar"


def _slots(form: Form) -> dict[str, Parameter]:
    return {p.name: p for p in form.parameters}


def _with(text: str, extras: list[str]) -> str:
    return " + ".join([text, *dict.fromkeys(extras)])


def _matmul(form: Form) -> str:
    slots = _slots(form)
    at, call = next((i, c) for i, c in enumerate(form.body) if _name(c) in _MATMULS)
    left, right = (slots[a.name].type for a in call.args[:2] if isinstance(a, Ref))
    *lead, rows, summed = left.shape
    columns = right.shape[0 if _name(call) == "linear" else -1]
    size = "x".join(map(str, (*lead, rows, summed, columns)))
    name = "matmul" if not lead else "bmm"
    extras = ["bias"] if len(call.args) > 2 else []
    return _with(f"{name} {size} {_dtype(left)}", extras + _epilogue(form, form.body[at + 1 :]))


def _epilogue(form: Form, calls: tuple[Call, ...]) -> list[str]:
    slots = _slots(form)
    halves = sum(_name(c) == "slice" for c in calls) >= 2
    activation = next((_name(c) for c in calls if _name(c) in _ACTIVATIONS), None)
    extras: list[str] = []
    for call in calls:
        name = _name(call)
        reads = [slots[a.name].type for a in call.args if isinstance(a, Ref) and a.name in slots]
        if name in _ACTIVATIONS:
            extras.append(_GATED.get(name, name) if halves else name)
        elif name == "slice" or (name == "mul" and halves and activation is not None and not reads):
            continue
        elif name == "add" and reads:
            extras.append("residual" if len(reads[0].shape) > 1 and 1 not in reads[0].shape[-1:] else "bias")
        elif name == "to":
            extras.append("cast")
        elif name in {"mul", "div"}:
            extras.append("scale")
        else:
            extras.append(name)
    return extras


def _reduction(form: Form) -> str:
    main = [_name(c) for c in form.body if _name(c) in _REDUCTIONS]
    tables = {a.name for c in form.body if _name(c) == "embedding" for a in c.args[:1] if isinstance(a, Ref)}
    rows = [p for p in (*form.parameters, *form.results) if p.name not in tables]
    widest = max(rows, key=lambda p: (len(p.type.shape), _volume(p.type)))
    first = next(i for i, c in enumerate(form.body) if _name(c) in _REDUCTIONS)
    extras: list[str] = []
    for i, call in enumerate(form.body):
        name = _name(call)
        if name in _REDUCTIONS or name in {"slice", "to", "expand"}:
            continue
        if name == "add" and i < first and all(isinstance(a, Ref) for a in call.args):
            extras.append("residual")
        elif name == "mul" and i > first and main[0] in {"rms_norm", "layer_norm"}:
            continue
        else:
            extras.append(name)
    if {_name(c) for c in form.body} >= _ROTATION:
        extras = [e for e in extras if e not in _ROTATION] + ["rotary embedding"]
    if len(extras) > 4:
        extras = [*extras[:3], f"{len(extras) - 3} more"]
    return _with(f"{'+'.join(dict.fromkeys(main))} {_shape(widest.type)} {_dtype(widest.type)}", extras)


def _volume(type_: TensorType) -> int:
    volume = 1
    for size in type_.shape:
        volume *= size if isinstance(size, int) else 1
    return volume


def _attention(form: Form) -> str:
    slots = _slots(form)
    at, call = next((i, c) for i, c in enumerate(form.body) if _name(c) in _ATTENTION)
    # Queries that the form makes are like its result.
    q, k = (slots.get(a.name, form.results[0]).type for a in call.args[:2] if isinstance(a, Ref))
    batch, heads, queries, depth = q.shape
    grouped = "" if k.shape[1] == heads else f"/{k.shape[1]}"
    head = f"b{batch} h{heads}{grouped} d{depth} {_dtype(q)}"
    sinks = " sinks" if isinstance(call.args[-1], Ref) else ""
    if _name(call) == "cached_attention":
        length = "" if queries == 1 else f" q{queries}"
        what = f"attention decode {head}{length} ctx{visible_keys(form) - 1}{sinks}"
        return _with(what, _on_heads(form.body[:at]))
    if _name(call) == "causal_attention":
        return f"attention prefill {head} len{queries}{sinks}"
    return f"attention {head} q{queries} k{k.shape[2]}"


def _on_heads(calls: tuple[Call, ...]) -> list[str]:
    names = list(dict.fromkeys(_name(c) for c in calls if c.op not in VIEWS and _name(c) != "append_kv"))
    if {_name(c) for c in calls} >= _ROTATION:
        names = [n for n in names if n not in _ROTATION] + ["rotary embedding"]
    return names


def _pointwise(form: Form) -> str:
    names = [_name(c) for c in form.body]
    result = form.results[0].type
    size = f"pointwise {_shape(result)} {_dtype(result)}"
    if set(names) >= _ROTATION:
        return f"{size}: rotary embedding"
    shown = list(dict.fromkeys(n for n in names if n not in {"slice", "expand"}))
    return f"{size}: {', '.join(shown[:5])}{', ...' if len(shown) > 5 else ''}"
