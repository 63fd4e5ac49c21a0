"""The command's frame: dispatch, one-line errors and exit codes. Each command's own behaviour has its own file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch

from tune_model.pipeline import cli
from tune_model.pipeline.commands import COMMANDS
from tune_model.runtime.errors import TuneModelError


class UnverifiedError(TuneModelError):
    exit_code = 4


@pytest.fixture
def fake_tune(monkeypatch):
    """Register `tune` as a command that does what its second argument says, and records its arguments."""
    seen: list[tuple[str, ...]] = []

    @click.command("tune")
    @click.argument("words", nargs=-1)
    def command(words):
        seen.append(words)
        if words[-1] == "refuse":
            raise UnverifiedError("model.tuned: two\nlines")
        if words[-1] == "full":
            raise OSError(28, "No space left on device", "model.tuned/kernels")
        if words[-1] == "interrupt":
            raise KeyboardInterrupt
        if words[-1] == "partly":
            return 3
        return None

    monkeypatch.setitem(COMMANDS, "tune", "Tune.")
    find = cli.CommandGroup.get_command
    monkeypatch.setattr(
        cli.CommandGroup, "get_command", lambda self, ctx, name: command if name == "tune" else find(self, ctx, name)
    )
    return seen


def test_a_configuration_as_first_argument_means_tune(fake_tune):
    for first in ("model.yaml", "folder/model", "model.yml", "quickstart"):
        assert cli.run([first, "x"]) == 0
        assert cli.run(["tune", first, "x"]) == 0
        assert fake_tune[-2:] == [(first, "x"), (first, "x")]


def test_a_mistyped_command_is_not_taken_for_a_configuration(fake_tune, capsys):
    assert cli.run(["schma"]) == 2
    assert "No such command 'schma'" in capsys.readouterr().err
    assert not fake_tune


@pytest.mark.parametrize(
    ("ending", "code", "message"),
    [
        ("refuse", 4, "error: model.tuned: two lines\n"),
        ("full", 2, "error: model.tuned/kernels: No space left on device\n"),
        ("interrupt", 130, "interrupted\n"),
        ("partly", 3, ""),
    ],
)
def test_endings_are_one_line_and_a_documented_code(fake_tune, capsys, ending, code, message):
    assert cli.run(["model.yaml", ending]) == code
    assert capsys.readouterr().err.lstrip("\n") == message


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            MemoryError(),
            "error: out of memory: free some, take a device with more, or a smaller model, grid or batch\n",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB."), "batch (CUDA out of memory)\n"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9"), "out of memory: free"),
        (RecursionError("maximum recursion depth exceeded"), "error: something is nested too deeply, "),
    ],
)
def test_what_there_is_too_little_of_is_said_in_one_line(fake_tune, capsys, monkeypatch, error, message):
    """They ended as tracebacks."""

    def run_out(*_arguments, **_options):
        raise error

    monkeypatch.setattr(cli.group, "main", run_out)
    assert cli.run(["tune", "x.yaml"]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    with pytest.raises(type(error)):
        cli.run(["tune", "x.yaml", "--traceback"])


def test_a_mistake_of_the_program_keeps_its_traceback(monkeypatch):
    def fail(*_arguments, **_options):
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(cli.group, "main", fail)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        cli.run(["tune", "x.yaml"])


def test_a_traceback_on_request(fake_tune):
    with pytest.raises(UnverifiedError):
        cli.run(["--traceback", "model.yaml", "refuse"])


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_help_and_schema_of_the_installed_command(unbuffered: str):
    code = "from tune_model.pipeline.cli import main; main()"
    shown = {}
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}  # both streams are made differently then
    for arguments in (["--help"], ["schema"], ["schema", "--help"], ["--version"], []):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
        shown[" ".join(arguments)] = done.stdout
        assert done.returncode == (0 if arguments else 2), done.stderr
    for name in COMMANDS:
        assert f"  {name} " in shown["--help"]
    assert json.loads(shown["schema"])["$defs"]["Config"]
    assert shown["--version"].startswith("tune-model ")


def test_a_reader_that_leaves_early_is_no_error():
    code = "from tune_model.pipeline.cli import main; main(['schema'])"
    command = f'{sys.executable} -P -c "{code}" | head -c 1; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_that_teaches(name, capsys):
    assert cli.run([name, "--help"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 8


def test_a_command_ends_as_it_would_when_its_reader_has_left(tmp_path: Path):
    """`tune-model tune ... --json | head` ended the tune with exit code 1, and a gate's code was lost."""
    code = """
import sys, click
from tune_model.pipeline import cli
@cli.group.command("flood")
def flood():
    for number in range(20000):
        click.echo(f"line {number}")
        click.echo(f"line {number}", err=True)
    open(sys.argv[1], "w").close()
    return 5
cli.CommandGroup.get_command = lambda self, ctx, name: flood
cli.COMMANDS["flood"] = ""
cli.main(["flood"])
"""
    done_mark = tmp_path / "done"
    command = f"{sys.executable} -P - {done_mark} 2>&1 <<'E' | head -n 1; exit ${{PIPESTATUS[0]}}\n{code}\nE"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (5, "line 0\n", "")
    assert done_mark.exists()


def test_a_full_disk_behind_standard_output_is_one_line():
    code = "from tune_model.pipeline.cli import main; main(['schema'])"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stderr == "error: standard output or error: No space left on device\n"


def test_a_closed_standard_output_is_no_error():
    code = "from tune_model.pipeline.cli import main; main(['schema'])"
    command = f'{sys.executable} -P -c "{code}" >&-'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
