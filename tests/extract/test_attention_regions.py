"""Attention, its append and its queries as one region, and the order of a cache's reads and writes."""

import msgspec
import torch
from grouped_programs import DIMS, B, D, T, body, forms, grouped, normal, only
from raw_programs import Function, relative_error, run
from torch.nn import functional as F  # noqa: N812 - what it is called everywhere

from tune_model.extract.regions.group import USUAL, Grouping, group
from tune_model.extract.rewrite.equal_calls import share_common_calls
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

CACHE = TensorType("float32", ("batch", 2, 16, 8))
HEADS = TensorType("float32", ("batch", 2, 1, 8))


def cache_program(*steps: Call) -> Program:
    """Steps on one layer's cache; `q`, `k`, `v` are [batch, 2, 1, 8], `positions` [batch, 1]."""
    inputs = (
        *(Input(n, HEADS) for n in ("q", "k", "v")),
        Input("positions", TensorType("int64", ("batch", 1)), values=ValueRange("context", "context")),
        Input("kc", CACHE, role="cache"),
        Input("vc", CACHE, role="cache"),
    )
    made = [r for s in steps for r in s.results if r is not None]
    symbols = (Symbol("batch", 1, 8, "q", 0), Symbol("context", 0, 15, default=4))
    outputs = tuple(Output(n, n) for n in made)
    return Program("decode", symbols, inputs, (), (), {}, tuple(steps), dict.fromkeys(made, HEADS), outputs)


APPEND = Call("tune_model.append_kv", (Ref("kc"), Ref("vc"), Ref("k"), Ref("v"), Ref("positions")))


def attend(name: str) -> Call:
    arguments = (Ref("q"), Ref("kc"), Ref("vc"), Ref("positions"), 0.25, None, None)
    return Call("tune_model.cached_attention", arguments, (), (name,))


def cache_inputs():
    inputs = {n: normal(3, 2, 1, 8, seed=i) for i, n in enumerate("qkv")}
    caches = {n: normal(3, 2, 16, 8, seed=i) for i, n in enumerate(("kc", "vc"), 5)}
    return {**inputs, **caches, "positions": torch.tensor([[4], [0], [9]])}


def test_append_and_attention_are_one_region_with_its_context_as_a_hint():
    program = group(cache_program(APPEND, attend("a"))).program
    form = only(program)
    assert body(form) == ["append_kv", "cached_attention"]
    assert form.dims == ("d0", "d1")
    assert program.steps[0].dims == ("batch", "context")
    positions = next(p for p in form.parameters if p.type.dtype == "int64")
    assert positions.values == ValueRange("d1", "d1")
    assert [p.role for p in form.parameters].count("cache") == 2


HALF = Call("aten.mul.Tensor", (Ref("q"), 0.5), (), ("h",))


def attend_half(name: str) -> Call:
    return msgspec.structs.replace(attend(name), args=(Ref("h"), *attend(name).args[1:]))


def test_queries_are_made_within_the_attention_unless_others_read_them():
    raw = cache_program(HALF, APPEND, attend_half("a"))
    alone = msgspec.structs.replace(raw, outputs=raw.outputs[1:])
    within = Grouping(heads_with_attention=True)
    form = only(group(alone, within).program)
    assert body(form) == ["mul", "append_kv", "cached_attention"]
    for program, grouping in ((raw, within), (alone, USUAL)):
        apart = [body(f) for f in forms(group(program, grouping).program)]
        assert apart == [["mul"], ["append_kv", "cached_attention"]]
    inputs = cache_inputs()
    wanted, found = ({n: t.clone() for n, t in inputs.items()} for _ in range(2))
    (expected,) = run(alone, wanted)
    (got,) = run(group(alone, within).program, found)
    assert relative_error(got, expected) < 1e-6
    assert torch.equal(found["kc"], wanted["kc"])


def test_a_read_before_the_append_stays_before_it():
    raw = cache_program(attend("before"), APPEND, attend("after"))
    program = group(raw).program
    assert [body(f) for f in forms(program)] == [["cached_attention"], ["append_kv", "cached_attention"]]
    given = cache_inputs()
    expected = run(raw, {n: t.clone() for n, t in given.items()})
    actual = run(program, {n: t.clone() for n, t in given.items()})
    assert not torch.equal(*expected)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_a_second_append_is_not_moved_across_a_read():
    raw = cache_program(APPEND, attend("first"), APPEND, attend("second"))
    program = group(raw).program
    assert [body(f) for f in forms(program)] == [["append_kv", "cached_attention"]] * 2
    assert [s.outputs for s in program.steps] == [("first",), ("second",)]


def test_equal_reads_of_a_cache_are_not_shared_across_an_append():
    copies = [Call("aten.neg.default", (Ref("kc"),), (), (n,)) for n in ("old", "new")]
    raw = cache_program(copies[0], APPEND, copies[1])
    raw = msgspec.structs.replace(raw, values=dict.fromkeys(("old", "new"), CACHE))
    program = group(share_common_calls(raw)).program
    given = cache_inputs()
    expected = run(raw, {n: t.clone() for n, t in given.items()})
    actual = run(program, {n: t.clone() for n, t in given.items()})
    assert not torch.equal(*expected)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_attention_reads_its_operands_where_they_are():
    def block(x, w):
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in F.linear(x, w).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    program = grouped(Function(block, (3 * D, D)), x=(normal(B, T, D), DIMS))
    attention = forms(program)[-1]
    assert attention.kind == "attention"
    assert attention.parameters[0].type.strides == ("d1*96", 8, 96, 1)
    assert attention.results[0].type.strides == ("d1*32", 8, 32, 1)
    assert {s.op for s in program.steps if isinstance(s, Call)} == {
        "aten.slice.Tensor",
        "aten.permute.default",
        "aten.view.default",
    }
