import msgspec
import pytest
from tuning_fakes import linear_form, linear_plan

from tune_model.extract.task import NumericRules, Plan, Task, task_key
from tune_model.runtime.program import Apply, Call, Pack, Ref, Transpose, Weight, bind_form, fingerprint
from tune_model.tune.candidate import Candidate
from tune_model.tune.records.database import Finalist
from tune_model.tune.search import layouts as layouts_module
from tune_model.tune.search.layouts import settle_layouts


def finalist(name: str, us: float, layout: str = "", *, unconditional: bool = True, extern: float = 10.0) -> Finalist:
    layouts = (("a1", layout),) if layout else ()
    gain = extern / us
    return Finalist(Candidate(name), layouts, us, gain, gain * 0.99, gain * 1.01, 1, unconditional)


def extern(us: float = 10.0) -> Finalist:
    return Finalist(Candidate("aten"), (), us, 1.0, 1.0, 1.0, 1, unconditional=True)


def names(plan: Plan, *finals: list[Finalist]) -> list[str]:
    tasks = [task.key for task in plan.tasks]
    settled = settle_layouts(plan, dict(zip(tasks, finals, strict=True)))
    return [settled.winners[key].candidate.family for key in tasks]


def test_the_total_decides_not_the_single_task():
    plan = linear_plan(1, 64)
    small = [extern(), finalist("packed", 5.0, "mkldnn"), finalist("plain", 9.0)]
    large = [extern(100.0), finalist("packed", 108.0, "mkldnn", extern=100.0)]
    assert names(plan, small, large) == ["plain", "aten"]
    heavier = msgspec.structs.replace(plan, tasks=(msgspec.structs.replace(plan.tasks[0], weight=10.0), plan.tasks[1]))
    assert names(heavier, small, large) == ["packed", "packed"]


def test_a_weight_transposed_for_prefill_must_win_over_its_decode_tasks_too():
    """Every task has the library over the transpose, so the layout can be chosen; decode runs far more often."""
    plan = linear_plan(1, 2048)
    decode, prefill = plan.tasks
    often = msgspec.structs.replace(plan, tasks=(msgspec.structs.replace(decode, weight=128.0), prefill))
    few = [extern(), finalist("gemv", 8.0), finalist("aten_transposed", 10.5, "transposed")]
    many = [extern(500.0), finalist("aten_transposed", 460.0, "transposed", extern=500.0)]
    assert names(plan, few, many) == ["aten_transposed", "aten_transposed"]
    assert names(often, few, many) == ["gemv", "aten"]
    few.append(finalist("split_k", 8.1, "transposed"))
    assert names(often, few, many) == ["split_k", "aten_transposed"]


def chain_of_weights(count: int) -> Plan:
    """One form that reads many weights."""
    form = linear_form()
    weights = tuple(msgspec.structs.replace(form.parameters[1], name=f"w{k}") for k in range(count))
    wide = msgspec.structs.replace(form, parameters=(form.parameters[0], *weights))
    key = fingerprint(wide)
    plan = linear_plan(1)
    (program,), (task,) = plan.programs, plan.tasks
    kept = tuple(Weight(f"w{k}", weights[k].type, (f"layer{k}.weight",)) for k in range(count))
    inputs = ("x", *(w.name for w in kept))
    program = msgspec.structs.replace(
        program, weights=kept, forms={key: wide}, steps=(Apply(key, inputs, ("y",), ("batch",)),)
    )
    bound = Task(bind_form(wide, (1,)), NumericRules())
    sites = tuple(msgspec.structs.replace(site, form=key) for site in task.sites)
    return msgspec.structs.replace(
        plan, programs=(program,), tasks=(msgspec.structs.replace(task, key=task_key(bound), task=bound, sites=sites),)
    )


@pytest.mark.parametrize("count", [4, 14])
def test_many_weights_that_go_together_are_settled_one_after_another(count: int):
    """Two layouts of fourteen weights are 16384 combinations; the way down takes 14 a sweep and finds the same."""
    plan = chain_of_weights(count)
    slots = [f"w{k}" for k in range(count)]
    finals = [extern(100.0)]
    for turned in range(1, count + 1):
        layouts = tuple((slot, "transposed") for slot in slots[:turned])
        us = 100.0 - turned
        finals.append(Finalist(Candidate(f"turned{turned}"), layouts, us, 100.0 / us, 100.0 / us, 100.0 / us, 1, True))
    asked = []
    real = layouts_module._evaluate

    def counted(*arguments):
        asked.append(1)
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts_module, "_evaluate", counted)
        assert names(plan, finals) == [f"turned{count}"]
    assert len(asked) <= 200


def test_a_layout_that_one_reader_cannot_take_is_out():
    assert names(linear_plan(1, 64), [extern(), finalist("packed", 1.0, "mkldnn")], [extern()]) == ["aten", "aten"]


def test_a_gain_within_a_percent_does_not_re_lay_weights():
    assert names(linear_plan(1), [extern(), finalist("flipped", 9.95, "transposed")]) == ["aten"]
    assert names(linear_plan(1), [extern(), finalist("flipped", 9.5, "transposed")]) == ["flipped"]


