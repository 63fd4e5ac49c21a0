"""Which operators a program may call, and what they are.

Denied unless allowed. An ATen operator is allowed when its schema takes and gives tensors whose sizes do not depend on
data, and its name is on no list of those that reach files, storages, autograd's state or unchecked memory. Other
namespaces are allowed name by name. A name comes from an artifact, so nothing here imports or evaluates it.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tune_model.runtime.attention import append_kv, cached_attention, causal_attention
from tune_model.runtime.errors import TuneModelError

__all__ = ["OperatorError", "is_steady", "is_view", "resolve", "returns_list"]

Operator = Callable[..., Any]

_NAME = re.compile(r"(aten|mkldnn|mkl|tune_model)\.([A-Za-z_][A-Za-z0-9_]*)(?:\.([A-Za-z0-9_]+))?")

_OWN: dict[str, Operator] = {
    "tune_model.append_kv": append_kv,
    "tune_model.cached_attention": cached_attention,
    "tune_model.causal_attention": causal_attention,
}

# Pre-packed linear layers and the packing itself.
_LIBRARY = frozenset(
    {
        "mkldnn._linear_pointwise.default",
        "mkldnn._linear_pointwise.binary",
        "mkldnn._reorder_linear_weight.default",
        "mkl._mkl_linear.default",
        "mkl._mkl_reorder_linear_weight.default",
    }
)

# ATen's private operators that inference graphs hold; every other name with a leading underscore is denied.
_PRIVATE = frozenset(
    {
        "_adaptive_avg_pool2d",
        "_adaptive_avg_pool3d",
        "_assert_async",
        "_assert_tensor_metadata",
        "_cdist_forward",
        "_convolution",
        "_euclidean_dist",
        "_fft_c2c",
        "_fft_c2r",
        "_fft_r2c",
        "_fused_rms_norm",
        "_grouped_mm",
        "_int_mm",
        "_log_softmax",
        "_native_batch_norm_legit_no_training",
        "_native_multi_head_attention",
        "_safe_softmax",
        "_scaled_dot_product_attention_math",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_grouped_mm",
        "_scaled_mm",
        "_softmax",
        "_to_copy",
        "_unsafe_view",
        "_upsample_bicubic2d_aa",
        "_upsample_bilinear2d_aa",
        "_weight_int4pack_mm",
        "_weight_int4pack_mm_for_cpu",
        "_weight_int8pack_mm",
        "_weight_norm",
        "_weight_norm_interface",
    }
)

# Files, storages, sizes changed in place, autograd's state, memory that is not checked, other streams and vendors.
_DENIED = re.compile(
    r"from_file|data|detach_|set_?|set_data|resize\w*|requires_grad_|retain\w*|record_stream|pin_memory|empty_quantized|"
    r"\w*_backward\w*|get_gradients|gradient|sparse_\w+|to_sparse\w*|lift|fbgemm_\w+|cudnn_\w+|miopen_\w+|mps_\w+|"
    r"flatten_dense_tensors|unflatten_dense_tensors|sym_\w+|as_strided_|embedding_renorm_?|normal_functional"
)


# Tagged as dynamic for the sake of one kind of argument (masks, counts on the device); programs use the other kinds.
_SIZED_BY_ARGUMENTS = frozenset({"index", "one_hot", "repeat_interleave"})


_UNSTEADY = re.compile(r"attention|conv|rnn|lstm|gru|mkldnn|batch_norm|grid_sample")


class OperatorError(TuneModelError):
    """A program calls an operator that the runtime does not execute."""


def _refuse(op: str, reason: str) -> OperatorError:
    return OperatorError(f"operator {op!r} {reason}; expected an ATen operator over tensors, or one of {sorted(_OWN)}")


# They also return sequence lengths, which nobody reads.
_WITH_LENGTHS = frozenset({"_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention"})


def _returns_tensors(overload: Any, name: str) -> bool:
    allowed = {"Tensor", "List[Tensor]", *({"int", "SymInt"} if name in _WITH_LENGTHS else ())}
    return all(str(r.type) in allowed for r in overload._schema.returns)


@lru_cache(maxsize=4096)
def _overload(op: str) -> Any:
    """Find the torch operator a name stands for, applying the policy."""
    match = _NAME.fullmatch(op)
    if match is None or match[1] == "tune_model":
        raise _refuse(op, "is unknown")
    namespace, name, overload_name = match[1], match[2], match[3] or "default"
    if namespace != "aten":
        if f"{namespace}.{name}.{overload_name}" not in _LIBRARY:
            raise _refuse(op, "is not allowed")
    elif name.startswith("_") and name not in _PRIVATE:
        raise _refuse(op, "is private to ATen")
    elif _DENIED.fullmatch(name):
        raise _refuse(op, "is not allowed")
    try:
        overload = getattr(getattr(getattr(torch.ops, namespace), name), overload_name)
    except AttributeError as error:
        raise _refuse(op, f"does not exist in torch {torch.__version__}") from error
    if not isinstance(overload, torch._ops.OpOverload):
        raise _refuse(op, "is not an operator overload")
    if not _returns_tensors(overload, name):
        raise _refuse(op, "does not return tensors")
    dynamic = torch.Tag.dynamic_output_shape in overload.tags or torch.Tag.data_dependent_output in overload.tags
    if dynamic and name not in _SIZED_BY_ARGUMENTS:
        raise _refuse(op, "has results whose sizes depend on data")
    return overload


def _matmul(overload: Operator) -> Operator:
    """Multiply matrices, outer products on CUDA as a broadcast product.

    torch 2.13 sends a CUDA bmm whose inner size is 1 to a Triton kernel, which compiles at its first call.
    """

    def matmul(a: Tensor, b: Tensor) -> Any:
        if a.is_cuda and a.dim() > 1 and b.dim() > 1 and a.size(-1) == 1:
            return a * b
        return overload(a, b)

    return matmul


def resolve(op: str) -> Operator:
    """Return the function behind an operator's qualified name.

    Args:
        op: As in `Call.op`: `aten.linear.default`, `tune_model.append_kv`.

    Raises:
        OperatorError: The name is unknown to this torch or not allowed.
    """
    own = _OWN.get(op)
    if own is not None:
        return own
    overload: Operator = _overload(op)
    return _matmul(overload) if op in {"aten.bmm.default", "aten.matmul.default"} else overload


def is_view(op: str) -> bool:
    """Tell whether an operator's result may share memory with an argument (views, in-place operators)."""
    return op not in _OWN and any(r.alias_info is not None for r in _overload(op)._schema.returns)


def is_steady(op: str) -> bool:
    """Tell whether the layout of an operator's result depends on the layouts of its arguments alone.

    Attention, convolution and the like choose among backends call by call (by alignment, say), and these differ.
    """
    return _UNSTEADY.search(op) is None


def returns_list(op: str) -> bool:
    """Tell whether an operator returns a sequence (several tensors, or a list of any length)."""
    if op in _OWN:
        return False
    returns = _overload(op)._schema.returns
    return len(returns) != 1 or str(returns[0].type) != "Tensor"
