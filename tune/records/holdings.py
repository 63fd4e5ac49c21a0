"""What a records database holds, told by task, and which of its rows nothing will ask for again. Reads only."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import msgspec

from tune_model.tune.candidate import label
from tune_model.tune.records.facts import KINDS, Outcome, Refusal, Row, Timing

__all__ = ["Holdings", "TaskHoldings", "superseded", "take_stock"]


class TaskHoldings(msgspec.Struct, frozen=True):
    """What is known of one task.

    Attributes:
        task: Key.
        timings: Rows.
        refusals: Rows.
        races: Finished races: one for each machine, effort and version of a family.
        candidates: Different ones that were timed.
        extern_us: Time of the plain operators in the last finished race; 0 when there is none.
        best: Label of the fastest finalist in it, by its gain; empty when there is none.
        best_us: Its time.
        failed: Why the last race could not be measured; empty otherwise.
        doubtful: Other processes disturbed the last final: its times decide nothing.
    """

    task: str
    timings: int
    refusals: int
    races: int
    candidates: int
    extern_us: float
    best: str
    best_us: float
    failed: str
    doubtful: bool


class Holdings(msgspec.Struct, frozen=True):
    """A whole database.

    Attributes:
        kinds: Rows of each kind, most first.
        families: Rows of timings and refusals by family, most first.
        reasons: Refusals by reason, most first.
        damaged: Rows whose hash is wrong: nothing uses them.
        superseded: Rows that a later one for the same key replaces.
        tasks: Most rows first.
    """

    kinds: dict[str, int]
    families: dict[str, int]
    reasons: dict[str, int]
    damaged: int
    superseded: int
    tasks: tuple[TaskHoldings, ...]


def take_stock(rows: Mapping[int, Row | None]) -> Holdings:
    """Sum up a database.

    Args:
        rows: By number, as `Records.numbers` returns them.
    """
    sound = [row for row in rows.values() if row is not None]
    by_task: dict[str, list[Row]] = {}
    for row in sound:
        by_task.setdefault(row.task, []).append(row)
    tasks = [_task(task, found) for task, found in by_task.items()]
    candidates = [row.body.candidate for row in sound if isinstance(row.body, Timing | Refusal)]
    return Holdings(
        kinds=_counted(KINDS[type(row.body)] for row in sound),
        families=_counted(candidate.family for candidate in candidates),
        reasons=_counted(row.body.rejected.reason for row in sound if isinstance(row.body, Refusal)),
        damaged=len(rows) - len(sound),
        superseded=len(superseded(rows)),
        tasks=tuple(sorted(tasks, key=lambda t: (-(t.timings + t.refusals), t.task))),
    )


def superseded(rows: Mapping[int, Row | None]) -> list[int]:
    """Return the numbers of rows that a later one replaces: of several for one key the last counts.

    Timings of one key at different rungs of a race are different facts.
    """
    last: dict[tuple[object, ...], int] = {}
    replaced: list[int] = []
    for number, row in rows.items():
        if row is None:
            continue
        rung = (row.body.rung, row.body.stage) if isinstance(row.body, Timing) else ()
        fact = (row.key, row.task, type(row.body), *rung)
        if fact in last:
            replaced.append(last[fact])
        last[fact] = number
    return sorted(replaced)


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])))


def _task(task: str, rows: Collection[Row]) -> TaskHoldings:
    timings = [row.body for row in rows if isinstance(row.body, Timing)]
    outcomes = {row.key: row.body for row in rows if isinstance(row.body, Outcome)}
    last = next((row.body for row in reversed(list(rows)) if isinstance(row.body, Outcome)), Outcome(()))
    finalists = last.finalists
    best = max(finalists, key=lambda f: f.gain, default=None)
    return TaskHoldings(
        task=task,
        timings=len(timings),
        refusals=sum(isinstance(row.body, Refusal) for row in rows),
        races=len(outcomes),
        candidates=len({timing.candidate for timing in timings}),
        extern_us=finalists[0].median_us if finalists else 0.0,
        best="" if best is None else label(best.candidate),
        best_us=0.0 if best is None else best.median_us,
        failed=last.failed,
        doubtful=bool(finalists) and finalists[0].doubtful,
    )
