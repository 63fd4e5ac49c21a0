"""Every pass alone: what it leaves, and that the values stay the same."""

import pytest
import torch
from raw_programs import Example, Function, ops, raw_program, relative_error, run
from torch import nn

from tune_model.extract.rewrite import rewrite
from tune_model.extract.rewrite.additions import take_additions_apart
from tune_model.extract.rewrite.attention import fold_query_scales, read_attention_operands_in_place
from tune_model.extract.rewrite.einsum import spell_einsums
from tune_model.extract.rewrite.equal_calls import share_common_calls
from tune_model.extract.rewrite.grouped_query import recognise_grouped_queries
from tune_model.extract.rewrite.heads import join_heads
from tune_model.extract.rewrite.linears import merge_linears, spell_linears
from tune_model.extract.rewrite.norms import absorb_norm_casts, absorb_norm_weights, recognise_norms
from tune_model.extract.rewrite.outer_product import rewrite_outer_products
from tune_model.extract.rewrite.relayout import settle_layouts
from tune_model.extract.rewrite.softmax import recognise_softmax
from tune_model.extract.rewrite.spelling import spell
from tune_model.extract.rewrite.unit import drop_unit_arithmetic
from tune_model.runtime.program import Call, Concatenate

RMS = "rms_norm"


def check(module, passes, *, exact=True, tolerance=1e-6, **inputs: Example):
    """Run passes over a module's program; values must not change. Returns the rewritten program."""
    raw = raw_program(module, **inputs)
    program = raw
    for one in passes:
        program = one(program)
    tensors = {name: example for name, (example, _) in inputs.items()}
    weights = dict(module.named_parameters())
    for actual, expected in zip(run(program, tensors, weights), run(raw, tensors, weights), strict=True):
        assert actual.dtype == expected.dtype
        if exact:
            assert torch.equal(actual, expected)
        else:
            assert relative_error(actual, expected) < tolerance
    return program


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).to(dtype)


# ------------------------------------------------------------------------------------------------------------ spelling


def views(x):
    heads = x.unflatten(-1, (4, 8)).transpose(-2, 1).contiguous()
    first, second = heads.chunk(2, dim=-1)
    row = x[:, -1].squeeze(0)
    stacked = torch.stack((first, second), dim=-1).flatten(-2)
    parts = x.split([5, 27], dim=-1)
    return stacked, row, parts[1].narrow(-1, 2, 20), x.unbind(2)[3], x.movedim(0, -1), heads[..., ::2]


def test_views_have_one_spelling():
    program = check(Function(views), [spell], x=(normal(2, 3, 32), ("batch", "sequence", 32)))
    assert set(ops(program)) <= {"view", "permute", "expand", "slice.Tensor", "clone", "cat"}


def test_repeats_become_expands():
    def repeats(x):
        return x.repeat_interleave(3, dim=1), x.repeat(2, 1, 4), x[:, :1].repeat(1, 5, 1)

    program = check(Function(repeats), [spell], x=(normal(2, 3, 4), ("batch", "sequence", 4)))
    assert set(ops(program)) <= {"view", "expand", "slice.Tensor", "clone"}


def test_what_changes_nothing_disappears():
    def nothing(x):
        y = nn.functional.dropout(x, 0.5, training=False).to(torch.float32).contiguous()[:, :]
        return y.view(y.shape) * 2

    program = check(Function(nothing), [spell], x=(normal(3, 4), ("batch", 4)))
    assert ops(program) == ["mul.Scalar"]


def test_reductions_have_one_spelling():
    def reductions(x):
        return (
            x.mean(-1, dtype=torch.float64),
            x.softmax(-1, dtype=torch.float64),
            x.sum(),
            x.amax((0, -1)),
            x.argmax(-1),
        )

    program = check(Function(reductions), [spell], x=(normal(3, 4), ("batch", 4)))
    assert ops(program)[:2] == ["to.dtype", "mean.dim"]
    assert next(s for s in program.steps if s.op == "aten.softmax.int").args[1] == 1


def test_unit_arithmetic_disappears():
    program = check(
        Function(lambda x: ((x * 1.0 + 0.0) / 1.0 - 0) * 3.0), [spell, drop_unit_arithmetic], x=(normal(3), ("n",))
    )
    assert ops(program) == ["mul.Scalar"]


