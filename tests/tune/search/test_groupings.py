"""Two groupings of one program: the sum of weighted times decides."""

import msgspec
from tuning_fakes import linear_form, linear_plan

from tune_model.extract.task import Plan, Rival, all_tasks
from tune_model.runtime.program import Call, Form, Parameter, Ref, TensorType
from tune_model.tune.candidate import Candidate
from tune_model.tune.records.database import Finalist
from tune_model.tune.search.groupings import choose_grouping

SIZES = (1, 64)


def other_form(name: str) -> Form:
    """The linear layer with something behind it."""
    form = linear_form()
    body = (*form.body, Call(f"aten.{name}.default", (Ref("t0"),), results=("t1",)))
    result = Parameter("t1", TensorType("float32", ("d0", 32)))
    return msgspec.structs.replace(form, body=body, results=(result,))


def with_rivals(*names: str) -> Plan:
    rivals = tuple(Rival(name, linear_plan(*SIZES, form=other_form(name))) for name in names)
    return msgspec.structs.replace(linear_plan(*SIZES), notes=("traced",), rivals=rivals)


def finals(plan: Plan, *times: float) -> dict[str, list[Finalist]]:
    """The extern of every task takes 100 us; a candidate of each takes what is said, in the order of all tasks."""
    extern = Finalist(Candidate("aten"), (), 100.0, 1.0, 1.0, 1.0, 1, unconditional=True)
    made: dict[str, list[Finalist]] = {}
    for task, us in zip(all_tasks(plan), times, strict=True):
        gain = 100.0 / us
        made[task.key] = [extern, Finalist(Candidate("fast"), (), us, gain, gain * 0.99, gain * 1.01, 1, True)]
    return made


def test_the_faster_grouping_is_kept_and_the_notes_say_by_how_much():
    plan = with_rivals("relu")
    chosen = choose_grouping(plan, finals(plan, 40.0, 40.0, 30.0, 45.0))
    assert chosen.programs == plan.rivals[0].plan.programs
    assert chosen.tasks == plan.rivals[0].plan.tasks
    assert chosen.rivals == ()
    assert chosen.notes == (  # the rival's own, which are none here, and why
        "grouped otherwise (relu), the regions that differ are 1.067x as fast",
        "grouping chosen: relu",
    )


def test_a_percent_is_not_enough():
    plan = with_rivals("relu")
    chosen = choose_grouping(plan, finals(plan, 40.0, 40.0, 40.0, 39.5))
    assert chosen.programs == plan.programs
    assert chosen.rivals == ()
    assert chosen.notes[0] == "traced"
    assert "1.006x" in chosen.notes[1]
    assert chosen.notes[2] == "grouping chosen: as usual"


def test_what_both_groupings_have_in_common_does_not_hide_a_gain():
    """A region that takes a hundredth of the program is still worth a different grouping."""
    plan = with_rivals("relu")
    common = linear_plan(4096).tasks
    (rival,) = plan.rivals
    rival = msgspec.structs.replace(rival, plan=msgspec.structs.replace(rival.plan, tasks=(*rival.plan.tasks, *common)))
    plan = msgspec.structs.replace(plan, tasks=(*plan.tasks, *common), rivals=(rival,))
    times = {task.key: us for task, us in zip(all_tasks(plan), (0.5, 0.5, 99.0, 0.4, 0.4), strict=True)}
    given = finals(plan, *times.values())
    assert choose_grouping(plan, given).notes[-1] == "grouping chosen: relu"
    assert "1.250x" in choose_grouping(plan, given).notes[-2]


def test_weights_count():
    plan = with_rivals("relu")
    (rival,) = plan.rivals
    rival = msgspec.structs.replace(rival, plan=_second_often(rival.plan))
    plan = msgspec.structs.replace(_second_often(plan), rivals=(rival,))
    assert choose_grouping(plan, finals(plan, 50.0, 20.0, 10.0, 24.0)).programs == plan.programs
    assert choose_grouping(plan, finals(plan, 50.0, 20.0, 90.0, 17.0)).programs == rival.plan.programs


def _second_often(plan: Plan) -> Plan:
    first, second = plan.tasks
    return msgspec.structs.replace(plan, tasks=(first, msgspec.structs.replace(second, weight=20.0)))


def test_a_grouping_with_a_race_that_was_not_run_is_not_compared():
    plan = with_rivals("relu")
    known = finals(plan, 40.0, 40.0, 1.0, 1.0)
    for task in (plan.tasks[0], plan.rivals[0].plan.tasks[1]):
        some = {key: found for key, found in known.items() if key != task.key}
        chosen = choose_grouping(plan, some)
        assert chosen.programs == plan.programs
        assert chosen.notes == ("traced",)


def test_the_best_of_several_wins_whatever_their_order():
    for names in (("relu", "tanh", "sigmoid"), ("sigmoid", "tanh", "relu")):
        plan = with_rivals(*names)
        times = {"relu": 35.0, "tanh": 20.0, "sigmoid": 25.0}
        given = [40.0, 40.0, *(times[name] for name in names for _ in SIZES)]
        assert choose_grouping(plan, finals(plan, *given)).notes[-1] == "grouping chosen: tanh"


def test_a_plan_without_rivals_stays_as_it_is():
    plan = linear_plan(*SIZES)
    assert choose_grouping(plan, finals(plan, 40.0, 40.0)) == plan
    assert choose_grouping(plan, {}) == plan
