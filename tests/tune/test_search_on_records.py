"""The search on recorded times of an H200: how near it comes to the best, for how little measuring. Builds nothing."""

import itertools
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from recorded_gpu import RecordedGpu, Recording, families_of, plan_of, read
from tuning_fakes import linear_plan, without_times

from tune_model.tune.candidate import Candidate, Config
from tune_model.tune.measuring.policy import policy_for
from tune_model.tune.options import TuneOptions
from tune_model.tune.records.database import Finalist
from tune_model.tune.search.descent import descend
from tune_model.tune.search.layouts import settle_layouts
from tune_model.tune.search.race import RaceRules, race
from tune_model.tune.target import CudaTarget
from tune_model.tune.tuner import tune_with
from tune_model.tune.workshop import Workshop

HEADER, RECORDINGS = read()
TARGET = CudaTarget(90, HEADER.device, 132, 50 << 20, 232448, 65536, 140 << 30, 1980, "580", "13.0", "2.11", "3.6")
POLICY = policy_for(TARGET, 16 << 30)
LISTS = [r for r in RECORDINGS if r.kind in {"matmul", "attention"} and len(r.raced()) > 10]
CLIMBS = [r for r in RECORDINGS if r.kind in {"reduction", "pointwise"}]


class Timer:
    """Times of the first rung, which everyone has, with noise of our own: less of it at longer rungs.

    Times of different rungs do not compare: a long one meets a hotter GPU, so who was timed briefly only looks faster.
    """

    def __init__(self, recording: Recording, seed: int) -> None:
        self.known = {c: found.race[0][0] for c, found in recording.raced().items() if not found.refused}
        self.rivals = [c for c in recording.raced() if c.family != "aten"]
        self.noise = Random(seed)  # noqa: S311 (repeatable noise)
        self.samples = 0

    def time(self, candidate: Candidate, rung: int) -> float | None:
        if candidate not in self.known:
            return None
        length = POLICY.rungs[min(rung, len(POLICY.rungs) - 1)]
        self.samples += length.samples
        return self.known[candidate] * self.noise.lognormvariate(0.0, 0.02 / (1 + rung))


def test_the_recording_says_where_it_comes_from():
    assert (HEADER.device, HEADER.date, HEADER.versions["triton"]) == ("NVIDIA H200", "2026-11-30", "3.6.0")
    assert len(RECORDINGS) == 58
    assert sum(len(r.raced()) for r in RECORDINGS) > 2000


@pytest.mark.parametrize("seed", range(3))
def test_a_race_finds_the_best_of_a_list_for_a_fraction_of_the_samples(seed: int):
    regrets: dict[str, float] = {}
    spent = exhaustive = 0
    for recording in LISTS:
        timer = Timer(recording, seed)
        finalists = race(timer.rivals, timer, RaceRules(), lambda _candidate: "plain")
        assert len(finalists) <= 5
        best = min(timer.known[c] for c in timer.rivals if c in timer.known)
        regrets[recording.label] = min(timer.known[c] for c in finalists) / best - 1.0
        spent += timer.samples + POLICY.final.samples * len(finalists)
        exhaustive += POLICY.final.samples * len(timer.rivals)
    assert max(regrets.values()) <= 0.01, max(regrets.items(), key=lambda pair: pair[1])
    assert spent / exhaustive < 0.4


def configurations(recording: Recording) -> Iterator[tuple[str, dict[Config, float | None]]]:
    known = recording.best_us()
    for name in recording.families:
        if name != "aten":
            yield name, {c.config: known.get(c) for c in recording.raced() if c.family == name}


