"""The server example: concurrent streaming clients get every token right, in bounded memory, and failures are said."""

import gc
import json
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request as Ask
from urllib.request import urlopen

import pytest
import torch
from serving import ROOT, Served, greedy

import tune_model
from tune_model.runtime.generation.completion import Completion, Generation

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

ANSWER = 32


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
