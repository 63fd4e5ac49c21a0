import torch
from form_builder import FormBuilder, random_inputs, run_results
from loop_interpreter import interpret

from tune_model.runtime.program import Form
from tune_model.runtime.replay import slot_sizes
from tune_model.tune.loops.graph import along_columns, passes
from tune_model.tune.loops.ir import Cast, LoopNest, Reduce
from tune_model.tune.loops.lower import lower
from tune_model.tune.loops.rounding import elide_rounding


def softmax_of_sum() -> Form:
    b = FormBuilder("reduction")
    x, y = b.input((4, 9), "bfloat16"), b.input((4, 9), "bfloat16")
    s = b.call("add.Tensor", x, y)
    return b.form(s, b.call("_softmax.default", b.call("mul.Tensor", s, 0.5), 1, False))


def test_softmax_takes_three_passes_and_stores_the_sum_in_the_first() -> None:
    nest = lower(softmax_of_sum())
    assert isinstance(nest, LoopNest)
    steps, after = passes(nest)
    assert [len(s.reduces) for s in steps] == [1, 1, 0]
    assert [s.stores for s in steps] == [(0,), (), (1,)]
    assert [nest.nodes[s.reduces[0]].kind for s in steps[:2]] == ["max", "sum"]
    varies = along_columns(nest)
    assert all(varies[n] for s in steps for n in s.columns)
    assert not any(varies[n] for s in steps for n in s.rows)
    assert after == ()


def test_row_values_after_the_last_pass() -> None:
    b = FormBuilder("reduction")
    nest = lower(b.form(b.call("mean.dim", b.input((4, 9)), [1])))
    assert isinstance(nest, LoopNest)
    steps, after = passes(nest)
    assert len(steps) == 1
    assert nest.stores[0].value in after
    assert isinstance(nest.nodes[steps[0].reduces[0]], Reduce)


def test_eliding_keeps_the_last_rounding_and_is_nearer_to_exact() -> None:
    form = softmax_of_sum()
    nest = lower(form)
    assert isinstance(nest, LoopNest)
    short = elide_rounding(nest)
    implied = [sum(isinstance(n, Cast) and n.implied for n in x.nodes) for x in (nest, short)]
    assert implied == [3, 2]  # the sum is rounded for its own store; the scaled sum is no longer
    inputs = random_inputs(form)
    exact = torch.softmax((inputs[0].double() + inputs[1].double()) * 0.5, 1)
    errors = []
    for x in (nest, short):
        outputs = [torch.zeros(4, 9, dtype=torch.bfloat16) for _ in range(2)]
        slots = dict(zip(("a0", "a1", *(r.name for r in form.results)), (*inputs, *outputs), strict=True))
        interpret(x, slots, slot_sizes(form))
        torch.testing.assert_close(outputs[0], run_results(form, inputs)[0])
        errors.append((outputs[1].double() - exact).norm())
    assert errors[1] <= errors[0]
