"""Binding the workload: grids, weights, costs and labels."""

import pytest
import torch

from tune_model.extract.cost import element_bytes, flops, size_bytes
from tune_model.extract.labels import label
from tune_model.extract.regions.group import group
from tune_model.extract.request import FactorySource, Phase, Request
from tune_model.extract.task import NumericRules
from tune_model.extract.tasks import collect, grid_points
from tune_model.extract.tracing.front_end import GridError
from tune_model.runtime.program import (
    Call,
    Form,
    Input,
    Items,
    Output,
    Parameter,
    Program,
    Ref,
    Step,
    Symbol,
    TensorType,
    ValueRange,
    Weight,
)


def linears(name: str, layers: int, sequence: int | str = "sequence") -> Program:
    """`layers` equal linears in a row, over [batch, sequence, 64]."""
    type_ = TensorType("bfloat16", ("batch", sequence, 64))
    weights = tuple(Weight(f"w{i}", TensorType("bfloat16", (64, 64)), (f"w{i}",)) for i in range(layers))
    steps: list[Step] = []
    for i in range(layers):
        source = "x" if i == 0 else f"h{i - 1}"
        steps.append(Call("aten.linear.default", (Ref(source), Ref(f"w{i}")), (), (f"h{i}",)))
    symbols = [Symbol("batch", 1, 64, "x", 0)]
    if sequence == "sequence":
        symbols.append(Symbol("sequence", 1, 128, "x", 1))
    raw = Program(
        name,
        tuple(symbols),
        (Input("x", type_),),
        weights,
        (),
        {},
        tuple(steps),
        {f"h{i}": type_ for i in range(layers)},
        (Output("y", f"h{layers - 1}"),),
    )
    return group(raw).program


def request(*phases: Phase) -> Request:
    return Request(FactorySource("package.module:factory"), "bfloat16", "forward", phases)


def test_equal_layers_and_phases_share_their_tasks():
    prefill = Phase("prefill", {"batch": (1, 2), "sequence": (16, 32)})
    decode = Phase("decode", {"batch": (16, 32)}, weight=2.0)
    programs = [linears("prefill", 3), linears("decode", 3, 1)]
    tasks = collect(programs, request(prefill, decode))
    by_rows = {t.task.form.parameters[0].type.shape[0]: t for t in tasks}
    assert set(by_rows) == {16, 32, 64}
    assert len(collect([linears("prefill", 30), linears("decode", 30, 1)], request(prefill, decode))) == 3
    # 32 rows: prefill at (1, 32) and (2, 16), of four points; decode at 32, of two.
    assert by_rows[32].weight == pytest.approx(3 * (1 / 4 + 1 / 4 + 2.0 / 2))
    assert [s.point for s in by_rows[32].sites] == [
        (("batch", 1), ("sequence", 32)),
        (("batch", 2), ("sequence", 16)),
        (("batch", 32),),
    ]
    assert {s.occurrences for t in tasks for s in t.sites} == {3}


def test_tasks_come_heaviest_first_and_carry_the_rules():
    rules = NumericRules(allow_tf32=True)
    asked = Request(
        FactorySource("a:b"), "bfloat16", "forward", (Phase("p", {"batch": (1, 2), "sequence": (4, 128)}),), rules=rules
    )
    tasks = collect([linears("p", 1)], asked)
    assert [t.task.form.parameters[0].type.shape[0] for t in tasks] == [256, 128, 8, 4]
    assert all(t.task.rules == rules and t.task.form.dims == () for t in tasks)


def test_a_hint_falls_back_to_its_default():
    program = linears("p", 1)
    symbols = (*program.symbols, Symbol("context", 0, 9, default=5))
    program = Program(
        program.name, symbols, program.inputs, program.weights, (), program.forms, program.steps, program.values,
        program.outputs,
    )  # fmt: skip
    assert grid_points(program, Phase("p", {"batch": (3,), "sequence": (4,)})) == [
        {"batch": 3, "sequence": 4, "context": 5}
    ]


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        ({"batch": (1,)}, ["'sequence'", "'p'"]),
        ({"batch": (1,), "sequence": (129,)}, ["sequence = 129", "1 to 128"]),
        ({"batch": (0,), "sequence": (1,)}, ["batch = 0", "1 to 64"]),
    ],
)
def test_a_grid_that_does_not_fit_says_so(grid, words):
    with pytest.raises(GridError) as error:
        collect([linears("p", 1)], request(Phase("p", grid)))
    assert all(word in str(error.value) for word in words)


def form(kind, parameters, body, results):
    return Form(kind, (), tuple(parameters), tuple(body), tuple(results))


