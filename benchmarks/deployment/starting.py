"""From `load` to the first token in a fresh process with empty caches, the weights on the device already."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from bench.run import Bench, attempt
from torch import nn

from deployment.artifacts import tuned_artifact
from deployment.models import llama
from tune_model.package.read import open_artifact
from tune_model.package.verification.original import build_original
from tune_model.pipeline.bench.peers import release

__all__ = ["run_start"]

REPEATS: Final = 3

# A server's process: what starts a child ends it. Weights are made before the clock starts, imports are timed apart.
_PROCESS: Final = """
import json, os, sys, time
shapes, artifact, device, tokens = json.load(open(sys.argv[1])), sys.argv[2], sys.argv[3], int(sys.argv[4])
def forbid(event, _):
    if event in {"subprocess.Popen", "os.system", "os.fork", "os.exec", "os.posix_spawn"}:
        os._exit(97)
sys.addaudithook(forbid)
started = time.perf_counter()
import torch
import tune_model
tune_model.load
from tune_model.runtime.tuned import TunedModel
imported = time.perf_counter()
weights = {n: torch.empty(s, dtype=getattr(torch, d), device=device).normal_(0, 0.02) for n, (s, d) in shapes.items()}
if device != "cpu":
    torch.cuda.synchronize()
before = time.perf_counter()
tuned = tune_model.load(artifact, weights=weights, device=device)
loaded = time.perf_counter()
stream = tuned.generate([list(range(3, 3 + tokens))], max_new_tokens=8)
next(stream)
first = time.perf_counter()
next(stream)
second = time.perf_counter()
forbidden = [m for m in ("triton", "transformers", "torch._dynamo", "torch._inductor") if m in sys.modules]
print(json.dumps({
    "imports_s": imported - started, "load_s": loaded - before, "load_to_first_token_s": first - before,
    "second_token_s": second - first, "compilers_imported": len(forbidden),
}))
"""


class _Start(NamedTuple):
    name: str


def run_start(bench: Bench, *, small: bool) -> None:
    """Measure one start, three times."""
    from deployment.decoding import device_of

    if not bench.missing("load", [_Start("fresh process")]):
        return
    path = tuned_artifact(bench, llama(small=small))
    device = device_of(bench)

    def measure() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            shapes = Path(folder) / "shapes.json"
            original = build_original(open_artifact(path).manifest.request, None, device)
            shapes.write_text(json.dumps(_shapes(original)), encoding="utf-8")
            del original
            release(device)
            runs = [_once(path, shapes, device, 8 if small else 512) for _ in range(REPEATS)]
        return {key: statistics.median(run[key] for run in runs) for key in runs[0]}

    made = attempt(bench, "load", "fresh process", measure)
    if made is not None:
        bench.tell(f"  imports {made['imports_s']:.2f} s, load to first token {made['load_to_first_token_s']:.2f} s")


def _shapes(original: nn.Module) -> dict[str, Any]:
    return {n: (list(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in original.named_parameters()}


def _once(path: Path, shapes: Path, device: torch.device, tokens: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as caches:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHINDUCTOR", "TRITON", "XDG"))}
        environment |= {"XDG_CACHE_HOME": caches, "TRITON_CACHE_DIR": caches, "HOME": caches, "PATH": ""}
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        command = [sys.executable, "-c", _PROCESS, str(shapes), str(path), str(device), str(tokens)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))
