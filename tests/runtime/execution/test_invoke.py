import math

import pytest
import torch
from small_programs import call

from tune_model.runtime.execution.invoke import ProgramError, prepare_call, torch_dtype
from tune_model.runtime.operators.allowed import OperatorError
from tune_model.runtime.program import Call, Items, Real, Ref, Size, TorchName

CPU = torch.device("cpu")
SLOTS = {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4, "r": 5, "s": 6}


def run(step: Call, *values: torch.Tensor) -> list[object]:
    slots: list[object] = [*values, *([None] * (7 - len(values)))]
    prepare_call(step, SLOTS, CPU)(slots)
    return slots


A, B, C = torch.arange(6.0).view(2, 3), torch.full((2, 3), 2.0), torch.full((2, 3), 0.5)

CASES = [
    ("one", call("aten.neg.default", "@a", results=("r",)), -A),
    ("one and constants", call("aten.sum.dim_IntList", "@a", (1,), True, results=("r",)), A.sum(1, keepdim=True)),
    ("two", call("aten.mul.Tensor", "@a", "@b", results=("r",)), A * B),
    ("two and keyword", call("aten.add.Tensor", "@a", "@b", alpha=3, results=("r",)), A + 3 * B),
    ("three", call("aten.addcmul.default", "@a", "@b", "@c", results=("r",)), A + B * C),
    ("a list", call("aten.cat.default", ("@a", "@b"), 1, results=("r",)), torch.cat([A, B], 1)),
    ("a list of one", call("aten.cat.default", ("@a",), 1, results=("r",)), A),
    ("constant first", call("aten.where.ScalarSelf", "@d", 1.0, "@a", results=("r",)), torch.where(A > 2, 1.0, A)),
    ("tensor by keyword", call("aten.add.Tensor", "@a", other="@b", results=("r",)), A + B),
    ("none at all", call("aten.arange.default", 4, results=("r",)), torch.arange(4)),
    ("holes in a list", call("aten.index.Tensor", "@a", (None, "@e"), results=("r",)), A[:, [2, 0]]),
]


@pytest.mark.parametrize(("step", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_arguments_arrive_as_written(step: Call, expected: torch.Tensor):
    slots = run(step, A, B, C, A > 2, torch.tensor([2, 0]))
    torch.testing.assert_close(slots[5], expected)


def test_names_of_torch_and_of_the_device():
    kwargs = (("dtype", TorchName("dtype", "float64")), ("device", TorchName("device", "device")))
    slots = run(Call("aten.zeros.default", (Items((2,)),), kwargs, ("r",)))
    assert slots[5].dtype == torch.float64
    assert slots[5].device == CPU


def test_reals_that_json_cannot_hold():
    slots = run(Call("aten.full_like.default", (Ref("a"), Real("-inf")), (), ("r",)), A)
    assert float(slots[5].max()) == -math.inf


def test_several_results_and_unread_ones():
    slots = run(call("aten.split.Tensor", "@a", 1, results=(None, "s")), A)
    assert torch.equal(slots[6], A[1:])
    assert slots[5] is None


def test_operators_without_results_run_for_their_effect():
    target = torch.zeros(2, 3)
    run(call("aten.add_.Tensor", "@a", "@b"), target, B)
    assert torch.equal(target, B)


def test_prepared_calls_hold_no_state_between_runs():
    step = prepare_call(call("aten.index.Tensor", "@a", (None, "@e"), results=("r",)), SLOTS, CPU)
    for columns in ([0], [1, 2], [2]):
        slots = [A, None, None, None, torch.tensor(columns), None, None]
        step(slots)
        assert torch.equal(slots[5], A[:, columns])


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (call("aten.neg.default", "@nowhere", results=("r",)), ProgramError, "'nowhere' is used before it is made"),
        (Call("aten.view.default", (Ref("a"), Items((Size("s0"),))), (), ("r",)), ProgramError, "'s0' is not bound"),
        (Call("aten.to.dtype", (Ref("a"), TorchName("dtype", "load")), (), ("r",)), ProgramError, "no dtype 'load'"),
        (Call("aten.from_file.default", ("x",), (), ("r",)), OperatorError, "not allowed"),
    ],
)
def test_malformed_calls_say_what_is_wrong(step: Call, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        prepare_call(step, SLOTS, CPU)


def test_dtypes_are_dtypes():
    assert torch_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(ProgramError, match="no dtype 'nn'"):
        torch_dtype("nn")
