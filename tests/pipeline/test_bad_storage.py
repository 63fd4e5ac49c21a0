"""Disks that fill up and records that are damaged, under the command itself and without pretending."""

import subprocess
from collections.abc import Iterator
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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one page: less than a database or an artifact takes."""
    command = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


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
