"""Families of candidates, one file each, and which of them compete on which machine.

A family's module holds one stateless object, `FAMILY`. The first is always `aten`: the baseline, which accepts every
task. Importing a family needs neither Triton nor a compiler; building does.
"""

from tune_model.tune.candidate import Family
from tune_model.tune.families import (
    aten,
    aten_addition,
    aten_parts,
    aten_transposed,
    cpp_epilogue,
    cpp_gemv,
    cpp_pointwise,
    cpp_rows,
    cublaslt,
    library_halves,
    mkl_linear,
    mkldnn_linear,
    sdpa,
    triton_decode_attention,
    triton_epilogue,
    triton_flash_attention,
    triton_gemv,
    triton_matmul,
    triton_persistent,
    triton_pointwise,
    triton_rows,
    triton_split_k,
    triton_split_rows,
)
from tune_model.tune.target import CudaTarget, Target

__all__ = ["families_for", "family_named"]

_CUDA: tuple[Family, ...] = (
    aten.FAMILY,
    aten_transposed.FAMILY,
    aten_parts.FAMILY,
    aten_addition.FAMILY,
    cublaslt.FAMILY,
    triton_gemv.FAMILY,
    triton_matmul.FAMILY,
    triton_persistent.FAMILY,
    triton_split_k.FAMILY,
    triton_epilogue.FAMILY,
    library_halves.FAMILY,
    triton_rows.FAMILY,
    triton_split_rows.FAMILY,
    triton_pointwise.FAMILY,
    triton_decode_attention.FAMILY,
    triton_flash_attention.FAMILY,
    sdpa.FAMILY,
)
_CPU: tuple[Family, ...] = (
    aten.FAMILY,
    mkldnn_linear.FAMILY,
    mkl_linear.FAMILY,
    aten_parts.FAMILY,
    aten_addition.FAMILY,
    cpp_gemv.FAMILY,
    cpp_epilogue.FAMILY,
    library_halves.FAMILY,
    cpp_rows.FAMILY,
    cpp_pointwise.FAMILY,
)


def families_for(target: Target) -> tuple[Family, ...]:
    """Return the families that can compete on a machine, the baseline first, the rest in the order to try them."""
    return _CUDA if isinstance(target, CudaTarget) else _CPU


def family_named(name: str) -> Family:
    """Return a family by its name, as a candidate or a record states it.

    Raises:
        KeyError: There is no such family.
    """
    return {family.name: family for family in (*_CUDA, *_CPU)}[name]