def parameter(name, *shape, dtype="bfloat16", **more):
    return Parameter(name, TensorType(dtype, shape, more.pop("strides", None)), **more)


def call(op, *args, result="t0", **kwargs):
    return Call(op, args, tuple(kwargs.items()), () if result is None else (result,))


A = [Ref(f"a{i}") for i in range(8)]


def swiglu():
    body = [
        call("aten.linear.default", A[0], A[1]),
        call("aten.slice.Tensor", Ref("t0"), -1, 0, 14336, result="t1"),
        call("aten.silu.default", Ref("t1"), result="t2"),
        call("aten.slice.Tensor", Ref("t0"), -1, 14336, 28672, result="t3"),
        call("aten.mul.Tensor", Ref("t2"), Ref("t3"), result="t4"),
    ]
    return form(
        "matmul",
        [parameter("a0", 1, 4096), parameter("a1", 28672, 4096, role="weight")],
        body,
        [parameter("t4", 1, 14336)],
    )


def decode():
    body = [
        call("tune_model.append_kv", *A[:5], result=None),
        call("tune_model.cached_attention", A[5], A[0], A[1], A[4], 0.088, None, None),
    ]
    caches = [parameter(f"a{i}", 1, 8, 8192, 128, role="cache") for i in range(2)]
    new = [parameter(f"a{i}", 1, 8, 1, 128) for i in (2, 3)]
    positions = parameter("a4", 1, 1, dtype="int64", values=ValueRange(1024, 1024))
    return form(
        "attention", [*caches, *new, positions, parameter("a5", 1, 32, 1, 128)], body, [parameter("t0", 1, 32, 1, 128)]
    )


def prefill():
    return form(
        "attention",
        [parameter("a0", 2, 32, 512, 128), parameter("a1", 2, 8, 512, 128), parameter("a2", 2, 8, 512, 128)],
        [call("tune_model.causal_attention", *A[:3], 0.088, None, None)],
        [parameter("t0", 2, 32, 512, 128)],
    )


def normed():
    body = [
        call("aten.add.Tensor", A[0], A[1]),
        call("aten.rms_norm.default", Ref("t0"), Items((4096,)), None, 1e-5, result="t1"),
        call("aten.mul.Tensor", Ref("t1"), A[2], result="t2"),
    ]
    rows = [parameter("a0", 16, 4096), parameter("a1", 16, 4096)]
    return form("reduction", [*rows, parameter("a2", 4096, role="weight")], body, [parameter("t2", 16, 4096)])


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (swiglu(), "matmul 1x4096x28672 bf16 + swiglu"),
        (decode(), "attention decode b1 h32/8 d128 bf16 ctx1024"),
        (prefill(), "attention prefill b2 h32/8 d128 bf16 len512"),
        (normed(), "rms_norm 16x4096 bf16 + residual"),
    ],
)
def test_labels(made, text):
    assert label(made) == text


def test_an_element_is_as_large_as_torch_says():
    """A dtype that was not in a table counted one byte, complex128 and the unsigned ones too."""
    dtypes = {
        str(found).removeprefix("torch."): found for found in vars(torch).values() if isinstance(found, torch.dtype)
    }
    assert {name: element_bytes(name) for name in dtypes} == {name: found.itemsize for name, found in dtypes.items()}
    assert {"complex128", "uint16", "bool", "float8_e4m3fn"} < set(dtypes)
    with pytest.raises(ValueError, match="names no dtype"):
        element_bytes("strided")


def test_a_matmul_costs_its_products_and_its_weights():
    made = swiglu()
    assert flops(made) == pytest.approx(2 * 4096 * 28672, rel=1e-3)
    assert size_bytes(made) == 2 * (4096 + 28672 * 4096 + 14336)


def test_decode_attention_reads_the_cache_up_to_its_position():
    made = decode()
    seen = 2 * 8 * 1025 * 128 * 2
    appended = 2 * 8 * 128 * 2
    assert size_bytes(made) == seen + 2 * appended + 8 + 2 * 32 * 128 * 2
    assert flops(made) == 2 * 32 * 1025 * 256


def test_causal_attention_costs_half():
    assert flops(prefill()) == 2 * 2 * 32 * 512 * 512 * 256 // 2


def test_broadcast_dims_are_read_once():
    made = form(
        "pointwise",
        [parameter("a0", 8, 64, strides=(0, 1)), parameter("a1", 8, 64)],
        [call("aten.add.Tensor", A[0], A[1])],
        [parameter("t0", 8, 64)],
    )
    assert size_bytes(made) == 2 * (64 + 512 + 512)
