"""Runs the command in this process and holds it to what every refusal promises."""

from pathlib import Path

import pytest

from tune_model.pipeline import cli

Tree = dict[str, bytes | None]


def tree(folder: Path) -> Tree:
    """What lies in a folder: files with their bytes, folders, links and devices without."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() and not path.is_symlink() else None
        for path in folder.rglob("*")
    }


def refusal(arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str], *, code: int = 2) -> str:
    """Run a command that has to refuse, and return its error without `error: `.

    One error line, no traceback, nothing on standard output, and `folder` is afterwards what it was before.
    """
    before = tree(folder)
    capsys.readouterr()
    assert cli.run(arguments) == code
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    errors = [line for line in lines if line.lower().startswith("error")]
    assert len(errors) == 1, shown.err
    assert lines[-1] == errors[0], shown.err
    assert "Traceback" not in shown.err
    assert not shown.out
    assert tree(folder) == before
    return errors[0].removeprefix("error: ")