def test_equal_calls_are_made_once():
    program = check(
        Function(lambda x: (x - x.mean(-1, keepdim=True)) * (x - x.mean(-1, keepdim=True))),
        [spell, share_common_calls],
        x=(normal(3, 8), ("batch", 8)),
    )
    assert ops(program) == ["mean.dim", "sub.Tensor", "mul.Tensor"]


def test_an_outer_product_is_a_multiplication():
    def angles(frequencies, positions):
        wide = frequencies[None, :, None].expand(positions.shape[0], -1, 1)
        return (wide @ positions[:, None, :].float()).transpose(1, 2)

    program = check(
        Function(angles),
        [spell, rewrite_outer_products],
        f=(normal(8), (8,)),
        p=(torch.arange(10).view(2, 5), ("batch", "sequence")),
    )
    assert "mul.Tensor" in ops(program)
    assert "matmul" not in ops(program)
    assert "expand" not in ops(program)


# --------------------------------------------------------------------------------------------------------------- norms

NORMS = [spell, share_common_calls, recognise_norms, absorb_norm_weights, absorb_norm_weights, absorb_norm_casts]


def llama(x, w):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * h.to(x.dtype)


def weight_in_float(x, w):
    h = x.float()
    return (w.float() * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))).to(x.dtype)


def one_plus_weight(x, w):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + w.float())).type_as(x)


def by_power(x, w):
    h = x.float()
    return w * (h * torch.pow(h.pow(2).mean(-1, keepdim=True) + 1e-6, -0.5)).to(x.dtype)


def by_root(x, w):
    h = x.float()
    return w * (h / torch.sqrt(h.square().mean(-1, keepdim=True) + 1e-6)).type_as(x)


def gated(x, w):
    h = x.float()
    h = h * nn.functional.silu(h)
    return w * (h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@pytest.mark.parametrize(
    ("norm", "left"),
    [
        (llama, [RMS, "mul.Tensor"]),
        (weight_in_float, [RMS]),
        (one_plus_weight, ["to.dtype", "to.dtype", "add.Scalar", RMS, "to.dtype"]),
        (by_power, [RMS, "mul.Tensor"]),
        (by_root, [RMS, "mul.Tensor"]),
        (gated, ["to.dtype", "silu", "mul.Tensor", RMS, "to.dtype", "mul.Tensor"]),
    ],
)
def test_rms_norm_keeps_its_roundings(norm, left):
    """In bfloat16 a misplaced rounding shows as 2^-9; the float32 core itself may move a last bit and so flip one."""
    module = Function(norm, (64,), dtype=torch.bfloat16)
    x = normal(5, 64, dtype=torch.bfloat16)
    program = check(module, NORMS, exact=False, tolerance=3e-4, x=(x, ("rows", 64)))
    assert ops(program) == left


@pytest.mark.parametrize("norm", [llama, weight_in_float, by_power, by_root])
def test_rms_norm_takes_its_weight_in_float32(norm):
    program = check(Function(norm, (64,)), NORMS, exact=False, x=(normal(5, 64), ("rows", 64)))
    assert ops(program) == [RMS]


def test_a_norm_in_half_precision_is_left_alone():
    def half(x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    program = check(Function(half), NORMS, x=(normal(5, 64, dtype=torch.bfloat16), ("rows", 64)))
    assert RMS not in ops(program)


def test_an_l2_norm_is_no_rms_norm():
    def l2(x):
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)

    program = check(Function(l2), NORMS, x=(normal(5, 64), ("rows", 64)))
    assert RMS not in ops(program)


def layer_norm(x, w, b):
    h = x.float()
    mean = h.mean(-1, keepdim=True)
    variance = (h - mean).pow(2).mean(-1, keepdim=True)
    return (w.float() * ((h - mean) * torch.rsqrt(variance + 1e-5)) + b.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_is_recognised(dtype):
    module = Function(layer_norm, (64,), (64,), dtype=dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 3e-4
    x = normal(5, 64, dtype=dtype)
    program = check(module, NORMS, exact=False, tolerance=tolerance, x=(x, ("rows", 64)))
    assert ops(program) == ["layer_norm"]


def test_softmax_is_recognised_in_float32_only():
    def softmax(x):
        weights = torch.exp(x - x.amax(-1, keepdim=True))
        return weights / weights.sum(-1, keepdim=True)

    passes = [spell, share_common_calls, recognise_softmax]
    program = check(Function(softmax), passes, exact=False, x=(normal(5, 64), ("rows", 64)))
    assert ops(program) == ["softmax.int"]
    half = check(Function(softmax), passes, x=(normal(5, 64, dtype=torch.bfloat16), ("rows", 64)))
    assert "softmax.int" not in ops(half)


# ----------------------------------------------------------------------------------------------------------- attention


def repeated(q, k, v):
    def repeat(x):
        batch, heads, length, depth = x.shape
        return x[:, :, None].expand(batch, heads, 2, length, depth).reshape(batch, heads * 2, length, depth)

    return nn.functional.scaled_dot_product_attention(q, repeat(k), repeat(v))


def interleaved(q, k, v):
    return nn.functional.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))


def tiled(q, k, v):
    return nn.functional.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))


