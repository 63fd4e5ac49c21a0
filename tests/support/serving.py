"""The server example around a small Llama: in a thread of this process, where tests can let its model fail."""

import http.client
import importlib.util
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from small_models import LLAMA

from tune_model.extract.request import Phase, Request, TransformersSource
from tune_model.runtime.tuned import TunedModel

ROOT = Path(__file__).resolve().parent.parent.parent
SLOTS = 96
VOCABULARY = LLAMA["vocab_size"]
REQUEST = Request(
    source=TransformersSource(config=LLAMA),
    dtype="float32",
    task="causal-lm",
    phases=(
        Phase("prefill", {"batch": (1,), "sequence": (8, 16)}),
        Phase("decode", {"batch": (1, 8), "context": (16, 64)}),
    ),
    max_length=SLOTS,
    max_batch=16,
)


class Served(NamedTuple):
    """An artifact, a folder with its weights, and the model it was made of."""

    artifact: Path
    weights: Path
    original: torch.nn.Module


def example(name: str) -> ModuleType:
    """Import an example."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and annotations are looked up there
    spec.loader.exec_module(module)
    return module


def greedy(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    """Return the original's most likely tokens, one pass each."""
    text = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


class Answer(NamedTuple):
    """Of the server."""

    status: int
    body: str

    @property
    def detail(self) -> str:
        """Its one message."""
        found = json.loads(self.body)["detail"]
        assert isinstance(found, str)
        assert "\n" not in found
        return found

    @property
    def tokens(self) -> list[int]:
        """Of a completion, streamed or not."""
        if self.body.startswith("data: "):
            return [c["token"] for c in self.choices if "token" in c]
        return list(json.loads(self.body)["choices"][0]["tokens"])

    @property
    def choices(self) -> list[dict[str, Any]]:
        """What a stream's events say."""
        events = [line[6:] for line in self.body.splitlines() if line.startswith("data: {")]
        return [json.loads(event)["choices"][0] for event in events]


class Running(NamedTuple):
    """A server in this process."""

    engine: Any
    port: int

    def get(self, path: str, method: str = "GET") -> Answer:
        """Ask for a page."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(method, path)
        return _read(connection)

    def post(self, body: bytes) -> Answer:
        """Ask for a completion with these bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        return _read(connection)

    def complete(self, **ask: Any) -> Answer:
        """Ask for a completion."""
        return self.post(json.dumps(ask).encode())

    def begin(self, **ask: Any) -> socket.socket:
        """Ask for a completion and read nothing."""
        body = json.dumps(ask)
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        return connection

    def raw(self, data: bytes) -> str:
        """Send bytes; returns what comes back until the server closes or falls silent."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(data)
            return connection.recv(4096).decode(errors="replace")

    def at_rest(self) -> bool:
        """Wait until no request waits, runs or is owed an answer."""
        for _ in range(400):
            state = self.engine.scheduler.state()
            if state.running == state.waiting == 0 and self.engine.scheduler.idle and not self.engine._streams:
                return True
            time.sleep(0.025)
        return False


def _read(connection: http.client.HTTPConnection) -> Answer:
    answer = connection.getresponse()
    try:
        return Answer(answer.status, answer.read().decode())
    finally:
        connection.close()


@contextmanager
def running(module: ModuleType, tuned: TunedModel, rows: int | None = None, tokenizer: Any = None) -> Iterator[Running]:
    """Serve a model with the example's server until the block ends."""
    import uvicorn

    engine = module.Engine(tuned, rows)
    application = module.Service(engine, "llama", tokenizer).application()
    config = uvicorn.Config(application, port=0, log_level="critical", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        for _ in range(400):
            if server.started:
                break
            time.sleep(0.025)
        yield Running(engine, server.servers[0].sockets[0].getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        assert not thread.is_alive()
