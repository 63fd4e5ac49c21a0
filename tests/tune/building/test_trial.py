"""A compiler that is there but broken ends the run with one message; one that refuses a kernel costs that kernel."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from devices import cuda_target
from tuning_fakes import TARGET, FakeFamily, Moody, RecordedDevice, linear_plan

from tune_model.tune.building.pool import BuildPool
from tune_model.tune.building.trial import CompilerBrokenError, CompilerWatch, require_compiler
from tune_model.tune.candidate import Built, Family, Rejected
from tune_model.tune.choice import Tuning
from tune_model.tune.families.aten import FAMILY as ATEN
from tune_model.tune.options import TuneOptions
from tune_model.tune.records.database import Records, Refusal
from tune_model.tune.target import Target
from tune_model.tune.tuner import tune_with
from tune_model.tune.workshop import Workshop

TASK = linear_plan(1).tasks[0].task
REFUSED = Rejected("compiler", "no such instruction")

Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a shell script before the machine's own g++."""

    def put(script: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "g++").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "g++").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    return put


@pytest.fixture
def pool() -> Iterator[BuildPool]:
    pool = BuildPool(1, timeout_s=60.0)
    yield pool
    pool.close()


BROKEN = {
    "silent": ("exit 1", "it ended with an error and said nothing"),
    "headers": ("echo 'fatal error: stdint.h: No such file' >&2; exit 1", "stdint.h: No such file"),
    "nothing": ("exit 0", "No such file or directory"),
    "rubbish": ("echo rubbish > kernel.so", "8 bytes that are no library"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_compiler_that_compiles_nothing_is_refused(install: Install, how: str):
    script, said = BROKEN[how]
    install(script)
    with pytest.raises(CompilerBrokenError, match=said) as caught:
        require_compiler(TARGET)
    assert "g++ on PATH does not compile even the smallest kernel for Test CPU" in str(caught.value)
    assert "repair it" in str(caught.value)
    assert caught.value.exit_code == 2


def test_this_machines_compiler_is_fine():
    require_compiler(TARGET)


def watch(pool: BuildPool, target: Target = TARGET) -> CompilerWatch:
    return CompilerWatch(pool, target, threading.Event())


def test_a_kernel_that_is_refused_by_a_good_compiler_is_refused(pool: BuildPool):
    """The smallest kernel is built once, not beside every refusal."""
    watching = watch(pool)
    for _ in range(3):
        watching.mind(REFUSED, TASK)
    assert pool.finished == 1


@pytest.mark.parametrize(
    "good",
    [FakeFamily("good", ((("n", 0),),)).build(TASK, (("n", 0),), TARGET), Rejected("spills", "700 bytes")],
    ids=["built", "compiled"],
)
def test_nothing_is_tried_where_builds_have_just_succeeded(pool: BuildPool, good: Built | Rejected):
    watching = watch(pool)
    watching.mind(good, TASK)
    watching.mind(REFUSED, TASK)
    assert pool.finished == 0


@pytest.mark.parametrize("reason", ["unsupported", "out of memory", "processes"])
def test_other_reasons_say_nothing_about_the_compiler(pool: BuildPool, reason: str):
    watch(pool).mind(Rejected(reason, "as it says"), TASK)
    assert pool.finished == 0


def test_triton_is_tried_as_well(pool: BuildPool):
    watch(pool, cuda_target()).mind(REFUSED, TASK)
    assert pool.finished == 1


def test_a_broken_assembler_is_found_out(pool: BuildPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It answers when it is asked for its version, as Triton asks first, and assembles nothing."""
    from triton import knobs

    script = tmp_path / "ptxas"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec {knobs.nvidia.ptxas.path} --version\nexit 1\n')
    script.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(script))
    with pytest.raises(CompilerBrokenError, match=r"(?s)Triton .* for sm_90: .*ptxas.*install it again"):
        watch(pool, cuda_target()).mind(REFUSED, TASK)


def test_who_asks_to_stop_does_not_wait_for_the_trial(pool: BuildPool):
    watching = CompilerWatch(pool, TARGET, stop := threading.Event())
    stop.set()
    watching.mind(REFUSED, TASK)


FAMILIES: tuple[Family, ...] = (ATEN, Moody("raise"))


def tuned(folder: Path) -> Tuning:
    settings = TuneOptions(folder / "records.sqlite", folder / "kernels")
    device = RecordedDevice({"aten": 10.0, "moody": 5.0})
    return tune_with(linear_plan(1), Workshop(FAMILIES, TARGET, device, settings, lambda _: None))


def refusals(folder: Path) -> list[Refusal]:
    records = Records(folder / "records.sqlite")
    try:
        return [row.body for row in records.rows() if isinstance(row.body, Refusal)]
    finally:
        records.close()


def test_a_broken_compiler_ends_the_run_and_leaves_no_refusal_behind(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Every candidate was `rejected: compiler` in the records, so the library stayed after the repair as well."""
    sound = os.environ["PATH"]
    install("exit 1")
    with pytest.raises(CompilerBrokenError):
        tuned(tmp_path)
    assert refusals(tmp_path) == []
    monkeypatch.setenv("PATH", sound)
    (choice,) = tuned(tmp_path).choices
    assert choice.winner.family == "aten"
    assert [found.rejected.reason for found in refusals(tmp_path)] == ["compiler"]