def attention_inputs():
    q, k = normal(2, 4, 5, 8), normal(2, 2, 5, 8)
    heads, grouped = ("batch", 4, "sequence", 8), ("batch", 2, "sequence", 8)
    return {"q": (q, heads), "k": (k, grouped), "v": (k.flip(0), grouped)}


@pytest.mark.parametrize("attention", [repeated, interleaved])
def test_repeated_keys_become_grouped_queries(attention):
    program = check(Function(attention), [spell, recognise_grouped_queries], exact=False, **attention_inputs())
    assert ops(program) == ["scaled_dot_product_attention"]
    assert dict(program.steps[0].kwargs)["enable_gqa"] is True


def test_tiled_keys_stay():
    """Heads in the order 0 1 0 1 are not grouped queries."""
    program = check(Function(tiled), [spell, recognise_grouped_queries], exact=False, **attention_inputs())
    assert "enable_gqa" not in dict(program.steps[-1].kwargs)
    assert len(program.steps) > 1


def test_attention_reads_transposed_operands_and_scales_by_itself():
    def whisper(x):
        q, k = (x * 0.25).view(*x.shape[:2], 4, 8), x.view(*x.shape[:2], 4, 8)
        q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
        out = nn.functional.scaled_dot_product_attention(q, k, k, scale=1.0)
        return out.transpose(1, 2).reshape(x.shape)

    passes = [spell, read_attention_operands_in_place, fold_query_scales, settle_layouts]
    program = check(Function(whisper), passes, exact=False, x=(normal(2, 5, 32), ("batch", "sequence", 32)))
    assert set(ops(program)) == {"view", "permute", "scaled_dot_product_attention"}
    step = next(s for s in program.steps if "attention" in s.op)
    assert dict(step.kwargs)["scale"] == 0.25


def test_a_scale_that_rounds_stays_with_the_queries():
    def scaled(q, k, v):
        return nn.functional.scaled_dot_product_attention(q * 0.3, k, v, scale=1.0)

    inputs = {n: (t.to(torch.bfloat16), d) for n, (t, d) in attention_inputs().items()}
    inputs["k"] = inputs["v"] = inputs["q"]
    program = check(Function(scaled), [spell, fold_query_scales], **inputs)
    assert "mul.Scalar" in ops(program)


def test_a_transposed_residual_stream_becomes_row_major():
    """The first block's sum had the layout of a convolution's output, and every norm after it read across rows."""

    def frames(x, w):
        h = nn.functional.gelu(x).transpose(1, 2) + w
        return nn.functional.layer_norm(h, (32,)) + h

    program = check(
        Function(frames, (1, 32)), [spell, settle_layouts], exact=False, x=(normal(2, 32, 5), ("batch", 32, "frames"))
    )
    assert program.values[program.outputs[0].value].strides is None


# ------------------------------------------------------------------------------------------------------------- linears


def projections(x, q, k, v):
    q, k, v = (nn.functional.linear(x, w) for w in (q, k, v))
    return q.view(*x.shape[:2], 4, 8).transpose(1, 2) * 2, k, v


def test_linears_with_one_input_become_one():
    module = Function(projections, (32, 16), (8, 16), (8, 16))
    program = check(module, [spell, merge_linears], exact=False, x=(normal(2, 3, 16), ("batch", "sequence", 16)))
    assert ops(program).count("linear") == 1
    (weight,) = program.weights
    assert (weight.sources, weight.transforms) == (("w0", "w1", "w2"), (Concatenate(0),))
    assert weight.type.shape == (48, 16)


def test_biases_are_merged_too_and_linears_without_stay_apart():
    def biased(x, *w):
        return [nn.functional.linear(x, *pair) for pair in (w[:2], w[2:3], w[3:5])]

    module = Function(biased, (8, 16), (8,), (8, 16), (4, 16), (4,))
    program = check(module, [spell, merge_linears], exact=False, x=(normal(3, 16), ("batch", 16)))
    assert ops(program).count("linear") == 2
    assert sorted(w.sources for w in program.weights) == [("w0", "w3"), ("w1", "w4"), ("w2",)]