@pytest.mark.parametrize("seed", range(3))
def test_a_descent_ends_near_the_best_of_its_space(seed: int):
    noise = Random(seed)  # noqa: S311 (repeatable noise)
    regrets: list[float] = []
    asked = everything = 0
    for recording, (_, times) in itertools.chain.from_iterable(
        ((r, pair) for pair in configurations(r)) for r in CLIMBS
    ):
        del recording
        seen: list[Config] = []

        def time(config: Config, times=times, seen=seen) -> float | None:  # type: ignore[no-untyped-def]
            seen.append(config)
            us = times[config]
            return None if us is None else us * noise.lognormvariate(0.0, 0.005)

        ended = descend(next(iter(times)), list(times), time, lambda _configs: None).found
        best = min(us for us in times.values() if us is not None)
        # The three best go on to the race and the final, which tells them apart.
        regrets.append(min(us for c in ended[:3] if (us := times[c]) is not None) / best - 1.0)
        asked, everything = asked + len(seen), everything + len(times)
    assert statistics.mean(regrets) <= 0.02
    assert max(regrets) <= 0.15
    assert asked / everything < 0.7


def test_the_tuner_chooses_what_was_best_and_repeats_itself(tmp_path: Path):
    some = RECORDINGS[::6]
    plan = plan_of(some)

    def run(device: RecordedGpu):  # type: ignore[no-untyped-def]
        options = TuneOptions(tmp_path / "records.sqlite", tmp_path / "kernels")
        return tune_with(plan, Workshop(families_of(some), TARGET, device, options, lambda _event: None))

    device = RecordedGpu(some)
    tuning = run(device)
    chosen = possible = extern = 0.0
    for recording, choice in zip(some, tuning.choices, strict=True):
        known = recording.best_us()
        assert known[choice.winner] <= 1.02 * min(known.values()), recording.label
        assert choice.gain_low * 0.99 <= choice.baseline_us / choice.median_us <= choice.gain_high * 1.01
        chosen += recording.weight * known[choice.winner]
        possible += recording.weight * min(known.values())
        extern += recording.weight * known[Candidate("aten")]
    assert chosen <= 1.005 * possible
    assert extern > 1.05 * chosen
    candidates = sum(len(recording.raced()) for recording in some)
    assert device.samples < 0.5 * candidates * POLICY.final.samples
    silent = RecordedGpu(some)
    again = run(silent)
    assert (again.builds, again.measured, silent.samples) == (0, 0, 0)
    assert without_times(again) == without_times(tuning)


TRITON = ("triton_gemv", "triton_matmul", "triton_split_k")


@pytest.mark.parametrize(("packed", "pays"), [(TRITON, True), *(((name,), False) for name in TRITON)])
def test_a_shared_weights_layout_is_the_cheapest_for_all_its_readers(packed: tuple[str, ...], pays: bool):
    """Every task reads one weight; some families are made to want it transposed, so all must use these or none."""
    readers = [r for r in RECORDINGS if r.label in {f"matmul {m}x4096x4096 bf16 + residual" for m in (1, 8, 16, 64)}]
    plan = linear_plan(1, 8, 16, 64)
    finals: dict[str, list[Finalist]] = {}
    plain_us = packed_us = 0.0
    for planned, recording in zip(plan.tasks, readers, strict=True):
        known = recording.best_us()
        extern_us = known.pop(Candidate("aten"))
        finals[planned.key] = [Finalist(Candidate("aten"), (), extern_us, 1.0, 1.0, 1.0, 1, unconditional=True)]
        for candidate, us in known.items():
            layouts = (("a1", "transposed"),) if candidate.family in packed else ()
            gain = extern_us / us
            finals[planned.key].append(Finalist(candidate, layouts, us, gain, gain, gain, 1, unconditional=False))
        plain_us += min((extern_us, *(us for c, us in known.items() if c.family not in packed)))
        packed_us += min((us for c, us in known.items() if c.family in packed), default=math.inf)
    settled = settle_layouts(plan, finals)
    total = sum(winner.median_us for winner in settled.winners.values())
    expected = packed_us if packed_us < 0.99 * plain_us else plain_us
    assert total <= expected * 1.004  # of equally fast ones the simpler
    assert {bool(winner.layouts) for winner in settled.winners.values()} == {pays}
