"""What the search misses: the balanced choice against a race of the whole space, and against itself tuned again."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.footprints import told
from bench.plans import plan_of
from bench.races import Races, races_path, record_of
from bench.run import Bench, TimeOverError, attempt, print_table
from bench.tuned import Tuned, tune_forms
from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.program import Form
from tune_model.tune.candidate import Built, Candidate, Effort, Rejected, label
from tune_model.tune.device import Bench as DeviceBench
from tune_model.tune.device import Device
from tune_model.tune.families import families_for
from tune_model.tune.measuring.interval import percentile
from tune_model.tune.measuring.policy import Policy, Rung, policy_for
from tune_model.tune.measuring.worker import DeviceWorker, open_workbench
from tune_model.tune.search.contest import Contest
from tune_model.tune.workshop import Workshop

__all__ = ["Subject", "run_regret"]

SHARD: Final = "regret"
REPEATS: Final = 3
BEST: Final = 6
"""So many of the exhaustive race's fastest meet the choices again: one brief timing does not order them."""

_LARGER_THAN_ANY_CACHE: Final = 1 << 40


class UnraceableError(TuneModelError):
    """The extern or a contender cannot be measured."""


class Subject(NamedTuple):
    """A form whose search is judged.

    Attributes:
        name: Of its row.
        form: Concrete.
        facts: More that the row says.
        told: Print how its search went.
    """

    name: str
    form: Form
    facts: Mapping[str, Any]
    told: bool = False


def run_regret(bench: Bench, subjects: Sequence[Subject], tunings: int = 3) -> None:
    """Tune several times with fresh records, then race everything, row by row, until the time is over."""
    missing = bench.missing(SHARD, subjects)
    if missing:
        forms = [subject.form for subject in missing]
        tuned: list[Tuned] = []
        for number in range(tunings):
            records = f"regret-{number}"
            if bench.again:
                _forget(bench.shop.folder, records)
            bench.tell(f"tuning {number + 1} of {tunings}")
            options = bench.shop.options(records, budget_s=bench.clock.left_s)
            tuned.append(tune_forms(forms, bench.shop, options, bench.tell))
            if bench.clock.is_over:
                bench.tell("time is over; run again to continue")
                return
        for subject in missing:
            if subject.told:
                _tell_footprints(bench, subject, tuned[0])
        _race_all(bench, missing, tuned)
    _print(bench)


def _tell_footprints(bench: Bench, subject: Subject, tuned: Tuned) -> None:
    for trail in tuned.choices[subject.form].trails:
        bench.tell(f"  {subject.name}")
        for line in told(trail):
            bench.tell(f"    {line}")


def _forget(folder: Path, records: str) -> None:
    for suffix in ("", "-wal", "-shm"):
        (folder / f"{records}.sqlite{suffix}").unlink(missing_ok=True)


def _race_all(bench: Bench, subjects: Sequence[Subject], tunings: Sequence[Tuned]) -> None:
    target = bench.shop.target
    options = bench.shop.options(budget_s=bench.clock.left_s, effort=Effort.THOROUGH)
    device: Device = DeviceWorker(target, 0) if bench.shop.isolate else open_workbench(target, 0)
    shop = Workshop(families_for(target), target, device, options, lambda _: None)
    policy = _policy(policy_for(target, _LARGER_THAN_ANY_CACHE))
    contests: dict[str, Contest] = {}
    try:
        for number, subject in enumerate(subjects):
            # The next form's kernels are built while this one is measured.
            for coming in subjects[number : number + 2]:
                if coming.name not in contests:
                    contests[coming.name] = Contest(plan_of([coming.form]).tasks[0], policy, shop)
                    contests[coming.name].builds.request(contests[coming.name].candidates)
            if bench.clock.is_over:
                bench.tell("time is over; run again to continue")
                break
            contest = contests[subject.name]
            attempt(bench, SHARD, subject.name, lambda s=subject, c=contest: _measure(bench, s, c, tunings))  # type: ignore[misc]
    finally:
        shop.close()


def _policy(usual: Policy) -> Policy:
    """Time every candidate as often as the tuner times the better ones."""
    longer = Rung(usual.rungs[-1].sample_us, usual.rungs[-1].samples)
    return Policy(f"{usual.name}-exhaustive", usual.version, usual.rotate_bytes, (longer,), usual.final)