def rotated(x, w, cos, *, shared=True):
    q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in nn.functional.linear(x, w).split([32, 16, 16], -1))
    turned = [torch.cat((-t[..., 4:], t[..., :4]), -1) * cos for t in (q, k)]
    return turned[0] + q, turned[1] + k if shared else turned[1] - k, v


def test_queries_and_keys_are_rotated_together():
    inputs = {"x": (normal(2, 3, 16), ("batch", "sequence", 16))}
    module = Function(rotated, (64, 16), (8,))
    program = check(module, [spell, settle_layouts, join_heads], **inputs)
    assert [ops(program).count(op) for op in ("cat", "neg", "mul.Tensor", "add.Tensor")] == [1, 1, 1, 1]
    assert program.values[next(s for s in program.steps if s.op == "aten.cat.default").results[0]].shape[1] == 6


def test_views_of_rotated_heads_follow_them():
    """Their types kept the strides from before the heads were joined, and the views read other heads."""

    def flattened(*given):
        q, k, _ = rotated(*given)
        return q.transpose(1, 2).flatten(2).exp(), k.transpose(1, 2).flatten(2)

    module = Function(flattened, (64, 16), (8,))
    check(module, [spell, settle_layouts, join_heads], x=(normal(2, 3, 16), ("batch", "sequence", 16)))


def test_what_differs_between_queries_and_keys_stays_apart():
    inputs = {"x": (normal(2, 3, 16), ("batch", "sequence", 16))}
    module = Function(lambda *t: rotated(*t, shared=False), (64, 16), (8,))
    program = check(module, [spell, settle_layouts, join_heads], **inputs)
    assert [ops(program).count(op) for op in ("cat", "mul.Tensor", "add.Tensor", "sub.Tensor")] == [1, 1, 1, 1]


def test_a_weight_read_twice_is_not_merged():
    def tied(x, a, b, c):
        return nn.functional.linear(x, a), nn.functional.linear(x, b), nn.functional.linear(x, c), a * 2

    module = Function(tied, (8, 16), (8, 16), (8, 16))
    program = check(module, [spell, merge_linears], exact=False, x=(normal(3, 16), ("batch", 16)))
    assert sorted(w.sources for w in program.weights) == [("w0",), ("w1", "w2")]


def test_gate_and_up_stay_together_when_attention_shares_their_input():
    def parallel(x, q, gate, k, up):
        gate, up = nn.functional.linear(x, gate), nn.functional.linear(x, up)
        return nn.functional.silu(gate) * up, nn.functional.linear(x, q), nn.functional.linear(x, k)

    module = Function(parallel, (8, 16), (8, 16), (8, 16), (8, 16))
    program = check(module, [spell, merge_linears], exact=False, x=(normal(3, 16), ("batch", 16)))
    assert sorted(w.sources for w in program.weights) == [("w0", "w2"), ("w1", "w3")]


def test_products_with_weights_are_linears():
    def products(x, a, b, c):
        return x @ a, torch.addmm(c, x, a), torch.mm(x, b.t())

    module = Function(products, (16, 8), (8, 16), (8,))
    program = check(module, [spell, spell_linears], exact=False, x=(normal(3, 16), ("batch", 16)))
    assert [o for o in ops(program) if o != "permute"] == ["linear"] * 3


@pytest.mark.parametrize(
    ("equation", "weight", "left"),
    [
        ("bhtd,hde->bthe", (4, 8, 24), ["matmul"]),
        ("bhtd,hed->bhte", (4, 24, 8), ["matmul"]),
        ("...d,de->...e", (8, 24), ["linear"]),
        ("bhtd, ehd -> bte", (24, 4, 8), ["linear"]),
        ("bhtd,efd->efthb", (3, 6, 8), ["linear"]),
        ("bhtd,h->btd", (4,), ["linear"]),
        ("bhtd,bhtd->b", None, ["matmul"]),
        ("bhtd,bhsd->bhts", None, ["matmul"]),
        ("...td,...sd->...ts", None, ["matmul"]),
        ("bhtd,bhtd->dbht", None, ["mul.Tensor"]),
        ("bhtd,he->bthde", (4, 6), ["mul.Tensor"]),
    ],
)
def test_sums_of_products_are_matmuls(equation, weight, left):
    """They stayed calls that nothing could be tuned of."""
    x = (normal(2, 4, 5, 8), ("batch", 4, "sequence", 8))
    passes = [spell_einsums, spell, spell_linears]
    if weight is None:
        y = (normal(2, 4, 5, 8) * 2, x[1])
        program = check(Function(lambda x, y: torch.einsum(equation, x, y)), passes, exact=False, x=x, y=y)
    else:
        program = check(Function(lambda x, w: torch.einsum(equation, x, w), weight), passes, exact=False, x=x)
    assert [o for o in ops(program) if o not in {"view", "permute", "clone"}] == left


