"""Which operators regions are made of: one table, operator name to class. What is not here stays an ATen call.

Names are those left after `rewrite.spelling`; overloads are not told apart. Keep in step with what `tune.loops` lowers.
"""

from enum import Enum

from tune_model.extract.layout import VIEWS
from tune_model.runtime.program import Call, Items

__all__ = ["CHEAP", "COMMUTATIVE", "OpClass", "classify", "why_not"]


class OpClass(Enum):
    """What an operator does to the shape of its operands."""

    VIEW = "view"
    POINTWISE = "pointwise"
    """Element by element, operands broadcast."""
    COPY = "copy"
    """The same elements in row-major order."""
    JOIN = "join"
    """Concatenation."""
    LOOKUP = "lookup"
    """Rows of a table by number."""
    REDUCE = "reduce"
    """One element per row remains."""
    NORMALISE = "normalise"
    """Each row is replaced by one of the same length (softmax, norms)."""
    AS_WRITTEN = "as written"
    """As `NORMALISE`, over dims that are no loops of their own (groups of channels): forms keep the dims."""
    MATMUL = "matmul"
    ATTENTION = "attention"
    OTHER = "other"


_POINTWISE = (
    "neg abs sign sgn floor ceil trunc fix round reciprocal sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan "
    "atan sinh cosh tanh erf sigmoid relu silu gelu hardsigmoid hardswish hardtanh softplus mish leaky_relu elu "
    "log_sigmoid isnan isinf logical_not bitwise_not pow add sub rsub mul div remainder fmod atan2 maximum minimum "
    "bitwise_and bitwise_or bitwise_xor logical_and logical_or logical_xor eq ne lt le gt ge where masked_fill clamp "
    "clamp_min clamp_max addcmul addcdiv lerp to"
)
_REDUCE = "sum mean amax amin argmax argmin any all prod var std logsumexp linalg_vector_norm"
_NORMALISE = "softmax log_softmax layer_norm rms_norm"
_MATMUL = "linear mm bmm matmul"

_CLASSES: dict[str, OpClass] = {
    **{f"aten.{n}": OpClass.POINTWISE for n in _POINTWISE.split()},
    **{f"aten.{n}": OpClass.REDUCE for n in _REDUCE.split()},
    **{f"aten.{n}": OpClass.NORMALISE for n in _NORMALISE.split()},
    **{f"aten.{n}": OpClass.MATMUL for n in _MATMUL.split()},
    "aten.group_norm": OpClass.AS_WRITTEN,
    "aten.clone": OpClass.COPY,
    "aten.cat": OpClass.JOIN,
    "aten.embedding": OpClass.LOOKUP,
    "aten.scaled_dot_product_attention": OpClass.ATTENTION,
    "tune_model.append_kv": OpClass.ATTENTION,
    "tune_model.cached_attention": OpClass.ATTENTION,
    "tune_model.causal_attention": OpClass.ATTENTION,
}

_NORMS = frozenset({"aten.layer_norm.default", "aten.rms_norm.default"})

COMMUTATIVE = frozenset(
    f"aten.{n}"
    for n in (
        "add.Tensor", "mul.Tensor", "maximum.default", "minimum.default", "eq.Tensor", "ne.Tensor",
        "bitwise_and.Tensor", "bitwise_or.Tensor", "bitwise_xor.Tensor",
        "logical_and.default", "logical_or.default", "logical_xor.default",
    )
)  # fmt: skip
"""Calls whose first two operands may be swapped (an `add` only without `alpha`)."""

CHEAP = frozenset(
    f"aten.{n}"
    for n in (
        "to.dtype", "neg.default", "add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar", "mul.Tensor", "mul.Scalar",
    )
)  # fmt: skip
"""Calls that may be computed once per reader's element where that saves a pass over memory."""

_REASONS = {
    "aten.embedding": "a lookup; moves few bytes",
    "aten.index_select": "a lookup; moves few bytes",
    "aten.index": "a lookup; moves few bytes",
    "aten.gather": "a lookup; moves few bytes",
    "aten.arange": "makes a small tensor",
    "aten.full": "makes a small tensor",
    "aten.zeros": "makes a small tensor",
    "aten.ones": "makes a small tensor",
    "aten.scalar_tensor": "makes a small tensor",
    "aten.convolution": "convolutions are not tuned yet",
    "aten.conv1d": "convolutions are not tuned yet",
    "aten.conv2d": "convolutions are not tuned yet",
    "aten.conv3d": "convolutions are not tuned yet",
}


def _name(op: str) -> str:
    return ".".join(op.split(".")[:2])


def classify(call: Call) -> OpClass:
    """Return the class of a call's operator."""
    if call.op in VIEWS:
        return OpClass.VIEW
    if len(call.results) > 1:
        return OpClass.OTHER
    if call.op in _NORMS and isinstance(call.args[1], Items) and len(call.args[1].items) > 1:
        return OpClass.AS_WRITTEN
    return _CLASSES.get(_name(call.op), OpClass.OTHER)


def why_not(call: Call, misfit: str | None = None) -> str:
    """Say why a call that stayed outside every region is not tuned.

    Args:
        call: What stayed.
        misfit: Why it is no region of its own, if that was tried.
    """
    if classify(call) in {OpClass.OTHER, OpClass.LOOKUP}:
        return _REASONS.get(_name(call.op), "an operator without generated kernels")
    return misfit or "its layout or its dims do not fit a generated kernel"