def _measure(bench: Bench, subject: Subject, contest: Contest, tunings: Sequence[Tuned]) -> dict[str, Any]:
    times = _race(contest)
    choices = [tuned.winner(subject.form) for tuned in tunings]
    fastest = sorted(times, key=lambda candidate: times[candidate])[:BEST]
    field = tuple(dict.fromkeys((contest.baseline, *choices, *fastest)))
    again = _compare(contest, field)
    medians = {candidate: percentile(us, 0.5) for candidate, us in again.items()}
    races = Races(races_path(bench.ledger.path), bench.ledger.head, contest.policy.key)
    races.put(subject.name, record_of(subject.name, contest, again))
    best = min(medians, key=lambda candidate: medians[candidate])
    chosen = [medians[candidate] for candidate in choices]
    asked = [len({m.candidate for m in tuned.choices[subject.form].measurements}) for tuned in tunings]
    bench.tell(
        f"  {subject.name}: {len(times)} of {len(contest.candidates)} timed, best {label(best)} {medians[best]:.2f} us"
        f", chosen {', '.join(f'{us:.2f}' for us in chosen)} us"
    )
    return {
        **subject.facts,
        "candidates": len(contest.candidates),
        "timed": len(times),
        "asked": asked,
        "extern_us": medians[contest.baseline],
        "best": label(best),
        "best_us": medians[best],
        "choices": [label(candidate) for candidate in choices],
        "choice_us": [float(f"{us:.6g}") for us in chosen],
        "regret": max(chosen) / medians[best] - 1.0,
        "spread": max(chosen) / min(chosen) - 1.0,
    }


def _race(contest: Contest) -> dict[Candidate, float]:
    """Time every candidate that builds and is right; none is dropped for being slow."""
    times: dict[Candidate, float] = {}
    if contest.trials.time(contest.baseline, 0) is None:
        raise UnraceableError("the extern cannot be timed")
    for candidate in contest.builds.as_ready(contest.candidates):
        time_us = contest.trials.time(candidate, 0)
        if time_us is not None:
            times[candidate] = time_us
    if contest.shop.out_of_time:
        raise TimeOverError
    return times


def _compare(contest: Contest, field: Sequence[Candidate]) -> dict[Candidate, list[float]]:
    """Return the median of each candidate's rounds for every repeat, each with new inputs and new graphs."""
    device = contest.shop.device
    entries = tuple((candidate, _built(contest, candidate)) for candidate in field)
    found: dict[Candidate, list[float]] = {candidate: [] for candidate in field}
    for repeat in range(REPEATS):
        opened = device.open(DeviceBench(contest.planned.task, contest.policy, entries[0][1], 30_001 + repeat))
        if isinstance(opened, Rejected):
            raise UnraceableError(f"{opened.reason}: {opened.detail}")
        try:
            for candidate, built in entries[1:]:
                _accept(candidate, device.check(candidate, built))
            times = device.compare(entries, contest.policy.final)
            if isinstance(times, Rejected):
                raise UnraceableError(f"{times.reason}: {times.detail}")
            for (candidate, _), samples in zip(entries, times, strict=True):
                _accept(candidate, samples)
                if not isinstance(samples, Rejected):
                    found[candidate].append(percentile(samples.us, 0.5))
        finally:
            device.finish()
    return found


def _built(contest: Contest, candidate: Candidate) -> Built:
    built = contest.builds.obtain(candidate)
    if isinstance(built, Rejected):
        raise UnraceableError(f"{label(candidate)}: {built.reason}: {built.detail}")
    return built


def _accept(candidate: Candidate, result: object) -> None:
    if isinstance(result, Rejected):
        raise UnraceableError(f"{label(candidate)}: {result.reason}: {result.detail}")


def _print(bench: Bench) -> None:
    head = ("row", "timed", "asked", "extern us", "best us", "chosen us", "regret", "spread", "best")
    body = [
        (
            row["row"],
            str(row["timed"]),
            " ".join(map(str, row["asked"])),
            f"{row['extern_us']:.2f}",
            f"{row['best_us']:.2f}",
            " ".join(f"{us:.2f}" for us in row["choice_us"]),
            f"{100 * row['regret']:.1f} %",
            f"{100 * row['spread']:.1f} %",
            row["best"],
        )
        for row in bench.finished(SHARD)
    ]
    print_table(bench, "Balanced choices against the whole space", head, body)
