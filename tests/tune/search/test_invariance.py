"""Where a row must not depend on the number of rows: who competes, and that one configuration serves a form."""

from pathlib import Path

import msgspec
import pytest
from devices import cuda_target
from product_forms import linear
from tuning_fakes import TARGET, FakeFamily, RecordedDevice, linear_form, linear_plan, without_times

from tune_model.extract.task import NumericRules, Plan, Task, task_key
from tune_model.tune.candidate import Built, Candidate, Effort, Rejected
from tune_model.tune.choice import Tuning
from tune_model.tune.device import Bench, Passed
from tune_model.tune.families import families_for, family_named
from tune_model.tune.families.aten import FAMILY as ATEN
from tune_model.tune.options import TuneOptions
from tune_model.tune.search.invariance import NoInvariantKernelError, RaceTimes, refuse_variant, settle_invariant
from tune_model.tune.tuner import tune_with
from tune_model.tune.workshop import Workshop

RULES = NumericRules(batch_invariant=True)
HOPPER = cuda_target()


def bound(plan: Plan) -> Plan:
    """The same plan under the rule."""
    tasks = []
    for planned in plan.tasks:
        task = Task(planned.task.form, RULES)
        tasks.append(msgspec.structs.replace(planned, key=task_key(task), task=task))
    return msgspec.structs.replace(plan, tasks=tuple(tasks))


def tile(number: int, family: str = "triton_matmul") -> Candidate:
    return Candidate(family, (("block_m", number),))


def entries(plan: Plan, *times: dict[Candidate, float]) -> dict[str, RaceTimes]:
    return {task.key: RaceTimes(known, ()) for task, known in zip(plan.tasks, times, strict=True)}


def test_one_candidate_serves_all_sizes_by_the_weighted_sum():
    plan = bound(linear_plan(1, 64))
    few, many = {tile(1): 5.0, tile(2): 6.0, tile(3): 9.0}, {tile(1): 40.0, tile(2): 20.0, tile(3): 18.0}
    assert set(settle_invariant(plan, entries(plan, few, many)).values()) == {tile(2)}
    decode = msgspec.structs.replace(plan.tasks[0], weight=100.0)
    often = msgspec.structs.replace(plan, tasks=(decode, plan.tasks[1]))
    assert set(settle_invariant(often, entries(often, few, many)).values()) == {tile(1)}


def test_the_library_and_what_failed_at_one_size_cannot_win():
    plan = bound(linear_plan(1, 64))
    few = {Candidate("aten"): 1.0, tile(1): 5.0, tile(2): 6.0}
    many = {Candidate("aten"): 1.0, tile(2): 20.0}
    assert set(settle_invariant(plan, entries(plan, few, many)).values()) == {tile(2)}


def test_nothing_that_serves_every_size_is_an_error_that_says_so():
    plan = bound(linear_plan(1, 64))
    known = entries(plan, {tile(1): 5.0}, {tile(2): 5.0})
    with pytest.raises(NoInvariantKernelError, match=r"matmul 1x16x32, matmul 64x16x32 .* timed at every size"):
        settle_invariant(plan, known)
    why = [(Candidate("triton_matmul"), Rejected("unsupported", "a CUDA kernel"))]
    refused = {key: RaceTimes({Candidate("aten"): 1.0}, why) for key in known}
    with pytest.raises(NoInvariantKernelError, match="triton_matmul: a CUDA kernel"):
        settle_invariant(plan, refused)


def test_other_forms_choose_for_themselves():
    first, second = linear_plan(1), linear_plan(1, form=msgspec.structs.replace(linear_form(), dims=("d0",)))
    other = msgspec.structs.replace(
        second.tasks[0], sites=tuple(msgspec.structs.replace(s, form="other") for s in second.tasks[0].sites)
    )
    renamed = msgspec.structs.replace(other.task, rules=NumericRules(allow_tf32=True, batch_invariant=True))
    plan = bound(first)
    apart = msgspec.structs.replace(other, key="other", task=renamed)
    both = msgspec.structs.replace(plan, tasks=(*plan.tasks, apart))
    chosen = settle_invariant(both, entries(both, {tile(1): 1.0, tile(2): 2.0}, {tile(1): 2.0, tile(2): 1.0}))
    assert list(chosen.values()) == [tile(1), tile(2)]