def test_the_loser_is_told_why():
    plan = linear_plan(1, 64)
    small = [extern(), finalist("packed", 5.0, "mkldnn")]
    large = [extern(100.0), finalist("packed", 150.0, "mkldnn", extern=100.0)]
    settled = settle_layouts(plan, {plan.tasks[0].key: small, plan.tasks[1].key: large})
    candidate, reason = settled.passed_over[plan.tasks[0].key]
    assert candidate.family == "packed"
    assert reason.reason == "layout"
    assert "plain" in reason.detail


def test_a_packed_weight_keeps_a_kernel_for_any_size():
    plan = linear_plan(1, 64)
    picky = finalist("picky", 4.0, "mkl:1", unconditional=False)
    any_size = finalist("any", 5.0, "mkl:1")
    assert names(plan, [extern(), picky, any_size], [extern(), picky, finalist("any", 6.0, "mkl:1")]) == [
        "any",
        "picky",
    ]
    assert names(plan, [extern(), picky], [extern(), picky]) == ["aten", "aten"]


def test_a_form_without_dims_needs_no_fallback():
    plan = linear_plan(1)
    fixed = tuple(
        msgspec.structs.replace(t, sites=tuple(msgspec.structs.replace(s, dims=()) for s in t.sites))
        for t in plan.tasks
    )
    picky = [extern(), finalist("picky", 4.0, "mkl:1", unconditional=False)]
    assert names(plan, picky) == ["aten"]
    assert names(msgspec.structs.replace(plan, tasks=fixed), picky) == ["picky"]


def test_packing_is_written_into_the_weight_and_leaves_the_form():
    plan = linear_plan(1)
    settled = settle_layouts(plan, {plan.tasks[0].key: [extern(), finalist("packed", 5.0, "mkldnn")]})
    (program,) = settled.plan.programs
    assert program.weights == (msgspec.structs.replace(plan.programs[0].weights[0], transforms=(Pack("mkldnn"),)),)
    assert program.forms == plan.programs[0].forms
    assert settled.plan.tasks == plan.tasks


def test_plain_plans_are_returned_as_they_are():
    plan = linear_plan(1)
    assert settle_layouts(plan, {plan.tasks[0].key: [extern()]}).plan is plan


def read_elsewhere(plan: Plan) -> Plan:
    program = plan.programs[0]
    other = msgspec.structs.replace(
        program,
        name="other",
        weights=(Weight("v", program.weights[0].type, program.weights[0].sources),),
        steps=(Call("aten.mul.Tensor", (Ref("v"), 2.0), results=("y",)),),
        forms={},
    )
    return msgspec.structs.replace(plan, programs=(program, other))


def test_a_weight_that_an_aten_call_reads_anywhere_stays_plain():
    plan = read_elsewhere(linear_plan(1))
    assert names(plan, [extern(), finalist("packed", 5.0, "mkldnn")]) == ["aten"]


@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 1, 1)])
def test_a_weight_that_is_read_as_another_type_stays_plain(shape: tuple[int, ...]):
    """GPT-2 multiplies by the transpose of its weights: they were packed as they are and gave wrong numbers."""
    plan = linear_plan(1)
    (program,) = plan.programs
    (weight,) = program.weights
    read = program.forms[program.steps[0].form].parameters[1].type
    other = msgspec.structs.replace(weight, type=msgspec.structs.replace(read, shape=shape))
    changed = msgspec.structs.replace(plan, programs=(msgspec.structs.replace(program, weights=(other,)),))
    finals = [extern(), finalist("packed", 5.0, "mkldnn"), finalist("plain", 9.0)]
    assert names(plan, finals) == ["packed"]
    assert names(changed, finals) == ["plain"]


def test_programs_that_share_a_weight_share_its_layout():
    plan = linear_plan(1)
    program = plan.programs[0]
    twin = msgspec.structs.replace(program, name="twin")
    both = msgspec.structs.replace(plan, programs=(program, twin))
    settled = settle_layouts(both, {plan.tasks[0].key: [extern(), finalist("flipped", 5.0, "transposed")]})
    assert [p.weights[0].transforms for p in settled.plan.programs] == [(Transpose(),), (Transpose(),)]
    assert settled.plan.programs[0].forms == settled.plan.programs[1].forms


def test_a_task_read_through_two_forms_binds_both():
    """The same concrete task may come from a form with a free size and from one where it is fixed."""
    first = linear_plan(1)
    fixed = msgspec.structs.replace(linear_form(), dims=("d0", "d1"))
    second = linear_plan(1, form=msgspec.structs.replace(fixed, dims=("d0",)))
    sites = (*first.tasks[0].sites, *second.tasks[0].sites)
    task = msgspec.structs.replace(first.tasks[0], sites=sites)
    pinned = read_elsewhere(msgspec.structs.replace(first, tasks=(task,)))
    assert names(pinned, [extern(), finalist("flipped", 5.0, "transposed")]) == ["aten"]


@pytest.mark.parametrize("size", [1])
def test_equal_finals_give_equal_results(size: int):
    plan = linear_plan(size, 64)
    finals = {t.key: [extern(), finalist("a", 5.0, "x"), finalist("b", 5.0, "y")] for t in plan.tasks}
    assert settle_layouts(plan, finals) == settle_layouts(plan, dict(reversed(finals.items())))
