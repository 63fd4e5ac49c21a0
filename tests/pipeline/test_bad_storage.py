"""Disks that fill up, places that may not be written, damaged records, a broken compiler: under the command itself."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import refusal, tree

from tune_model.pipeline import cli

CONFIG = """\
name: small
model:
  source: torch
  factory: bad_models:Linear
  inputs:
    - {name: x, shape: [batch, 8], dtype: float32}
task: forward
dtype: float32
workload:
  forward: {batch: [4]}
target: cpu
search: {effort: quick}
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records and kernels of the configuration, tuned once over a database that was damaged."""
    folder = tmp_path_factory.mktemp("store")
    (folder / "model.yaml").write_text(CONFIG)
    (folder / "records.sqlite").write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 16)
    return folder


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one page: less than a database or an artifact takes."""
    with mounted(tmp_path, "size=4k"):
        yield tmp_path


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A file system that nobody may write to, not even root."""
    with mounted(tmp_path, "ro"):
        yield tmp_path


def tune(store: Path, output: Path, records: Path | None = None) -> list[str]:
    return ["tune", str(store / "model.yaml"), "-o", str(output), "--records", str(records or store)]


def test_damaged_records_are_set_aside_and_said_so(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    damaged = (store / "records.sqlite").read_bytes()
    assert cli.run(tune(store, tmp_path / "a.tuned")) == 0
    assert "records were damaged: set aside as" in capsys.readouterr().err
    assert (store / "records.sqlite.damaged-1").read_bytes() == damaged
    assert cli.run(tune(store, tmp_path / "b.tuned")) == 0
    assert "0 builds, 0 measurements" in capsys.readouterr().err
    assert (tmp_path / "a.tuned").read_bytes() == (tmp_path / "b.tuned").read_bytes()


def test_a_disk_too_small_for_the_artifact(store: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]):
    """What was measured is kept: the next try, with room, measures nothing."""
    error = refusal(tune(store, small_disk / "a.tuned"), small_disk, capsys)
    assert error.startswith(f"{small_disk}/a.tuned: cannot be written: No space left on device; expected")
    assert "make room" in error


def test_a_disk_too_small_for_the_records(store: Path, small_disk: Path, tmp_path_factory, capsys):
    output = tmp_path_factory.mktemp("output")
    error = refusal(tune(store, output / "a.tuned", small_disk / "records"), output, capsys)
    assert error.startswith(f"{small_disk}/records/records.sqlite: cannot open the records database (")
    assert "choose another with --records" in error


def test_a_disk_that_is_full_is_noticed_before_the_model_is_built(
    store: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(bytes(1 << 16))
    before = tree(small_disk)
    capsys.readouterr()
    assert cli.run(tune(store, small_disk / "a.tuned", small_disk / "records")) == 2
    shown = capsys.readouterr().err
    assert "No space left on device" in shown
    assert tree(small_disk) == before


def test_a_result_that_cannot_be_written_is_noticed_before_the_model_is_built(
    store: Path, read_only: Path, tmp_path_factory, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path_factory.mktemp("output")
    asked = tune(store, output / "a.tuned", output / "records")
    error = refusal([*asked, "--save", str(read_only / "new" / "cost.json")], output, capsys)
    assert error == f"{read_only}/new/cost.json: Read-only file system; expected a place for the result"
    inside = tune(store, f"{output}/a.tuned/", output / "records")
    error = refusal([*inside, "--save", str(output / "a.tuned" / "cost.json")], output, capsys)
    assert "--save: lies in the artifact; expected another place" in error


def test_a_result_never_takes_the_place_of_the_records_that_the_run_made(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """It is not there yet when the place is looked at. Every measurement was lost, and the exit code was 0."""
    records = tmp_path / "records"
    asked = [*tune(store, tmp_path / "a.tuned", records), "--save", str(records / "records.sqlite")]
    assert cli.run(asked) == 2
    assert "records.sqlite: is a file but not a benchmark result" in capsys.readouterr().err
    assert cli.run(tune(store, tmp_path / "b.tuned", records)) == 0
    assert "0 builds, 0 measurements" in capsys.readouterr().err


def test_a_result_on_a_device_is_not_read_first(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """/dev/full reads as zeros without end: the process took all memory there was."""
    asked = tune(store, tmp_path / "a.tuned")
    assert cli.run([*asked, "--save", "/dev/null"]) == 0
    assert cli.run([*asked, "--save", "/dev/full"]) == 2
    assert "/dev/full: cannot be written: No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("inside", [".", "records"])
def test_records_in_a_place_that_may_not_be_written(
    store: Path, read_only: Path, tmp_path_factory, capsys: pytest.CaptureFixture[str], inside: str
):
    output = tmp_path_factory.mktemp("output")
    error = refusal(tune(store, output / "a.tuned", read_only / inside), output, capsys)
    assert "cannot hold records or kernels" in error
    assert "Read-only file system; expected a writable folder with space" in error
    assert "choose it with --records" in error


@pytest.mark.parametrize("retune", [False, True])
def test_a_compiler_that_compiles_nothing(
    store: Path, tmp_path_factory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *, retune: bool
):
    """It used to cost every candidate of every task, and the library stayed everywhere with exit code 0."""
    output = tmp_path_factory.mktemp("output")
    assert cli.run(tune(store, output / "a.tuned")) == 0
    compilers = tmp_path_factory.mktemp("compilers")
    (compilers / "g++").write_text("#!/bin/sh\necho 'cc1plus: cannot execute' >&2\nexit 1\n")
    (compilers / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{compilers}{os.pathsep}{os.environ['PATH']}")
    arguments = ["retune", str(output / "a.tuned"), "--records", str(store)] if retune else tune(store, output / "b")
    error = refusal(arguments, output, capsys)
    assert "g++ on PATH does not compile even the smallest kernel" in error
    assert "cc1plus: cannot execute" in error
    assert error.count("smallest kernel") == 1
