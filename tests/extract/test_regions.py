"""Which steps become one form, what the form looks like, and that the values stay the same."""

import pytest
import torch
from grouped_programs import DIMS, B, D, T, body, forms, grouped, normal, only
from raw_programs import Function, raw_program
from torch.nn import functional as F  # noqa: N812 - what it is called everywhere

from tune_model.extract.regions.group import Grouping, group
from tune_model.extract.rewrite import rewrite
from tune_model.runtime.program import (
    Call,
    Input,
    Output,
    Program,
    Ref,
    Symbol,
    TensorType,
    ValueRange,
)

# ------------------------------------------------------------------------------------------------------------- matmuls


def test_a_linear_over_batch_and_sequence_has_one_row_dim():
    module = Function(F.linear, (16, D), (16,))
    program = grouped(module, x=(normal(B, T, D), DIMS))
    form = only(program)
    assert (form.kind, form.dims) == ("matmul", ("d0",))
    assert [p.type.shape for p in form.parameters] == [("d0", D), (16, D), (16,)]
    assert [p.role for p in form.parameters] == ["activation", "weight", "weight"]
    assert form.results[0].type.shape == ("d0", 16)
    assert program.steps[0].dims == ("batch*sequence",)


def test_prefill_and_decode_share_their_linears():
    module = Function(F.linear, (16, D))
    prefill = grouped(module, x=(normal(B, T, D), DIMS))
    decode = grouped(module, x=(normal(B, 1, D), ("batch", 1, D)))
    assert prefill.forms == decode.forms
    assert decode.steps[0].dims == ("batch",)


def test_bias_activation_scale_and_residual_join_the_matmul():
    def block(x, r, w, b):
        return (r + F.gelu(F.linear(x, w) + b) * 0.5).clamp(-1, 1)

    r = normal(B, T, 16, seed=8)
    program = grouped(Function(block, (16, D), (16,)), x=(normal(B, T, D), DIMS), r=(r, ("batch", "sequence", 16)))
    assert body(only(program)) == ["linear", "add", "gelu", "mul", "add", "clamp"]


def test_both_halves_of_a_gate_join_the_matmul():
    def swiglu(x, gate, up):
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    program = grouped(Function(swiglu, (16, D), (16, D)), x=(normal(B, T, D), DIMS))
    form = only(program)
    assert sorted(body(form)) == ["linear", "mul", "silu", "slice", "slice"]
    assert form.results[0].type.shape == ("d0", 16)


def test_the_order_of_gate_and_up_does_not_matter():
    def first(x, gate, up):
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    def second(x, gate, up):
        gate = F.linear(x, gate)
        return F.linear(x, up) * F.silu(gate)

    x = (normal(B, T, D), DIMS)
    shapes = ((16, D), (16, D))
    assert grouped(Function(first, *shapes), x=x).forms == grouped(Function(second, *shapes), x=x).forms


def test_an_epilogue_stops_where_something_else_reads():
    def two_readers(x, w):
        h = F.linear(x, w)
        return F.relu(h), h * 2

    program = grouped(Function(two_readers, (16, D)), x=(normal(B, T, D), DIMS))
    assert [body(f) for f in forms(program)] == [["linear"], ["relu"], ["mul"]]


def test_an_operand_made_from_the_output_elsewhere_is_no_epilogue():
    """h * softmax(h): the region would have to run before and after the softmax."""

    def cycle(x, w):
        h = F.linear(x, w)
        return h * F.softmax(h, -1)

    program = grouped(Function(cycle, (16, D)), x=(normal(B, T, D), DIMS))
    assert body(forms(program)[0]) == ["linear"]


def test_the_input_may_come_back_in_the_epilogue():
    program = grouped(Function(lambda x, w: F.linear(x, w) + x, (D, D)), x=(normal(B, T, D), DIMS))
    assert only(program).parameters[0].type == only(program).parameters[2].type
    assert program.steps[0].inputs[0] == program.steps[0].inputs[2]


def test_a_strided_input_keeps_its_strides():
    """Pooling the first token: rows lie a whole sequence apart."""
    program = grouped(Function(lambda x, w: F.linear(x[:, 0], w).tanh(), (16, D)), x=(normal(B, T, D), DIMS))
    form = only(program)
    assert form.dims == ("d0", "d1")
    assert form.parameters[0].type == TensorType("float32", ("d0", D), ("d1*32", 1))
    assert program.steps[0].dims == ("batch", "sequence")


