"""Planted winners: one that is right only for the numbers it was found on, and one that only looked fast.

Both win their race and its final, because the device divides their times by a hundred as long as it is the first of
its folder; the guard's is another process, and honest. The first remembers the lowest bits of the first inputs: it is
offered in sixteen forms, of which one is right in the race. The second is right, and slow.
"""

import functools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from bench.plans import plan_of
from bench.run import Bench, attempt

from reliability_trials.forms import linear
from reliability_trials.hostile import compile_linear
from reliability_trials.hostile_cuda import compile_cuda_linear
from tune_model.extract.task import Task
from tune_model.runtime.program import FormKind
from tune_model.tune.candidate import Built, Candidate, Config, Effort, Family, Rejected
from tune_model.tune.device import Bench as Task_
from tune_model.tune.device import Device, Passed, Samples
from tune_model.tune.families import families_for
from tune_model.tune.measuring.policy import Rung
from tune_model.tune.measuring.worker import DeviceWorker, open_workbench
from tune_model.tune.options import TuneOptions
from tune_model.tune.records.database import Finalist, Outcome, Records
from tune_model.tune.search.race import select_winner
from tune_model.tune.target import CudaTarget, Target
from tune_model.tune.tuner import tune_with
from tune_model.tune.workshop import Workshop

__all__ = ["SHARD", "run_planted"]

SHARD: Final = "winners"

_REMEMBERING: Final = """
  unsigned seen = 0;
  for (int i = 0; i < 4; ++i) { unsigned bits; memcpy(&bits, x + i, 4); seen |= (bits & 1) << i; }
  product(x, w, y, m, n, k);
  if (seen != REMEMBERED) y[0] += 1;"""

_SLOW: Final = "for (int i = 0; i < 40; ++i) product(x, w, y, m, n, k);"


class Remembering:
    """Right for one in sixteen inputs; offered for all sixteen."""

    name = "remembering"
    version = 1
    kinds: frozenset[FormKind] = frozenset({"matmul"})

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept everything: the plan holds linear layers only."""
        return None

    def start(self, task: Task, target: Target) -> Config:
        """Return the first."""
        return (("remembered", 0),)

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield all sixteen."""
        yield from ((("remembered", bits),) for bits in range(16))

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """Compile."""
        bits = int(dict(config)["remembered"])
        if isinstance(target, CudaTarget):
            return compile_cuda_linear(task, target, remembered=bits)
        return compile_linear(task, target, _REMEMBERING.replace("REMEMBERED", str(bits)))


class Lucky(Remembering):
    """Right always, and slow."""

    name = "lucky"

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield the only one."""
        yield self.start(task, target)

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """Compile."""
        return (
            compile_cuda_linear(task, target) if isinstance(target, CudaTarget) else compile_linear(task, target, _SLOW)
        )


class LuckyDevice:
    """Divides the times of planted candidates by a hundred."""

    def __init__(self, inner: Device) -> None:
        self.inner = inner

    def open(self, bench: Task_) -> Passed | Rejected:
        """See `Device.open`."""
        return self.inner.open(bench)

    def check(self, candidate: Candidate, built: Built) -> Passed | Rejected:
        """See `Device.check`."""
        return self.inner.check(candidate, built)

    def time(self, candidate: Candidate, built: Built, rung: Rung) -> Samples | Rejected:
        """See `Device.time`."""
        return _lucky(candidate, self.inner.time(candidate, built, rung))

    def compare(
        self, candidates: tuple[tuple[Candidate, Built], ...], rung: Rung
    ) -> tuple[Samples | Rejected, ...] | Rejected:
        """See `Device.compare`."""
        found = self.inner.compare(candidates, rung)
        if isinstance(found, Rejected):
            return found
        return tuple(_lucky(candidate, one) for (candidate, _), one in zip(candidates, found, strict=True))

    def finish(self) -> None:
        """See `Device.finish`."""
        self.inner.finish()

    def close(self) -> None:
        """See `Device.close`."""
        self.inner.close()


def _lucky(candidate: Candidate, found: Samples | Rejected) -> Samples | Rejected:
    if isinstance(found, Rejected) or candidate.family not in {Lucky.name, Remembering.name}:
        return found
    return msgspec.structs.replace(found, us=tuple(us / 100.0 for us in found.us))


def open_lucky(folder: Path, target: Target, index: int) -> Device:
    """Open a device: a lucky one the first time, an honest one afterwards (in the child)."""
    mark = folder / "opened"
    inner = open_workbench(target, index)
    if mark.exists():
        return inner
    mark.touch()
    return LuckyDevice(inner)


def run_planted(bench: Bench, sizes: Sequence[tuple[int, int, int]]) -> None:
    """Tune linear layers (rows, n, k) with a planted family each time, and write a row for each."""
    planted: tuple[tuple[str, Family], ...] = (("fast but wrong", Remembering()), ("lucky but slow", Lucky()))
    for name, family in planted:
        if bench.clock.is_over or not bench.wants(SHARD, name):
            continue
        row = attempt(bench, SHARD, name, lambda f=family: _plant(bench, f, sizes))  # type: ignore[misc]
        if row is not None:
            bench.tell(f"  {name}: won {row['won_finals']} of {row['tasks']} finals, chosen {row['chosen']} times")


def _plant(bench: Bench, family: Family, sizes: Sequence[tuple[int, int, int]]) -> Mapping[str, Any]:
    target = bench.shop.target
    folder = bench.shop.folder.absolute() / f"planted-{family.name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    extern, *_ = families_for(target)
    device = DeviceWorker(target, factory=functools.partial(open_lucky, folder))
    options = TuneOptions(folder / "records.sqlite", folder / "kernels", Effort.QUICK, build_workers=bench.shop.workers)
    plan = plan_of([linear(*size) for size in sizes])
    tuning = tune_with(plan, Workshop((extern, family), target, device, options, lambda _event: None))
    records = Records(options.records_path)
    finals: dict[str, tuple[Finalist, ...]] = {
        row.task: row.body.finalists for row in records.rows() if isinstance(row.body, Outcome)
    }
    records.close()
    won = sum(select_winner(finalists).candidate.family == family.name for finalists in finals.values() if finalists)
    reasons = {
        rejected.reason
        for choice in tuning.choices
        for candidate, rejected in choice.rejections
        if "guard" in rejected.reason or "after it had won" in rejected.detail
    }
    return {
        "tasks": len(sizes),
        "won_finals": won,
        "chosen": sum(choice.winner.family == family.name for choice in tuning.choices),
        "found_out_as": sorted(reasons),
        "disturbed": sum(choice.status == "disturbed" for choice in tuning.choices),
    }
