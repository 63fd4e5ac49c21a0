"""The example server under load: 64 clients that stream, every token judged."""

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.request import urlopen

import torch
from bench.run import Bench, attempt
from safetensors.torch import save_file
from torch import nn

from deployment.artifacts import tuned_artifact
from deployment.models import tiny_llama
from tune_model.package.read import open_artifact
from tune_model.package.verification.original import build_original

__all__ = ["run_server"]

CLIENTS: Final = 64
SECONDS: Final = 60
_EXAMPLES: Final = Path(__file__).resolve().parents[2] / "examples"
_RUN: Final = (
    "import sys, runpy; sys.path[:0] = {path!r}; del sys.argv[0]; runpy.run_path(sys.argv[0], None, '__main__')"
)


class _Row(NamedTuple):
    name: str


def run_server(bench: Bench, *, small: bool) -> None:
    """Serve tiny-llama on the CPU for a minute."""
    row = f"{CLIENTS} clients"
    if not bench.missing("server", [_Row(row)]):
        return
    seconds = 4 if small else SECONDS
    path = tuned_artifact(bench, tiny_llama())
    made = attempt(bench, "server", row, lambda: _measure(path, seconds))
    if made is not None:
        bench.tell(f"  server: {made['tokens_per_s']:.0f} tokens/s, {made['errors']} errors, {made['wrong']} wrong")


def _measure(path: Path, seconds: int) -> dict[str, Any]:
    original = build_original(open_artifact(path).manifest.request, None, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        save_file({k: v.contiguous() for k, v in original.state_dict().items()}, folder / "model.safetensors")
        answers = folder / "answers.json"
        answers.write_text(json.dumps(_answers(original)), encoding="utf-8")
        with _served(path, folder) as (process, port):
            load = [sys.executable, str(_EXAMPLES / "load_test.py"), "--port", str(port), "--expect", str(answers)]
            load += ["--clients", str(CLIENTS)]
            subprocess.run([*load, "--seconds", "3"], check=False, capture_output=True)  # plans and buffers are made
            before = _resident_bytes(process)
            done = subprocess.run([*load, "--seconds", str(seconds)], check=False, capture_output=True, text=True)
            after = _resident_bytes(process)
    return {**json.loads(done.stdout), "seconds": seconds, "resident_bytes": after, "grown_bytes": after - before}


def _answers(original: nn.Module) -> list[dict[str, list[int]]]:
    """Greedy answers of the original, one whole pass for each token."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for index in range(16):
        text = torch.randint(0, 1000, (1 + 3 * index,), generator=generator).tolist()
        start = len(text)
        with torch.no_grad():
            for _ in range(48):
                text.append(int(original(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        made.append({"prompt": text[:start], "answer": text[start:]})
    return made


@contextmanager
def _served(path: Path, weights: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = _RUN.format(path=[p for p in sys.path if p])
    script = str(_EXAMPLES / "fastapi_server.py")
    command = [sys.executable, "-c", code, script, str(path), "--weights", str(weights), "--device", "cpu"]
    process = subprocess.Popen([*command, "--port", str(port)])
    try:
        for _ in range(300):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with exit code {process.returncode}")
            try:
                urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            except OSError:
                time.sleep(0.1)
        yield process, port
    finally:
        process.terminate()
        process.wait(timeout=30)


def _resident_bytes(process: subprocess.Popen[bytes]) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