@pytest.mark.parametrize("equation", ["bhtd,bhtd", "bhtd,bhte->bht", "ii,ij->j"])
def test_other_equations_stay_calls(equation):
    """Implicit results, sums over one factor alone, diagonals."""
    x = normal(3, 3) if "i" in equation else normal(2, 4, 3, 3)
    dims = ("batch", *x.shape[1:]) if x.dim() > 2 else tuple(x.shape)
    program = check(Function(lambda x: torch.einsum(equation, x, x * 2)), [spell_einsums, spell], x=(x, dims))
    assert "einsum" in ops(program)


@pytest.mark.parametrize(
    ("factors", "left"),
    [
        ({}, ["add.Tensor"]),
        ({"alpha": 0.25}, ["add.Tensor"]),
        ({"beta": 2}, ["add.Tensor"]),
        ({"alpha": 0.25, "beta": -3}, ["mul.Scalar", "add.Tensor"]),
        ({"beta": 0}, []),
        ({"alpha": 0.25, "beta": 0}, ["mul.Scalar"]),
    ],
)
def test_scaled_additions_become_a_product_and_what_can_join_it(factors, left):
    """They stayed calls that nothing could be tuned of."""

    def additions(x, y, c, m, w):
        return torch.baddbmm(c, x, y, **factors), torch.addmm(m, x[0], w, **factors)

    inputs = {
        "x": (normal(3, 5, 16), ("batch", "rows", 16)),
        "y": (normal(3, 16, 8), ("batch", 16, 8)),
        "c": (normal(3, 1, 8), ("batch", 1, 8)),
        "m": (normal(5, 8), ("rows", 8)),
    }
    passes = [spell, take_additions_apart, drop_unit_arithmetic, spell_linears]
    program = check(Function(additions, (16, 8)), passes, exact=False, **inputs)
    found = [o for o in ops(program) if o not in {"slice.Tensor", "view", "permute"}]
    assert sorted(found) == sorted(["bmm", *left, "linear", *left])


def test_a_bias_stays_with_its_linear_layer():
    def layers(x, w, b):
        return torch.addmm(b, x, w), torch.addmm(b, x, w, alpha=0.5)

    module = Function(layers, (16, 8), (8,))
    passes = [spell, take_additions_apart, spell_linears]
    program = check(module, passes, exact=False, x=(normal(3, 16), ("batch", 16)))
    found = [s for s in program.steps if s.op == "aten.linear.default"]
    assert sorted(len(s.args) for s in found) == [2, 3]


# ----------------------------------------------------------------------------------------------------------------- all


def test_all_passes_in_order_keep_a_block_as_it_is():
    def block(x, *weights):
        norm, q, k, v, o, gate, up, down = weights
        h = llama(x, norm)
        q, k, v = (nn.functional.linear(h, w).unflatten(-1, (-1, 8)).transpose(1, 2) for w in (q, k, v))
        wide = [t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for t in (k, v)]
        out = nn.functional.scaled_dot_product_attention(q, *wide).transpose(1, 2).reshape(x.shape)
        x = x + nn.functional.linear(out, o)
        h = llama(x, norm)
        return x + nn.functional.linear(
            nn.functional.silu(nn.functional.linear(h, gate)) * nn.functional.linear(h, up), down
        )

    shapes = [(32,), (32, 32), (16, 32), (16, 32), (32, 32), (64, 32), (64, 32), (32, 64)]
    module = Function(block, *shapes)
    program = check(module, [rewrite], exact=False, x=(normal(2, 5, 32), ("batch", "sequence", 32)))
    counts = {op: ops(program).count(op) for op in ("linear", RMS, "clone", "expand")}
    assert counts == {"linear": 4, RMS: 2, "clone": 0, "expand": 0}
    assert all(isinstance(s, Call) for s in program.steps)
