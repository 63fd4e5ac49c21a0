from pathlib import Path

import pytest
import torch
import two_layers
from clean_process import run_in_clean_process
from safetensors.torch import save_file
from untuned import untuned

from tune_model.extract.plan import extract
from tune_model.extract.request import Phase, Request, TransformersSource
from tune_model.package.contents import ArtifactContents
from tune_model.package.verification.original import build_original
from tune_model.package.write import write_artifact

LOAD_AND_RUN = """
import torch
import tune_model
tuned = tune_model.load({artifact!r}, weights={weights!r})
for rows in (1, 2, 16):
    x = torch.linspace(-1, 1, rows * 8).reshape(rows, 8)
    print(tuned(x).double().sum().item())
assert tuned.coverage().totals()["miss"] == 0
"""


def expected() -> list[float]:
    return [float(two_layers.reference(torch.linspace(-1, 1, rows * 8).reshape(rows, 8)).sum()) for rows in (1, 2, 16)]


@pytest.mark.parametrize("path", ["a.tuned", "a.tuned/"])
def test_an_artifact_loads_and_runs_in_a_clean_process(tmp_path: Path, path: str):
    artifact = write_artifact(f"{tmp_path}/{path}", two_layers.contents())
    save_file(two_layers.weights(), tmp_path / "model.safetensors")
    code = LOAD_AND_RUN.format(artifact=str(artifact), weights=str(tmp_path / "model.safetensors"))
    done = run_in_clean_process(code)
    assert done.returncode == 0, done.stderr
    assert [float(line) for line in done.stdout.split()] == pytest.approx(expected(), rel=1e-5)


def test_embedded_weights_need_nothing_else(tmp_path: Path):
    artifact = write_artifact(tmp_path / "a.tuned", two_layers.contents(weights=two_layers.weights()))
    done = run_in_clean_process(LOAD_AND_RUN.format(artifact=str(artifact), weights=None))
    assert done.returncode == 0, done.stderr
    assert [float(line) for line in done.stdout.split()] == pytest.approx(expected(), rel=1e-5)


WATCHED = {
    "a child process": ("import subprocess; subprocess.run(['/bin/true'])", 97),
    "a shell": ("os.system('/bin/true')", 97),
    "a file for writing": ("open('/tmp/x', 'w')", 98),
    "Dynamo": ("sys.modules['torch._dynamo'] = sys", 1),
    "a tracer": ("import transformers", 1),
    "a child that Python does not see": (
        "import ctypes; pid = ctypes.CDLL(None).fork()\nif pid == 0: os._exit(0)\nos.waitpid(pid, 0)",
        1,
    ),
}


@pytest.mark.parametrize(("code", "exit_code"), WATCHED.values(), ids=WATCHED)
def test_the_watch_sees(code: str, exit_code: int):
    assert run_in_clean_process(code).returncode == exit_code


LLAMA = Request(
    source=TransformersSource(
        config={
            "model_type": "llama",
            "vocab_size": 97,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        }
    ),
    dtype="float32",
    task="causal-lm",
    phases=(
        Phase("prefill", {"batch": (1,), "sequence": (8,)}),
        Phase("decode", {"batch": (1, 2), "context": (16,)}),
    ),
    max_length=32,
    max_batch=2,
)

GENERATE = """
import tune_model
tuned = tune_model.load({artifact!r}, weights={weights!r})
for tokens in tuned.complete({prompts!r}, 12):
    print(*tokens)
assert tuned.coverage().totals()["miss"] == 0
"""


def greedy(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    """What the original model says next, one whole pass per token, no cache."""
    text = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


def test_a_language_model_generates_in_a_clean_process(tmp_path: Path):
    """Traced from transformers here, written, and continued there: token by token what the original says."""
    extraction = extract(LLAMA)
    contents = ArtifactContents("llama", LLAMA, untuned(extraction.plan), extraction.constants, "name: llama\n")
    artifact = write_artifact(tmp_path / "llama.tuned", contents)
    model = build_original(LLAMA, None, torch.device("cpu"))
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors"
    )
    prompts = [[5, 17, 3, 88, 41, 2, 9], [60, 1]]
    done = run_in_clean_process(
        GENERATE.format(artifact=str(artifact), weights=str(tmp_path / "model.safetensors"), prompts=prompts)
    )
    assert done.returncode == 0, done.stderr
    made = [[int(token) for token in line.split()] for line in done.stdout.splitlines()]
    assert made == [greedy(model, prompt, 12) for prompt in prompts]
