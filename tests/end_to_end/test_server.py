"""The server example: concurrent streaming clients get every token right, in bounded memory, and failures are said."""

import asyncio
import gc
import importlib.util
import json
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request as Ask
from urllib.request import urlopen

import pytest
import torch
from safetensors.torch import save_file
from untuned import untuned

import tune_model
from tune_model.extract.plan import extract
from tune_model.extract.request import Phase, Request, TransformersSource
from tune_model.package.contents import ArtifactContents
from tune_model.package.verification.original import build_original
from tune_model.package.write import write_artifact
from tune_model.runtime.generation.completion import Completion, Generation

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

ROOT = Path(__file__).resolve().parent.parent.parent
REQUEST = Request(
    source=TransformersSource(
        config={
            "model_type": "llama",
            "vocab_size": 1000,
            "hidden_size": 128,
            "intermediate_size": 352,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
        }
    ),
    dtype="float32",
    task="causal-lm",
    phases=(
        Phase("prefill", {"batch": (1,), "sequence": (8, 16)}),
        Phase("decode", {"batch": (1, 8), "context": (16, 64)}),
    ),
    max_length=96,
    max_batch=16,
)
ANSWER = 32


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and annotations are looked up there
    spec.loader.exec_module(module)
    return module


class Served(NamedTuple):
    artifact: Path
    weights: Path
    original: torch.nn.Module


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("served")
    found = extract(REQUEST, check=False)
    contents = ArtifactContents("llama", REQUEST, untuned(found.plan), found.constants, "name: llama\n")
    original = build_original(REQUEST, None, torch.device("cpu"))
    save_file({k: v.contiguous() for k, v in original.state_dict().items()}, folder / "model.safetensors")
    return Served(write_artifact(folder / "llama.tuned", contents), folder, original)


