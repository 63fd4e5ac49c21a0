"""Raw programs to simpler raw programs: one pass a file, each `Program -> Program`, in the order of `rewrite`."""

from collections.abc import Callable

from tune_model.extract.rewrite.additions import take_additions_apart
from tune_model.extract.rewrite.attention import fold_query_scales, read_attention_operands_in_place
from tune_model.extract.rewrite.complex_pairs import take_complex_numbers_apart
from tune_model.extract.rewrite.einsum import spell_einsums
from tune_model.extract.rewrite.equal_calls import share_common_calls
from tune_model.extract.rewrite.grouped_query import recognise_grouped_queries
from tune_model.extract.rewrite.heads import join_heads
from tune_model.extract.rewrite.linears import merge_linears, spell_linears
from tune_model.extract.rewrite.norms import absorb_norm_casts, absorb_norm_weights, recognise_norms
from tune_model.extract.rewrite.outer_product import rewrite_outer_products
from tune_model.extract.rewrite.patches import multiply_patches
from tune_model.extract.rewrite.relayout import settle_layouts
from tune_model.extract.rewrite.softmax import recognise_softmax
from tune_model.extract.rewrite.spelling import spell
from tune_model.extract.rewrite.unit import drop_unit_arithmetic
from tune_model.extract.rewrite.written_attention import recognise_written_attention
from tune_model.runtime.program import Program

__all__ = ["PASSES", "rewrite"]

PASSES: tuple[Callable[[Program], Program], ...] = (
    spell_einsums,  # in calls that are spelled next
    spell,  # everything after it knows one spelling per operation
    take_complex_numbers_apart,  # before norms: what is left is real
    multiply_patches,
    take_additions_apart,
    drop_unit_arithmetic,
    share_common_calls,
    rewrite_outer_products,
    recognise_norms,
    absorb_norm_weights,  # before casts: a weight applied in float32 belongs inside the cast
    absorb_norm_weights,  # once more, for the bias after the weight of a layer norm
    absorb_norm_casts,
    recognise_softmax,
    recognise_written_attention,
    recognise_grouped_queries,
    read_attention_operands_in_place,
    fold_query_scales,
    settle_layouts,
    spell_linears,
    merge_linears,
    join_heads,
)


def rewrite(program: Program) -> Program:
    """Run all passes."""
    for run in PASSES:
        program = run(program)
    return program
