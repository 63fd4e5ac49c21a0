import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tuning_fakes import TARGET, Held, Moody, alive, linear_plan

from tune_model.tune.building.pool import BuildPool, Job
from tune_model.tune.candidate import Built, Family, Rejected

TASK = linear_plan(1).tasks[0].task


def job(family: Family, config: tuple[tuple[str, str | int], ...]) -> Job:
    return Job(family, TASK, config, TARGET)


def mood(name: str) -> Job:
    return job(Moody("good", name), (("mood", name),))


def gather(pool: BuildPool, tickets: list[int]) -> dict[int, Built | Rejected]:
    found: dict[int, Built | Rejected] = {}
    deadline = time.monotonic() + 120
    while len(found) < len(tickets) and time.monotonic() < deadline:
        found |= pool.wait(set(tickets) - found.keys(), 1.0)
    return found


@pytest.fixture
def pool() -> Iterator[BuildPool]:
    pool = BuildPool(2, timeout_s=5.0)  # good builds take milliseconds once their process has its imports
    yield pool
    pool.close()


def test_good_builds_come_back_whatever_their_neighbours_do(pool: BuildPool):
    moods = ["good", "crash", "good", "hang", "raise", "refuse", "good"]
    tickets = [pool.submit(mood(name)) for name in moods]
    found = gather(pool, tickets)
    reasons = [getattr(found[t], "reason", "built") for t in tickets]
    assert reasons == ["built", "crash", "built", "timeout", "compiler", "shared memory", "built"]
    crash = found[tickets[1]]
    assert isinstance(crash, Rejected)
    assert "SIGABRT" in crash.detail
    assert "register allocator" in crash.detail
    assert pool.finished == len(moods)


def test_no_process_is_left(pool: BuildPool):
    tickets = [pool.submit(mood("good")), pool.submit(mood("hang"))]
    gather(pool, tickets[:1])
    import multiprocessing

    pids = [p.pid for p in multiprocessing.active_children() if p.name.startswith("build-") and p.pid]
    assert pids
    pool.close()
    assert not [pid for pid in pids if alive(pid)]


def test_no_process_is_started_for_nothing():
    pool = BuildPool(2, timeout_s=1.0)
    pool.close()
    assert pool.finished == 0


def test_urgent_and_hurried_builds_overtake(tmp_path: Path):
    pool = BuildPool(1, timeout_s=30.0)
    try:
        family = Held("x", tuple((("n", n),) for n in range(5)), tmp_path)
        slow = [pool.submit(job(family, (("n", n),))) for n in range(4)]
        urgent = pool.submit(job(family, (("n", 4),)), urgent=True)
        pool.hurry([slow[3]])
        (tmp_path / "go").touch()
        found = gather(pool, [*slow, urgent])
        assert all(isinstance(built, Built) for built in found.values()), found
        first, *overtaking = (tmp_path / "built").read_text()[:3]
        assert first == "0" or first in "34", "a build that has begun goes on"
        assert {first, *overtaking} >= {"3", "4"}
    finally:
        pool.close()


def test_cancelled_builds_are_not_run():
    pool = BuildPool(1, timeout_s=30.0)
    try:
        first, *rest = [pool.submit(mood("good")) for _ in range(5)]
        pool.cancel(rest)
        assert gather(pool, [first]).keys() == {first}
        assert pool.wait(rest, 0.3) == {}
        assert pool.finished <= 2
    finally:
        pool.close()


def test_idle_means_that_nothing_is_built_for_anyone(pool: BuildPool):
    assert pool.wait_idle(0.0)
    tickets = [pool.submit(mood("good")) for _ in range(4)]
    pool.cancel(tickets[2:])
    assert pool.wait_idle(30.0)
    assert pool.wait(tickets[:2], 0.0).keys() == set(tickets[:2])
    pool.submit(mood("hang"))
    assert not pool.wait_idle(0.2)