def test_without_the_rule_nothing_changes():
    plan = linear_plan(1, 64)
    assert settle_invariant(plan, {}) == {}
    assert refuse_variant(plan.tasks[0].task, "triton_split_k") is None
    assert task_key(Task(plan.tasks[0].task.form, NumericRules())) == plan.tasks[0].key


def test_only_families_that_add_in_one_order_compete():
    task = Task(linear(16, 256, 512), RULES)
    names = {family.name for family in families_for(HOPPER) if "matmul" in family.kinds}
    assert {name for name in names if refuse_variant(task, name) is None} == {"triton_matmul", "triton_persistent"}


@pytest.mark.parametrize("family", ["triton_matmul", "triton_persistent"])
@pytest.mark.parametrize("effort", [Effort.QUICK, Effort.BALANCED])
def test_every_size_is_offered_the_same(family: str, effort: Effort):
    listed = []
    for rows in (1, 8, 64, 300, 4096):
        task = Task(linear(rows, 1024, 512, tail="swiglu"), RULES)
        assert family_named(family).accepts(task, HOPPER) is None
        listed.append(list(family_named(family).configurations(task, HOPPER, effort)))
    assert listed[0]
    assert all(found == listed[0] for found in listed)
    assert all(dict(config).get("split_k", 1) == 1 for config in listed[0])
    assert all(dict(config)["layout"] == "plain" for config in listed[0])


@pytest.mark.parametrize("family", ["triton_matmul", "triton_persistent"])
def test_every_size_gets_the_same_machine_code(family: str):
    built = []
    for rows in (1, 16, 300):
        task = Task(linear(rows, 1024, 512, tail="residual"), RULES)
        config = family_named(family).start(task, HOPPER)
        built.append(family_named(family).build(task, config, HOPPER))
    assert len({tuple(b.code) for b in built}) == 1


class Clock(RecordedDevice):
    """Times that depend on the number of rows: each size has a tile of its own that is best."""

    def open(self, bench: Bench) -> Passed | Rejected:
        (self.rows, _) = bench.task.form.parameters[0].type.shape
        return super().open(bench)

    def _us(self, candidate: Candidate) -> float:
        if candidate.family != "triton_matmul":
            return self.times[candidate.family]
        wanted = {1: 0, 8: 3}[self.rows]
        return 10.0 + abs(dict(candidate.config)["n"] - wanted) * (3.0 if self.rows == 8 else 1.0)


def test_the_tuner_ships_one_configuration_and_repeats_itself(tmp_path: Path):
    families = (
        ATEN,
        FakeFamily("triton_matmul", tuple((("n", n),) for n in range(5))),
        FakeFamily("triton_gemv", ((("n", 0),),)),
    )

    def run() -> tuple[Tuning, Clock]:
        device = Clock({"aten": 5.0, "triton_gemv": 1.0})
        options = TuneOptions(tmp_path / "records.sqlite", tmp_path / "kernels")
        shop = Workshop(families, TARGET, device, options, lambda _event: None)
        return tune_with(bound(linear_plan(1, 8)), shop), device

    tuning, device = run()
    assert [c.winner for c in tuning.choices] == [Candidate("triton_matmul", (("n", 3),))] * 2
    assert [c.status for c in tuning.choices] == ["invariant"] * 2
    assert [c.median_us for c in tuning.choices] == pytest.approx([13.0, 10.0], rel=0.01)
    refused = {candidate.family: why.reason for choice in tuning.choices for candidate, why in choice.rejections}
    assert refused == {"triton_gemv": "variant"}
    assert ("time", "triton_gemv") not in device.asked
    assert [m.candidate.family for m in tuning.choices[0].measurements if m.stage == "guard"] == [
        "aten",
        "triton_matmul",
    ]
    again, silent = run()
    assert (again.builds, again.measured) == (0, 0)
    assert not [what for what, _ in silent.asked if what != "close"]
    assert without_times(again) == without_times(tuning)