def test_a_cast_to_a_wider_type_is_left_to_the_norm():
    def block(x, w, n):
        h = F.linear(x, w).float()
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + n.float())).to(x.dtype)

    module = Function(block, (16, D), (16,), dtype=torch.bfloat16)
    program = grouped(module, tolerance=4e-3, x=(normal(B, T, D, dtype=torch.bfloat16), DIMS))
    assert [f.kind for f in forms(program)] == ["matmul", "reduction"]
    assert forms(program)[0].results[0].type.dtype == "bfloat16"


def test_batched_matmuls_join_their_batch_dims():
    def scores(q, k):
        return torch.softmax(q @ k.transpose(-1, -2) * 0.3, -1)

    heads = ("batch", 4, "sequence", 8)
    program = grouped(Function(scores), q=(normal(B, 4, T, 8), heads), k=(normal(B, 4, T, 8, seed=9), heads))
    product, softmax = forms(program)
    assert body(product) == ["bmm", "mul"]
    assert product.parameters[1].type == TensorType("float32", ("d0", 8, "d1"), ("d1*8", 1, 8))
    assert softmax.parameters[0].type.shape == ("d0", "d1")


def test_a_single_row_or_column_is_still_a_dim():
    """Attention pooling: one query per batch. Its batch was taken for the rows."""

    def pooled(q, k, w):
        scores = torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1)
        return torch.bmm(scores, k), F.linear(q.squeeze(1)[:1], w), F.linear(k, w[:1])

    q, k = normal(6, 1, 8), normal(6, 5, 8)
    program = grouped(Function(pooled, (16, 8)), q=(q, ("batch", 1, 8)), k=(k, ("batch", "sequence", 8)))
    matmuls = [f for f in forms(program) if f.kind == "matmul"]
    assert {f.results[0].type.shape for f in matmuls} == {("d0", 1, "d1"), ("d0", 1, 8), (1, 16), ("d0", 1)}


# ---------------------------------------------------------------------------------------------------------- reductions


def test_a_residual_before_a_norm_is_a_second_result():
    def block(x, y, w):
        h = x + y
        return F.layer_norm(h, (D,), w), h

    program = grouped(Function(block, (D,)), x=(normal(B, T, D), DIMS), y=(normal(B, T, D, seed=8), DIMS))
    norm = forms(program)[0]
    assert (norm.kind, body(norm)) == ("reduction", ["add", "layer_norm"])
    assert [r.type.shape for r in norm.results] == [("d0", D), ("d0", D)]


@pytest.mark.parametrize("sums_with_norms", [False, True])
def test_a_residual_between_a_projection_and_a_norm_may_belong_to_either(sums_with_norms: bool):
    def block(x, y, w, bias, n, last):
        h = x + F.linear(y, w, bias)
        return F.linear(F.rms_norm(h, (D,), n), last) + h

    program = grouped(
        Function(block, (D, D), (D,), (D,), (D, D)),
        x=(normal(B, T, D), DIMS),
        y=(normal(B, T, D, seed=8), DIMS),
        grouping=Grouping(sums_with_norms=sums_with_norms),
    )
    first, norm, last = (body(f) for f in forms(program))
    # A bias is no residual sum, and a sum that no norm reads has one place only.
    assert first == ["linear"] if sums_with_norms else ["linear", "add"]
    assert norm == ["add", "rms_norm"] if sums_with_norms else ["rms_norm"]
    assert last == ["linear", "add"]


def test_what_follows_a_norm_joins_it():
    program = grouped(Function(lambda x, w: F.silu(F.rms_norm(x, (D,), w)) * 2, (D,)), x=(normal(B, T, D), DIMS))
    assert body(only(program)) == ["rms_norm", "silu", "mul"]


def test_reductions_of_the_same_rows_are_one():
    def spelled(x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.abs().amax(-1, keepdim=True) + 1)

    assert only(grouped(Function(spelled), x=(normal(B, T, D), DIMS))).kind == "reduction"


def test_reductions_over_different_loops_are_not():
    def heads(x, w, v):
        h = F.rms_norm(x, (D,), w).unflatten(-1, (4, 8))
        return F.rms_norm(h, (8,), v)

    program = grouped(Function(heads, (D,), (8,)), x=(normal(B, T, D), DIMS))
    assert [f.parameters[0].type.shape for f in forms(program)] == [("d0", D), ("d0", 8)]


def test_a_reduction_over_an_outer_dim_has_it_last():
    program = grouped(Function(lambda x: x.mean(1)), x=(normal(B, T, D), DIMS))
    form = only(program)
    assert form.parameters[0].type == TensorType("float32", ("d0", D, "d1"), ("d1*32", 1, 32))
    assert form.body[0].args[1].items == (-1,)


