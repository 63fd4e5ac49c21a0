"""`tune-model plan`: needs neither a GPU nor weights, whatever the target."""

import json
from pathlib import Path

import pytest
import torch

from tune_model.pipeline import cli

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
SMALL = ("--set", "workload.prefill.sequence=[8]", "--set", "workload.decode.batch=[1]")


@needs_no_gpu
def test_a_plan_for_cuda_needs_no_gpu_and_says_what_it_assumed(capsys):
    """The shipped configurations say `target: cuda`; planning one without a GPU used to be refused."""
    assert cli.run(["plan", "tiny-llama.yaml", "--set", "target=cuda", *SMALL, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["target"] == "NVIDIA H200"
    assert any("no NVIDIA GPU here" in note for note in document["notes"])
    matmuls = [task for task in document["tasks"] if task["kind"] == "matmul"]
    assert matmuls
    assert all(task["candidates"] > 1 for task in matmuls)


def test_a_plan_shows_tasks_and_an_estimate(capsys):
    assert cli.run(["plan", "tiny-llama.yaml", "--set", "target=cpu", *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "regions of" in shown
    assert "to tune for" in shown
    assert "matmul 1x128x704" in shown
    assert "races too" not in shown


def test_effort_says_what_competes(capsys):
    """At thorough decode has three other groupings and prefill one, together and alone."""
    asked = ["plan", "tiny-llama.yaml", "--set", "target=cpu", *SMALL, "--effort"]
    assert cli.run([*asked, "balanced"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "races too: decode: rotary embedding within the attention (1 task more)" in shown
    assert cli.run([*asked, "thorough", "--json"]) == 0
    rivals = json.loads(capsys.readouterr().out)["rivals"]
    assert len(rivals) == 7
    assert [label.rpartition(" + ")[2] for label in rivals[0]["tasks"]] == ["rotary embedding"]


def test_what_a_model_prints_is_not_in_the_way_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Lines of the model's own code came before the JSON document, on the same stream."""
    (tmp_path / "talkative_model.py").write_text(
        "import torch\n"
        "class Talkative(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        print('forward')\n"
        "        return x.relu()\n"
        "def build():\n"
        "    print('built')\n"
        "    return Talkative()\n"
    )
    (tmp_path / "talkative.yaml").write_text(
        "name: talkative\n"
        "model: {source: torch, factory: 'talkative_model:build', path: ., inputs: [{name: x, shape: [batch, 4]}]}\n"
        "task: forward\ndtype: float32\ntarget: cpu\nworkload: {forward: {batch: [2]}}\n"
    )
    assert cli.run(["plan", str(tmp_path / "talkative.yaml"), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["programs"][0]["name"] == "forward"
    assert "built" in printed.err


class Gated(torch.nn.Module):
    """Floating-point and integer inputs; one output is None."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, on: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.relu(self.layer(x)) * on[:, None], None


SAVED = """
name: saved
model:
  source: pt2
  path: saved.pt2
  inputs: [{name: x, shape: [batch, 8]}, {name: on, shape: [batch]}]
task: forward
workload: {forward: {batch: [1, 4]}}
target: cpu
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_saved_program_needs_no_dtypes(tmp_path: Path, capsys, dtype: torch.dtype):
    """bfloat16 was asked of all its inputs, integers too, unless the configuration said otherwise."""
    example = (torch.ones(3, 8, dtype=dtype), torch.ones(3, dtype=torch.int64))
    dynamic_shapes = ({0: torch.export.Dim.AUTO}, {0: torch.export.Dim.AUTO})
    program = torch.export.export(Gated().to(dtype).eval(), example, dynamic_shapes=dynamic_shapes)
    torch.export.save(program, tmp_path / "saved.pt2")
    config = tmp_path / "saved.yaml"
    config.write_text(SAVED, encoding="utf-8")
    name = str(dtype).removeprefix("torch.")
    for given in ((), ("--set", f"dtype={name}")):
        assert cli.run(["plan", str(config), *given, "--json"]) == 0
        notes = json.loads(capsys.readouterr().out)["notes"]
        assert any(f"compared with the eager model in {name}: 2 outputs" in note for note in notes)
    assert cli.run(["plan", str(config), "--set", "dtype=float16"]) == 2
    assert f"$.dtype: is float16; expected {name}, which" in capsys.readouterr().err
