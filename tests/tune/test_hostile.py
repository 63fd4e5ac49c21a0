"""Eighteen kinds of hostile candidates in one race, as real machine code in real processes: each costs only itself."""

import os
import time
from multiprocessing import resource_tracker

import pytest
import torch
from reliability_trials.hostile import KINDS, GoodFamily, HostileFamily
from tuning_fakes import alive, linear_plan

from tune_model.runtime.execution.binding import bind_kernel
from tune_model.tune.candidate import Built
from tune_model.tune.choice import Choice
from tune_model.tune.families.aten import FAMILY as ATEN
from tune_model.tune.machine.probe import probe_target
from tune_model.tune.measuring.worker import DeviceWorker
from tune_model.tune.options import TuneOptions
from tune_model.tune.processes.tree import children_of
from tune_model.tune.tuner import tune_with
from tune_model.tune.workshop import Workshop

TARGET = probe_target("cpu")
USUAL_BUILD_S = 0.5
"""That a good candidate builds in, on a machine with nothing else to do, at the most."""


def descendants(pid: int) -> set[int]:
    found = set(children_of(pid))
    for child in tuple(found):
        found |= descendants(child)
    return found


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> tuple[Choice, set[int]]:
    """The outcome, and the processes that the race left.

    Where good candidates take long to build as well, hostile ones get longer until they count as hanging.
    """
    folder = tmp_path_factory.mktemp("hostile")
    resource_tracker.ensure_running()  # Python's own, for as long as the tests run
    before = descendants(os.getpid())
    plan, slowness = linear_plan(8), 1.0
    for attempt in range(3):  # the first one reads the compiler from the disk
        began = time.monotonic()
        assert isinstance(GoodFamily("control", 3).build(plan.tasks[0].task, (("kind", attempt),), TARGET), Built)
        slowness = max(1.0, (time.monotonic() - began) / USUAL_BUILD_S)
    device = DeviceWorker(TARGET, step_s=4.0 * slowness, memory_bytes=3 << 30)
    options = TuneOptions(
        folder / "records.sqlite", folder / "kernels", build_workers=2, build_timeout_s=8.0 * slowness
    )
    families = (ATEN, HostileFamily(), GoodFamily())
    (choice,) = tune_with(plan, Workshop(families, TARGET, device, options, lambda _event: None)).choices
    return choice, descendants(os.getpid()) - before


@pytest.mark.parametrize(("kind", "reason"), KINDS.items())
def test_each_kind_is_rejected_for_what_it_did(race: tuple[Choice, set[int]], kind: str, reason: str):
    choice, _ = race
    found = {dict(c.config).get("kind"): r for c, r in choice.rejections if c.family == "hostile"}
    assert kind in found
    assert found[kind].reason == reason, found[kind]
    assert found[kind].detail


def test_the_good_ones_between_them_are_measured_and_one_of_them_wins(race: tuple[Choice, set[int]]):
    choice, _ = race
    assert choice.winner.family in {"good", "aten"}
    assert {m.candidate.family for m in choice.measurements if m.stage == "final"} >= {"good", "aten"}
    assert choice.status in {"tuned", "no gain", "disturbed"}


def test_no_process_is_left(race: tuple[Choice, set[int]]):
    _, left = race
    assert not [pid for pid in left if alive(pid)]


def test_the_kernels_are_wrong_only_in_what_they_are_about():
    """A hostile kernel that computed rubbish would be rejected for that, and prove nothing."""
    plan = linear_plan(8)
    task = plan.tasks[0].task
    x, w = torch.randn(8, 16), torch.randn(32, 16)
    for kind in ("prints", "right only once"):
        built = HostileFamily().build(task, (("kind", kind),), TARGET)
        assert isinstance(built, Built)
        (y,) = bind_kernel(built.kernel, task.form, built.code, torch.device("cpu"))((x, w))
        torch.testing.assert_close(y, x @ w.T)
