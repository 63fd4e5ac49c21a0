"""What is measured again after something changed: the few that may have become best, and nothing else."""

from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from tuning_fakes import FakeFamily, RecordedDevice, linear_plan, without_times

from tune_model.tune.candidate import Candidate, Family, Rejected
from tune_model.tune.choice import Tuning
from tune_model.tune.device import Bench, Passed
from tune_model.tune.events import Event, TaskStarted, TuneStarted
from tune_model.tune.families.aten import FAMILY as ATEN
from tune_model.tune.options import TuneOptions
from tune_model.tune.target import CudaTarget
from tune_model.tune.tuner import tune_with
from tune_model.tune.workshop import Workshop

GPU = CudaTarget(90, "NVIDIA H200", 132, 60 << 20, 232448, 65536, 1 << 37, 1980, "580", "13.1", "2.11", "3.6")
CONFIGS = tuple((("n", n),) for n in range(12))
FAMILIES: tuple[Family, ...] = (ATEN, FakeFamily("triton_gemv", CONFIGS), FakeFamily("cublaslt", CONFIGS[:4]))
TIMES = {"aten": 40.0, "triton_gemv": 20.0, "cublaslt": 30.0, "new": 60.0}


class Runs:
    """Tunes over one records database, on one machine after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(
        self, target: CudaTarget = GPU, families: tuple[Family, ...] = FAMILIES, device: RecordedDevice | None = None
    ) -> Tuning:
        self.device = device or RecordedDevice(dict(TIMES))
        self.events: list[Event] = []
        options = TuneOptions(self.folder / "records.sqlite", self.folder / "kernels")
        shop = Workshop(families, target, self.device, options, self.events.append)
        return tune_with(linear_plan(1, 8), shop)

    def timed_alone(self) -> set[str]:
        return {name for kind, name in self.device.asked if kind == "time"}

    def compared(self) -> list[str]:
        return [names for kind, names in self.device.asked if kind == "compare"]

    def started(self) -> TuneStarted:
        return next(event for event in self.events if isinstance(event, TuneStarted))


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    runs = Runs(tmp_path)
    first = runs()
    assert runs.started().stale == 0
    assert {c.winner for c in first.choices} == {Candidate("triton_gemv", (("n", 0),))}
    return runs


def nothing_is_measured_now(runs: Runs, before: Tuning, *arguments: object) -> None:
    again = runs(*arguments)  # type: ignore[arg-type]
    assert (again.builds, again.measured) == (0, 0)
    assert runs.started().replayed == 2
    assert without_times(again) == without_times(before)


CHANGES = {
    "driver": {"driver_branch": "590"},
    "torch": {"torch": "2.12"},
    "triton": {"triton": "3.7"},
    "model of the GPU": {"name": "NVIDIA H100", "memory_bytes": 80 << 30, "max_clock_mhz": 1755},
    "everything but the architecture": {
        f: (getattr(GPU, f) + ("x" if isinstance(getattr(GPU, f), str) else 1))
        for f in GPU.__struct_fields__
        if f != "arch"
    },
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_after_a_driver_or_library_change_only_the_finalists_are_timed_again(runs: Runs, changes: dict[str, object]):
    other = msgspec.structs.replace(GPU, **changes)
    tuning = runs(other)
    assert runs.started().stale == 2
    assert runs.timed_alone() == set()
    finals = [names.split() for names in runs.compared()]
    assert [len(names) for names in finals] == [9, 9, 2, 2]  # two finals, two winners once more
    assert all(e.candidates == 9 for e in runs.events if isinstance(e, TaskStarted))
    assert tuning.measured == 2 * 9 + 2 * 2
    assert {c.winner.family for c in tuning.choices} == {"triton_gemv"}
    nothing_is_measured_now(runs, tuning, other)


def test_after_a_change_of_the_code_that_measures_only_the_finalists_are_timed_again(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
):
    """Times taken by other code were believed as they are."""
    monkeypatch.setattr("tune_model.tune.workshop.digest_measuring", lambda _module: "another")
    tuning = runs()
    assert runs.started().stale == 2
    assert runs.timed_alone() == set()
    assert tuning.measured == 2 * 9 + 2 * 2
    assert {c.winner.family for c in tuning.choices} == {"triton_gemv"}
    nothing_is_measured_now(runs, tuning)


def test_the_old_machine_keeps_its_own_outcome(runs: Runs):
    runs(msgspec.structs.replace(GPU, driver_branch="590"))
    back = runs()
    assert (runs.started().stale, back.measured) == (0, 0)


def test_what_became_faster_wins(runs: Runs):
    changed = RecordedDevice(TIMES | {"aten": 10.0})
    tuning = runs(msgspec.structs.replace(GPU, torch="2.12"), FAMILIES, changed)
    assert {(c.winner.family, c.status) for c in tuning.choices} == {("aten", "no gain")}


def test_another_architecture_is_searched_from_the_start(runs: Runs):
    tuning = runs(msgspec.structs.replace(GPU, arch=100))
    assert runs.started().stale == 0
    assert runs.timed_alone() == {"aten", "triton_gemv", "cublaslt"}
    assert tuning.measured > 2 * 17


class Cublas(RecordedDevice):
    """Notes which candidates are checked, which is before they are timed for the first time."""

    def __init__(self) -> None:
        super().__init__(dict(TIMES))
        self.checked: list[Candidate] = []

    def check(self, candidate, built):  # type: ignore[no-untyped-def]
        self.checked.append(candidate)
        return super().check(candidate, built)


def recorded(runs: Runs, tuning: Tuning, stages: Iterable[str]) -> set[str]:
    return {m.candidate.family for c in tuning.choices for m in c.measurements if m.stage in stages}


def test_after_a_cublas_change_only_what_calls_it_has_lost_its_times(runs: Runs):
    other = msgspec.structs.replace(GPU, cublas="13.2")
    tuning = runs(other)
    assert runs.timed_alone() == set()
    # Times of the race are still there for Triton's kernels; those of the library's are gone.
    assert recorded(runs, tuning, ["race"]) == {"triton_gemv"}
    assert recorded(runs, tuning, ["final"]) == {"aten", "triton_gemv"}
    nothing_is_measured_now(runs, tuning, other)


def test_a_full_search_after_a_cublas_change_times_only_what_calls_it(runs: Runs):
    """As when a new family comes at the same time: the old outcome is no help, the old times are."""
    families = (*FAMILIES, FakeFamily("new", CONFIGS[:2]))
    runs(msgspec.structs.replace(GPU, cublas="13.2"), families)
    assert runs.started().stale == 0
    first = [name for kind, name in runs.device.asked if kind == "time"][:7]
    assert set(first) == {"aten", "cublaslt", "new"}
    assert "triton_gemv" not in runs.timed_alone()


def test_adding_a_family_measures_its_candidates_and_the_finalists_only(runs: Runs):
    families = (*FAMILIES, FakeFamily("new", CONFIGS[:2]))
    tuning = runs(GPU, families)
    assert runs.timed_alone() == {"new"}
    assert [len(names.split()) for names in runs.compared()] == [9, 9]  # the winners were confirmed before
    assert tuning.builds == 2 * 2
    assert tuning.measured == 2 * (2 + 9)


def test_a_finalist_that_fails_here_makes_the_search_start_anew(runs: Runs):
    class Fails(RecordedDevice):
        def check(self, candidate, built):  # type: ignore[no-untyped-def]
            found = super().check(candidate, built)
            is_best = candidate == Candidate("triton_gemv", (("n", 0),))
            return Rejected("launch", "too many resources requested") if is_best else found

    tuning = runs(msgspec.structs.replace(GPU, driver_branch="590"), FAMILIES, Fails(dict(TIMES)))
    assert runs.timed_alone() == {"aten", "triton_gemv", "cublaslt"}
    assert {c.winner for c in tuning.choices} == {Candidate("triton_gemv", (("n", 1),))}


def test_a_task_that_had_no_memory_today_is_tried_again_tomorrow(tmp_path: Path):
    runs = Runs(tmp_path)

    class Full(RecordedDevice):
        def open(self, bench: Bench) -> Passed | Rejected:
            return Rejected("out of memory", "tried to allocate 1 TB")

    failed = runs(device=Full(dict(TIMES)))
    assert {c.status for c in failed.choices} == {"failed: out of memory: tried to allocate 1 TB"}
    assert {c.status for c in runs().choices} == {"tuned"}