def greedy(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


class Server(NamedTuple):
    process: subprocess.Popen[str]
    port: int

    def get(self, path: str) -> str:
        with urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return str(answer.read().decode())

    def complete(self, **ask: Any) -> dict[str, Any]:
        body = json.dumps(ask).encode()
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        with urlopen(Ask(url, body, {"Content-Type": "application/json"}), timeout=120) as answer:
            return dict(json.loads(answer.read()))

    def metric(self, name: str) -> int:
        lines = (line.split() for line in self.get("/metrics").splitlines())
        return next(int(value) for key, value in lines if key == f"tune_model_{name}")

    def resident_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return next(int(s.split()[1]) for s in status.splitlines() if s.startswith("VmRSS")) / 1024


@pytest.fixture(scope="module")
def server(served: Served) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = [p for p in sys.path if p]
    script = ROOT / "examples" / "fastapi_server.py"
    code = f"import sys, runpy; sys.path[:0] = {path!r}; del sys.argv[0]; runpy.run_path(sys.argv[0], None, '__main__')"
    command = [sys.executable, "-c", code, script, served.artifact, "--weights", served.weights, "--port", port]
    process = subprocess.Popen(
        [str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    running = Server(process, port)
    try:
        for _ in range(1200):
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            try:
                running.get("/health")
                break
            except OSError:
                time.sleep(0.1)
        yield running
    finally:
        process.terminate()
        process.wait(timeout=60)


def put_under_load(served: Served, server: Server, tmp_path: Path, *amount: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 1000, (1 + 3 * i,), generator=generator).tolist() for i in range(16)]
    answers = [{"prompt": p, "answer": greedy(served.original, p, ANSWER)} for p in prompts]
    (tmp_path / "answers.json").write_text(json.dumps(answers), encoding="utf-8")
    options = ("--port", str(server.port), "--expect", str(tmp_path / "answers.json"))
    command = [sys.executable, str(ROOT / "examples" / "load_test.py"), *options]
    subprocess.run([*command, "--requests", "1"], check=True, stdout=subprocess.DEVNULL)  # plans and buffers are made
    before = server.resident_mb()
    done = subprocess.run([*command, *amount], check=False, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return {**json.loads(done.stdout), "grown_mb": server.resident_mb() - before}


def test_streaming_clients_get_every_token_right(served: Served, server: Server, tmp_path: Path):
    """64 clients over 16 rows; every answer is compared with what the original says, one pass a token."""
    outcome = put_under_load(served, server, tmp_path, "--requests", "2")
    assert (outcome["errors"], outcome["wrong"]) == (0, 0)
    assert outcome["requests"] == 64 * 2
    assert outcome["grown_mb"] < 300
    assert server.metric("requests_waiting") == server.metric("rows_running") == 0


@pytest.mark.slow
def test_a_minute_under_load(served: Served, server: Server, tmp_path: Path):
    outcome = put_under_load(served, server, tmp_path, "--seconds", "60")
    assert (outcome["errors"], outcome["wrong"]) == (0, 0)
    assert outcome["grown_mb"] < 60


def test_answers_leave_nothing_behind(served: Served):
    """What is alive after some answers is alive after many, to the tensor; resident memory says less than that."""
    scheduler = tune_model.load(served.artifact, weights=served.original).scheduler(4)

    def answer(count: int) -> Counter[str]:
        waiting = [scheduler.submit([1, 2, 3 + i % 5], Generation(max_new_tokens=1 + i % 4)) for i in range(count)]
        while not scheduler.idle:
            scheduler.step()
        assert all(completion.finish == "length" for completion in waiting)
        del waiting
        gc.collect()
        kinds = (type(o) for o in gc.get_objects())
        return Counter(kind.__name__ for kind in kinds if issubclass(kind, torch.Tensor | Completion))

    answer(30)
    before = answer(30)
    assert answer(90) == before
    assert before["Completion"] == 0


def test_answers_in_one_piece_with_sampling(served: Served, server: Server):
    prompt = [5, 17, 3]
    answer = server.complete(prompt=prompt, max_tokens=6)
    (choice,) = answer["choices"]
    assert choice["tokens"] == greedy(served.original, prompt, 6)
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 6)
    stop = choice["tokens"][2]
    stopped = server.complete(prompt=prompt, max_tokens=6, stop_token_ids=[stop])["choices"][0]
    assert stopped["finish_reason"] == "eos"
    assert stopped["tokens"] == choice["tokens"][: choice["tokens"].index(stop) + 1]
    drawn = [server.complete(prompt=prompt, max_tokens=8, temperature=1.5, top_p=0.9, seed=4) for _ in range(2)]
    assert drawn[0]["choices"] == drawn[1]["choices"]


@pytest.mark.parametrize(
    ("ask", "status", "message"),
    [
        ({"prompt": [1], "max_tokens": 500}, 400, "the cache holds 96 per row"),
        ({"prompt": []}, 400, "expected at least one token"),
        ({"prompt": [1], "top_p": 3}, 400, "top_p is 3"),
        ({"prompt": "text"}, 400, "no tokenizer"),
        ({"max_tokens": 2}, 422, "prompt"),
    ],
)
def test_bad_requests_are_answered_with_what_is_wrong(server: Server, ask: dict[str, Any], status: int, message: str):
    with pytest.raises(HTTPError) as caught:
        server.complete(**ask)
    assert caught.value.code == status
    assert message in caught.value.read().decode()


def test_clients_that_go_away_leave_their_rows(server: Server):
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            body = json.dumps({"prompt": [1, 2], "max_tokens": 90, "stream": True})
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            connection.recv(100)
    for _ in range(1200):
        if server.metric("rows_running") == 0:
            break
        time.sleep(0.05)
    assert server.metric("rows_running") == 0
    assert json.loads(server.get("/health"))["alive"] is True


def test_a_model_that_fails_is_said_to_every_client(served: Served, monkeypatch: pytest.MonkeyPatch):
    """The model's thread dies in the middle of an answer: the stream ends with `error`, health turns to 503."""
    module = example("fastapi_server")
    engine = module.Engine(tune_model.load(served.artifact, weights=served.original), None)
    service = module.Service(engine, "llama")
    step, steps = engine.scheduler.step, []

    def fail() -> Any:
        steps.append(1)
        if len(steps) > 3:
            raise RuntimeError("out of luck")
        return step()

    monkeypatch.setattr(engine.scheduler, "step", fail)

    async def talk() -> tuple[list[str], int, int]:
        engine.start()
        answer = await service.complete(module.Ask(prompt=[1, 2], max_tokens=20, stream=True))
        events = [event async for event in answer.body_iterator]
        with pytest.raises(module.HTTPException) as refused:
            await service.complete(module.Ask(prompt=[1, 2]))
        return events, (await service.health()).status_code, refused.value.status_code

    events, health, refused = asyncio.run(talk())
    assert '"finish_reason": "error"' in events[-2]
    assert (health, refused) == (503, 503)