def test_a_kernel_that_failed_in_the_guard_stays_out_when_another_race_times_it(tmp_path: Path):
    """It was chosen again and again, without end: the guard knows it already, and the new time hides its refusal."""
    families = (ATEN, FakeFamily("triton_matmul", tuple((("n", n),) for n in range(5))))
    best = Candidate("triton_matmul", (("n", 3),))

    class Killed(Clock):
        guards = False

        def close(self) -> None:
            super().close()
            self.guards = True

        def check(self, candidate: Candidate, built: Built) -> Passed | Rejected:
            if self.guards and candidate == best and self.rows == 8:
                return Rejected("crash", "killed by SIGKILL")
            return super().check(candidate, built)

    def winners(device: Clock, effort: Effort) -> set[Candidate]:
        options = TuneOptions(tmp_path / "records.sqlite", tmp_path / "kernels", effort=effort)
        shop = Workshop(families, TARGET, device, options, lambda _event: None)
        return {choice.winner for choice in tune_with(bound(linear_plan(1, 8)), shop).choices}

    first = winners(Killed({"aten": 5.0}), Effort.BALANCED)
    assert best not in first
    assert winners(Clock({"aten": 5.0}), Effort.THOROUGH) == first


@pytest.mark.parametrize("when", ["before the guard", "in the guard"])
def test_a_run_that_ends_early_ships_no_invariant_kernel_unconfirmed(tmp_path: Path, when: str):
    """It shipped them with the status of one that was measured again, and the gain of its race for an interval."""
    families = (ATEN, FakeFamily("triton_matmul", tuple((("n", n),) for n in range(5))))
    shops: list[Workshop] = []

    class Late(Clock):
        def finish(self) -> None:
            super().finish()
            races = [what for what, _ in self.asked].count("open")
            if races == (2 if when == "before the guard" else 3):
                shops[0].stop.set()

    def run(device: Clock) -> Tuning:
        options = TuneOptions(tmp_path / "records.sqlite", tmp_path / "kernels")
        shops.insert(0, Workshop(families, TARGET, device, options, lambda _event: None))
        return tune_with(bound(linear_plan(1, 8)), shops[0])

    tuning = run(Late({"aten": 5.0}))
    assert tuning.stopped == "interrupted"
    assert [(c.winner.family, c.status) for c in tuning.choices] == [("aten", "unconfirmed")] * 2
    assert [(c.gain_low, c.gain_high) for c in tuning.choices] == [(1.0, 1.0)] * 2
    whole = run(Clock({"aten": 5.0}))
    assert [c.status for c in whole.choices] == ["invariant"] * 2
    assert whole.measured <= 4  # what was confirmed is not measured again


def test_one_that_is_wrong_on_other_inputs_is_replaced_at_every_size(tmp_path: Path):
    best = Candidate("triton_matmul", (("n", 3),))

    class Fresh(Clock):
        def close(self) -> None:
            super().close()
            self.is_fresh = True

        def check(self, candidate, built):  # type: ignore[no-untyped-def]
            wrong = getattr(self, "is_fresh", False) and candidate == best and self.rows == 8
            return Rejected("wrong", "error 0.5") if wrong else super().check(candidate, built)

    families = (ATEN, FakeFamily("triton_matmul", tuple((("n", n),) for n in range(5))))
    options = TuneOptions(tmp_path / "records.sqlite", tmp_path / "kernels")
    device = Fresh({"aten": 5.0})
    tuning = tune_with(bound(linear_plan(1, 8)), Workshop(families, TARGET, device, options, lambda _event: None))
    (winner,) = {c.winner for c in tuning.choices}
    assert winner.family == "triton_matmul"
    assert winner != best
    assert "after it had won" in next(r.detail for c, r in tuning.choices[1].rejections if c == best)
