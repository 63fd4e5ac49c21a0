"""The main job on a GPU: tune, verify, tune again for nothing, and serve from a process that could not compile."""

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from clean_process import run_in_clean_process
from safetensors.torch import save_file

import tune_model
from tune_model.package.read import open_artifact
from tune_model.package.verification.original import build_original
from tune_model.runtime.generation.completion import Generation
from tune_model.runtime.generation.sampling import Sampling

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

    serve_many(first, model, prompts)
    answer_generate(first, model)


def serve_many(artifact: Path, model: torch.nn.Module, prompts: list[list[int]]) -> None:
    """Rows join and leave under graphs; other weights take effect in graphs that are there already."""
    tuned = tune_model.load(artifact, weights=model)
    scheduler = tuned.scheduler()
    scheduler.warm_up([Sampling(), Sampling(temperature=1.0, top_p=0.9)])
    many = prompts * 3
    asked = [scheduler.submit(p, Generation(4 + 5 * i)) for i, p in enumerate(many)]
    drawn = scheduler.submit(prompts[0], Generation(20, sampling=Sampling(temperature=2.0, top_p=0.9, seed=3)))
    while not scheduler.idle:
        scheduler.step()
    for completion, prompt in zip(asked, many, strict=True):
        assert completion.tokens == greedy(model, prompt, len(completion.tokens))
    alone = [Sampling(temperature=2.0, top_p=0.9, seed=3)]
    assert tuned.complete([prompts[0]], 20, sampling=alone) == [drawn.tokens]

    graphs = scheduler.state().graphs
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    tuned.reload_weights(other.state_dict())
    again = scheduler.submit(prompts[0], Generation(20))
    while not scheduler.idle:
        scheduler.step()
    assert again.tokens == greedy(other, prompts[0], 20)
    assert again.tokens != greedy(model, prompts[0], 20)
    assert graphs >= 2


def answer_generate(artifact: Path, model: torch.nn.Module) -> None:
    """transformers' own `generate`, before and after, in memory that is not doubled."""
    ids = torch.randint(3, 900, (2, 9), device="cuda")
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 24}
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    expected = [model.generate(ids, **options), model.generate(ids * mask, attention_mask=mask, **options)]
    attached = tune_model.attach(model, artifact)
    for _ in range(2):
        made = [model.generate(ids, **options), model.generate(ids * mask, attention_mask=mask, **options)]
        assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))
    assert (attached.answered, attached.unmatched()) == (4 * 24, {})
    assert attached.tuned.shared_memory().copied == ()
