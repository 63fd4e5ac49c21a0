"""The main job on a GPU: tune, verify, tune again for nothing, and serve from a process that could not compile."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from clean_process import run_in_clean_process
from safetensors.torch import save_file

from tune_model.package.read import open_artifact
from tune_model.package.verification.original import build_original

pytestmark = pytest.mark.gpu

MAIN = "import sys; from tune_model.pipeline.cli import main; main(sys.argv[1:])"

GENERATE = """
import tune_model
tuned = tune_model.load({artifact!r}, weights={weights!r})
for tokens in tuned.complete({prompts!r}, 24):
    print(*tokens)
"""


def command(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *arguments], capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def greedy(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids = torch.tensor([text], device="cuda")
            text.append(int(model(ids, use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.timeout(600)
def test_the_main_job(tmp_path: Path):
    first, second = tmp_path / "first.tuned", tmp_path / "second.tuned"
    options = ("--set", "target=cuda", "--effort", "quick", "--records", str(tmp_path / "records"))
    command("tune", "tiny-llama.yaml", *options, "-o", str(first))
    command("verify", str(first))
    again = command("tune", "tiny-llama.yaml", *options, "-o", str(second))
    assert re.search(r"\b0 builds, 0 measurements\b", again), again
    assert first.read_bytes() == second.read_bytes()

    model = build_original(open_artifact(first).manifest.request, None, torch.device("cuda"))
    state = {name: tensor.contiguous().cpu() for name, tensor in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    prompts = [[5, 17, 3, 88, 41, 2, 9], [60, 1]]
    code = GENERATE.format(artifact=str(first), weights=str(tmp_path / "model.safetensors"), prompts=prompts)
    done = run_in_clean_process(code)
    assert done.returncode == 0, done.stderr
    made = [[int(token) for token in line.split()] for line in done.stdout.splitlines()]
    assert made == [greedy(model, prompt, 24) for prompt in prompts]
