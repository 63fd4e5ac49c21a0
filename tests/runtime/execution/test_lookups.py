import functools

import pytest
import torch
from small_programs import MAX_LENGTH, VOCABULARY, call, empty_replay, f32, i64, language_model, language_weights

from tune_model.runtime.execution.executor import InputError
from tune_model.runtime.execution.lookups import check_indices, first_outside, index_limits
from tune_model.runtime.program import (
    Apply,
    Form,
    Input,
    Output,
    Parameter,
    Program,
    Symbol,
    TensorType,
    Weight,
    fingerprint,
)
from tune_model.runtime.tuned import ModelParts, TunedModel


def lookup_in_a_form() -> Program:
    """Two tables; the numbers are converted outside, and one table is inside a form."""
    form = Form(
        "reduction",
        ("d0",),
        (Parameter("a0", i64("d0")), Parameter("a1", f32(7, 4), "weight")),
        (
            call("aten.embedding.default", "@a1", "@a0", results=("t0",)),
            call("aten.sum.dim_IntList", "@t0", (1,), results=("t1",)),
        ),
        (Parameter("t1", f32("d0")),),
    )
    key = fingerprint(form)
    return Program(
        "forward",
        (Symbol("n", 1, 64, "ids", 0),),
        (Input("ids", TensorType("int32", ("n",))), Input("offsets", i64("n"))),
        (Weight("small", f32(7, 4), ("small",)), Weight("large", f32(9, 4), ("large",))),
        (),
        {key: form},
        (
            call("aten._to_copy.default", "@ids", results=("wide",), dtype="int64"),
            call("aten.embedding.default", "@large", "@wide", results=("e",)),
            call("aten.add.Tensor", "@wide", "@offsets", results=("moved",)),
            call("aten.embedding.default", "@large", "@moved", results=("f",)),
            Apply(key, ("wide", "small"), ("s",), ("n",)),
        ),
        {"wide": i64("n"), "moved": i64("n"), "e": f32("n", 4), "f": f32("n", 4), "s": f32("n")},
        (Output("out", "s"),),
    )


def test_limits_are_those_of_tables_and_caches():
    for phase in ("prefill", "decode"):
        limits = index_limits(language_model(phase))
        assert limits == {"input_ids": VOCABULARY, "positions": MAX_LENGTH}
    # The smaller table counts; what arithmetic makes of `offsets` may be anything.
    assert index_limits(lookup_in_a_form()) == {"ids": 7}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("values", "found"),
    [([[0, 31]], None), ([[]], None), ([[5, 32]], ([0, 1], 32)), ([[1, 2], [-1, 99]], ([1, 0], -1))],
)
def test_the_first_number_outside_is_named(
    values: list[list[int]], found: tuple[list[int], int] | None, dtype: torch.dtype
):
    assert first_outside(torch.tensor(values, dtype=dtype), 32) == found


def test_nothing_waits_for_a_device():
    """A tensor that has no values on the host is passed by, and wrong dtypes are left to what judges dtypes."""
    for given in (torch.zeros(2, 3, dtype=torch.int64, device="meta"), torch.full((1,), -5.0), [99], None):
        check_indices({"input_ids": given}, {"input_ids": 32})


@pytest.mark.parametrize(
    ("phase", "name", "value", "message"),
    [
        ("prefill", "input_ids", VOCABULARY, r"input 'input_ids' is 32 at \[0, 1\]; expected 0 to 31"),
        ("prefill", "positions", MAX_LENGTH, r"input 'positions' is 24 at \[0, 1\]; expected 0 to 23"),
        ("decode", "input_ids", -1, r"input 'input_ids' is -1 at \[0, 0\]"),
    ],
)
def test_calls_with_numbers_outside_are_one_clear_error(phase: str, name: str, value: int, message: str):
    programs = (language_model("prefill"), language_model("decode"))
    model = TunedModel(ModelParts(programs, {}, empty_replay(), {}), language_weights(), "cpu")
    length = 2 if phase == "prefill" else 1
    ids = torch.ones(1, length, dtype=torch.int64)
    inputs = {"input_ids": ids.clone(), "positions": ids.cumsum(1) - 1}
    inputs[name][0, -1] = value
    run = model if phase == "prefill" else functools.partial(model.run, phase, inputs)
    given = inputs if phase == "prefill" else {}
    with pytest.raises(InputError, match=message):
        run(**given)