def test_positions_added_before_a_norm_join_it():
    def embeddings(x, positions, w):
        return F.layer_norm(x + positions[None, : x.shape[1]], (D,), w)

    program = grouped(Function(embeddings, (16, D), (D,)), x=(normal(B, T, D), DIMS))
    assert forms(program)[0].parameters[0].type.shape == ("d0", "d1", D)


# ----------------------------------------------------------------------------------------------------------- pointwise


def rotate(q, cos, sin):
    half = q.shape[-1] // 2
    turned = torch.cat((-q[..., half:], q[..., :half]), -1)
    return q * cos + turned * sin


def rope(x, angles, *, turned_first=False):
    q = x[..., :D].unflatten(-1, (4, 8)).transpose(1, 2)
    angles = torch.cat((angles, angles), -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    if turned_first:
        turned = torch.cat((-q[..., 4:], q[..., :4]), -1) * sin
        return (turned + cos * q).transpose(1, 2)
    return rotate(q, cos, sin).transpose(1, 2)


def test_a_rotary_embedding_is_one_region():
    inputs = {
        "x": (normal(B, T, 3 * D), ("batch", "sequence", 3 * D)),
        "angles": (normal(B, T, 4), ("batch", "sequence", 4)),
    }
    program = grouped(Function(rope), **inputs)
    angles, turned = forms(program)
    assert len(angles.results) == 2
    assert turned.dims == ("d0",)
    assert turned.parameters[0].type == TensorType("float32", ("d0", 4, 8), (96, 8, 1))
    assert program.forms == grouped(Function(lambda x, a: rope(x, a, turned_first=True)), **inputs).forms

    decode = {
        "x": (normal(B, 1, 3 * D), ("batch", 1, 3 * D)),
        "angles": (normal(B, 1, 4), ("batch", 1, 4)),
    }
    assert program.forms == grouped(Function(rope), **decode).forms


def test_a_norm_of_heads_takes_the_rotary_embedding():
    def block(x, angles, w):
        q = F.rms_norm(x.unflatten(-1, (4, 8)), (8,), w).transpose(1, 2)
        return rotate(q, angles[:, None], angles[:, None])

    inputs = {"x": (normal(B, T, D), DIMS), "angles": (normal(B, T, 8), ("batch", "sequence", 8))}
    program = grouped(Function(block, (8,)), **inputs)
    assert only(program).kind == "reduction"
    assert only(program).results[0].type.shape == ("d0", 4, 8)


def test_a_contiguous_chain_has_one_dim():
    program = grouped(Function(lambda x: torch.tanh(x * 2) + x), x=(normal(B, T, D), DIMS))
    form = only(program)
    assert form.parameters[0].type.shape == ("d0",)
    assert program.steps[0].dims == ("batch*sequence*32",)


def test_a_transpose_is_in_the_operands_strides_only():
    def transposed(x, y):
        return (x.transpose(1, 2) + y).exp()

    y = (normal(B, D, T, seed=8), ("batch", D, "sequence"))
    program = grouped(Function(transposed), x=(normal(B, T, D), DIMS), y=y)
    assert sorted(body(only(program))) == ["add", "exp"]


def test_names_order_and_commuted_operands_do_not_matter():
    def one(x, y):
        return (x * 2 + y).relu() * x

    def other(y, x):
        return y * (x + y * 2).relu()

    x, y = (normal(B, T, D), DIMS), (normal(B, T, D, seed=8), DIMS)
    assert grouped(Function(one), x=x, y=y).forms == grouped(Function(other), p=x, q=y).forms


def test_a_joined_token_needs_no_copy_of_its_own():
    def patches(x, token, positions):
        tokens = token.expand(x.shape[0], -1, -1)
        return torch.cat((tokens, x.flatten(2).transpose(1, 2)), 1) + positions

    module = Function(patches, (1, 1, D), (1, 10, D))
    program = grouped(module, x=(normal(B, D, 3, 3), ("batch", D, 3, 3)))
    assert only(program).results[0].type.shape == ("d0", 10, D)


def test_a_scalar_tensor_stays_one():
    """A tensor without dims takes no part in type promotion; one of shape (1, 1, 1) does."""

    def scaled(x, s):
        return x * s, x + s.view(1, 1, 1)

    module = Function(scaled, ())
    grouped(module, tolerance=1e-3, x=(normal(B, T, D, dtype=torch.bfloat16), DIMS))


def test_masks_with_comparisons_and_where():
    def mask(m, x):
        keep = (m[:, None, :] > 0) & (torch.ones_like(m)[:, :, None] > 0)
        return torch.where(keep, x, torch.finfo(x.dtype).min)

    m = (torch.tensor([[1, 1, 0, 1, 0], [1, 0, 0, 1, 1]]), ("batch", "sequence"))
    x = (normal(B, T, T), ("batch", "sequence", "sequence"))
    grouped(Function(mask), m=m, x=x)


def test_what_no_kernel_can_do_stays_a_call_with_a_reason():
    module = Function(lambda x: x.cumsum(-1).relu())
    raw = raw_program(module, x=(normal(B, D), ("batch", D)))
    result = group(rewrite(raw))
    assert [(s.op, s.count) for s in result.skipped] == [("aten.cumsum.default", 1)]
    assert result.skipped[0].reason


# -------------------------------------------------------------------------------------------------------------- blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_block_is_eight_regions(dtype):
    def norm(x, w):
        h = x.float()
        return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def block(x, angles, *weights):
        n1, q, k, v, o, n2, gate, up, down = weights
        h = norm(x, n1)
        q, k, v = (F.linear(h, w).unflatten(-1, (-1, 8)).transpose(1, 2) for w in (q, k, v))
        angles = angles.to(x.dtype)[:, None]
        q, k = rotate(q, angles, angles), rotate(k, angles, angles)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + F.linear(out.transpose(1, 2).flatten(2), o)
        h = norm(x, n2)
        return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)

    shapes = [(D,), (D, D), (16, D), (16, D), (D, D), (D,), (64, D), (64, D), (D, 64)]
    inputs = {"x": (normal(B, T, D, dtype=dtype), DIMS), "angles": (normal(B, T, 8), ("batch", "sequence", 8))}
    program = grouped(
        Function(block, *shapes, dtype=dtype), tolerance=1e-5 if dtype == torch.float32 else 1e-2, **inputs
    )
    kinds = [f.kind for f in forms(program)]
    cast = kinds.pop(kinds.index("pointwise")) if dtype == torch.bfloat16 else None
    assert cast in {None, "pointwise"}
    assert kinds == [
        "reduction", "matmul", "pointwise", "attention", "matmul", "reduction", "matmul", "matmul"
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- lookups


def test_embeddings_join_the_norm_behind_them():
    """Words over batch and sequence, places over the sequence alone."""

    def embed(ids, places, words, positions, w):
        total = F.embedding(ids, words) + F.embedding(places, positions)
        return total, F.layer_norm(total, (D,), w)

    module = Function(embed, (30, D), (9, D), (D,))
    ids = torch.randint(0, 30, (B, T), generator=torch.Generator().manual_seed(1))
    program = grouped(module, ids=(ids, ("batch", "sequence")), places=(torch.arange(T), ("sequence",)))
    form = only(program)
    assert sorted(body(form)) == ["add", "embedding", "embedding", "layer_norm"]
    assert {p.type.shape for p in form.parameters} == {(30, D), (9, D), ("d0", "d1"), ("d1",), (D,)}


def test_a_large_table_is_looked_up_apart():
    """A tuner would hold it in float64 beside itself to save one launch."""
    values = {"ids": TensorType("int64", ("s0",)), "table": TensorType("bfloat16", (1 << 18, 1 << 10))}
    looked_up = TensorType("bfloat16", ("s0", 1 << 10))
    steps = (
        Call("aten.embedding.default", (Ref("table"), Ref("ids")), (), ("x",)),
        Call("aten.softmax.int", (Ref("x"), 1), (), ("y",)),
    )
    program = Program(
        "forward",
        (Symbol("s0", 1, 64),),
        tuple(Input(name, type_, values=ValueRange(0, 99)) for name, type_ in values.items()),
        (),
        (),
        {},
        steps,
        {"x": looked_up, "y": looked_up},
        (Output("y", "y"),),
    )
    assert [s.op for s in group(program).skipped] == ["aten.embedding.default"]


def test_numbers_that_are_read_otherwise_too_stay_outside():
    def embed(ids, words, w):
        total = F.embedding(ids, words) * (ids != 0)[..., None]
        return F.layer_norm(total, (D,), w)

    module = Function(embed, (30, D), (D,))
    ids = torch.randint(0, 30, (B, T), generator=torch.Generator().manual_seed(1))
    program = grouped(module, ids=(ids, ("batch", "sequence")))
    assert not [f for f in forms(program) if "embedding" in body(f) and "ne" in body(f)]
