import json
from pathlib import Path

import msgspec
import pytest
import two_layers

from tune_model.package.read import open_parts
from tune_model.package.write import write_artifact
from tune_model.pipeline import cli
from tune_model.runtime.kernel import Kernel
from tune_model.tune.target import CudaTarget

H200 = CudaTarget(90, "NVIDIA H200", 132, 50 << 20, 232448, 65536, 140 << 30, 1980, "580", "13.0", "2.11", "3.6")


@pytest.fixture
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_artifact("cpu.tuned", two_layers.contents())
    tuning = two_layers.tuning(b"")
    choices = tuple(msgspec.structs.replace(c, kernel=Kernel(two_layers.FORM.body)) for c in tuning.choices)
    tuning = msgspec.structs.replace(tuning, choices=choices, target=H200, code={})
    write_artifact("h200.tuned", two_layers.contents(tuning=tuning))


@pytest.mark.usefixtures("artifacts")
def test_merge_lists_the_parts(capsys):
    assert cli.run(["merge", "cpu.tuned", "h200.tuned", "-o", "both.tuned"]) == 0
    shown = capsys.readouterr()
    assert shown.err == "wrote both.tuned (2 parts)\n"
    assert [line.split()[0] for line in shown.out.splitlines()] == ["sm_90", "cpu"]
    assert len(open_parts("both.tuned")) == 2


@pytest.mark.usefixtures("artifacts")
def test_other_commands_look_into_a_part(capsys):
    assert cli.run(["merge", "cpu.tuned", "h200.tuned", "-o", "both.tuned"]) == 0
    capsys.readouterr()
    assert cli.run(["inspect", "both.tuned"]) == 0
    assert "a bundle of 2 parts of two-layers" in capsys.readouterr().out
    assert cli.run(["inspect", "both.tuned", "--json"]) == 0
    assert next(f["target"] for f in json.loads(capsys.readouterr().out)) == "NVIDIA H200"
    assert cli.run(["inspect", "both.tuned", "--part", "sm_90"]) == 0
    assert "tuned on NVIDIA H200" in capsys.readouterr().out
    assert cli.run(["report", "both.tuned", "--part", "sm_90", "--format", "md", "-o", "-"]) == 0
    assert "# two-layers on NVIDIA H200" in capsys.readouterr().out
    # Without --part it is the one for this machine.
    assert cli.run(["report", "both.tuned", "--format", "md", "-o", "-"]) == 0
    assert f"# two-layers on {two_layers.target().name}" in capsys.readouterr().out.replace("\\", "")
    assert cli.run(["diff", "both.tuned", "h200.tuned", "--part", "sm_90"]) == 0


@pytest.mark.usefixtures("artifacts")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["merge", "cpu.tuned", "none.tuned", "-o", "x.tuned"], "none.tuned does not exist"),
        (["merge", "-o", "x.tuned"], "Missing argument"),
        (["merge", "cpu.tuned"], "Missing option"),
        (["report", "cpu.tuned", "--part", "sm_90"], "expected one of: cpu "),
    ],
)
def test_what_cannot_be_is_said(capsys, arguments: list[str], message: str):
    assert cli.run(arguments) == 2
    assert message in capsys.readouterr().err
    assert not Path("x.tuned").exists()
