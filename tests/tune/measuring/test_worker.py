from collections.abc import Iterator

import pytest
from tuning_fakes import TARGET, alive, linear_plan, open_hostile

from tune_model.runtime.kernel import Kernel
from tune_model.tune.candidate import Built, Candidate, Rejected
from tune_model.tune.device import Bench, Passed, Samples
from tune_model.tune.measuring.policy import Policy, Rung
from tune_model.tune.measuring.worker import DeviceWorker

TASK = linear_plan(8).tasks[0].task
BUILT = Built(Kernel(TASK.form.body), {})
RUNG = Rung(100.0, 3)
BENCH = Bench(TASK, Policy("test", 1, 0, (RUNG,), RUNG), BUILT, 3)


def pair(name: str) -> tuple[Candidate, Built]:
    return Candidate(name), BUILT


@pytest.fixture
def worker() -> Iterator[DeviceWorker]:
    worker = DeviceWorker(TARGET, factory=open_hostile, step_s=5.0)
    assert worker.open(BENCH) == Passed(0.001)
    yield worker
    worker.close()


def test_a_candidate_that_aborts_costs_itself_only(worker: DeviceWorker):
    before = worker.time(*pair("good"), RUNG)
    crash = worker.check(*pair("aborts"))
    assert isinstance(crash, Rejected)
    assert crash.reason == "crash"
    assert "SIGABRT" in crash.detail
    assert "Assertion `false' failed." in crash.detail
    assert worker.check(*pair("good")) == Passed(0.001)
    assert worker.time(*pair("good"), RUNG) == before
    assert worker.replaced == 1


def test_a_candidate_that_hangs_is_ended_in_time(worker: DeviceWorker):
    pid = worker._child.process.pid  # type: ignore[union-attr]
    hung = worker.check(*pair("hangs"))
    assert isinstance(hung, Rejected)
    assert hung.reason == "timeout"
    assert pid is not None
    assert not alive(pid)
    assert worker.check(*pair("good")) == Passed(0.001)


def test_who_killed_a_comparison_is_found(worker: DeviceWorker):
    results = worker.compare((pair("aten"), pair("good"), pair("late")), RUNG)
    assert isinstance(results, tuple)
    assert [type(r) for r in results] == [Samples, Samples, Rejected]
    rest = worker.compare((pair("aten"), pair("good")), RUNG)
    assert isinstance(rest, tuple)
    assert [len(r.us) for r in rest if isinstance(r, Samples)] == [3, 3]


def test_who_fails_only_beside_the_extern_is_found(worker: DeviceWorker):
    results = worker.compare((pair("aten"), pair("good"), pair("shy")), RUNG)
    assert isinstance(results, tuple)
    assert [type(r) for r in results] == [Samples, Samples, Rejected]
    assert isinstance(worker.compare((pair("aten"), pair("shy")), RUNG), Rejected)  # one of the two


def test_nothing_is_left_after_close(worker: DeviceWorker):
    pid = worker._child.process.pid  # type: ignore[union-attr]
    assert pid is not None
    assert alive(pid)
    worker.close()
    assert not alive(pid)
