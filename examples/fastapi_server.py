r"""A completion server over one tuned language model: concurrent requests share steps, tokens stream as they are made.

    pip install "tune-model[serve]"
    python examples/fastapi_server.py llama-3-8b.tuned --weights ./Meta-Llama-3-8B --rows 64 --port 8000

    curl -N localhost:8000/v1/completions -H 'content-type: application/json' \
        -d '{"prompt": [128000, 9906], "max_tokens": 32, "stream": true}'

Prompts are token numbers, or text with `--tokenizer tokenizer.json`. `/health` answers 503 once the model's thread has
died; `/metrics` is Prometheus text. One process serves one model on one device. Serving needs torch, fastapi and
uvicorn: no compiler, no Triton, no transformers. `examples/load_test.py` puts it under load.
"""

import argparse
import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel, Field

import tune_model
from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.generation.completion import Completion, Generation
from tune_model.runtime.tuned import TunedModel

WAITING_AT_MOST = 1024
"""Requests that wait for a row; more are refused with 503, so memory stays bounded and clients can go elsewhere."""

KINDS_OF_SAMPLING = (tune_model.Sampling(), tune_model.Sampling(temperature=1.0, top_p=0.9))
"""What graphs are captured for before the first request; others are captured when they come up."""


class Ask(BaseModel):
    """A request for a completion."""

    prompt: list[Annotated[int, Field(ge=0)]] | str
    max_tokens: int = Field(16, ge=1)
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_token_ids: list[int] = []
    stream: bool = False


class Engine:
    """The thread that runs the model, and the streams of its answers.

    Requests come from the event loop, and tokens go back to it, all of a step in one go.
    """

    def __init__(self, tuned: TunedModel, rows: int | None) -> None:
        self.tuned = tuned
        self.scheduler = tuned.scheduler(rows)
        self.failure: BaseException | None = None
        self.requests = self.refused = 0
        self._streams: dict[int, asyncio.Queue[int | None]] = {}
        self._work = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Capture what steps need and begin to work for the running event loop."""
        self.scheduler.warm_up(KINDS_OF_SAMPLING)
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(loop,), name="model", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End after the step that runs."""
        self._stopping = True
        self._work.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether requests are answered."""
        return self._thread is not None and self._thread.is_alive() and self.failure is None

    def submit(self, prompt: list[int], generation: Generation) -> tuple[Completion, "asyncio.Queue[int | None]"]:
        """Queue a prompt; its tokens arrive in the queue, and `None` after the last.

        Raises:
            HTTPException: The server is full, or the prompt does not fit.
        """
        self.requests += 1
        if not self.alive or self.scheduler.state().waiting >= WAITING_AT_MOST:
            self.refused += 1
            raise HTTPException(503, "the model has stopped" if not self.alive else "too many requests wait")
        try:
            completion = self.scheduler.submit(prompt, generation)
        except TuneModelError as error:
            raise HTTPException(400, str(error)) from error
        stream: asyncio.Queue[int | None] = asyncio.Queue()
        self._streams[id(completion)] = stream
        self._work.set()
        return completion, stream

    def leave(self, completion: Completion) -> None:
        """Forget a request, and end it if it still runs."""
        self._streams.pop(id(completion), None)
        self.scheduler.cancel([completion])
        self._work.set()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while not self._stopping:
                self._work.clear()
                if self.scheduler.idle:
                    self._work.wait(timeout=1.0)
                    continue
                made = self.scheduler.step()
                if made:
                    complete = {id(c) for c, _ in made if c.finish is not None}
                    loop.call_soon_threadsafe(self._deliver, made, complete)
        except Exception as error:  # whatever it is, every client must hear of it
            self.failure = error
            logging.getLogger("uvicorn.error").critical("the model has stopped", exc_info=error)
            loop.call_soon_threadsafe(self._end_all)

    def _deliver(self, made: list[tuple[Completion, int]], complete: set[int]) -> None:
        for completion, token in made:
            if (stream := self._streams.get(id(completion))) is not None:
                stream.put_nowait(token)
        for key in complete:
            if (stream := self._streams.pop(key, None)) is not None:
                stream.put_nowait(None)

    def _end_all(self) -> None:
        for stream in self._streams.values():
            stream.put_nowait(None)


class Text:
    """Turns tokens into text as they come, for a tokenizer; nothing without one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._said = 0

    def add(self, token: int) -> str:
        """Return what a token adds; characters that are not complete yet come with a later one."""
        if self._tokenizer is None:
            return ""
        self._tokens.append(token)
        text: str = self._tokenizer.decode(self._tokens)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        added = text[self._said :]
        self._said = len(text)
        return added


class Service:
    """The routes.

    Args:
        engine: Answers.
        name: Of the model.
        tokenizer: For text; `None` where prompts are token numbers.
    """

    def __init__(self, engine: Engine, name: str, tokenizer: Any = None) -> None:
        self._engine = engine
        self._name = name
        self._tokenizer = tokenizer

    def application(self) -> FastAPI:
        """Make the application."""

        @asynccontextmanager
        async def life(_: FastAPI) -> AsyncIterator[None]:
            self._engine.start()
            yield
            self._engine.stop()

        app = FastAPI(title="tune-model", lifespan=life)
        app.add_api_route("/v1/completions", self.complete, methods=["POST"], response_model=None)
        app.add_api_route("/health", self.health, response_model=None)
        app.add_api_route("/metrics", self.metrics, response_model=None)
        return app

    async def complete(self, ask: Ask) -> Any:
        """Complete a prompt."""
        try:
            penalty = ask.repetition_penalty
            sampling = tune_model.Sampling(ask.temperature, ask.top_k, ask.top_p, ask.seed, repetition_penalty=penalty)
            generation = Generation(ask.max_tokens, frozenset(ask.stop_token_ids), sampling)
        except TuneModelError as error:
            raise HTTPException(400, str(error)) from error
        prompt = self._encode(ask.prompt)
        completion, stream = self._engine.submit(prompt, generation)
        answer = self._answer(completion, stream)
        if ask.stream:
            return StreamingResponse(self._events(completion, answer), media_type="text/event-stream")
        chunks = [chunk async for chunk in answer]
        if completion.finish not in {"eos", "length"}:
            raise HTTPException(500, f"the model has stopped: {self._engine.failure!r}")
        choice = {"index": 0, "finish_reason": completion.finish, "tokens": [token for token, _ in chunks]}
        choice["text"] = "".join(text for _, text in chunks)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(chunks)}
        return {"object": "text_completion", "model": self._name, "choices": [choice], "usage": usage}

    async def health(self) -> JSONResponse:
        """Say whether requests are answered."""
        alive = self._engine.alive
        return JSONResponse({"alive": alive, "model": self._name}, status_code=200 if alive else 503)

    async def metrics(self) -> PlainTextResponse:
        """Return all counters."""
        return PlainTextResponse(metrics_text(self._engine))

    def _encode(self, prompt: list[int] | str) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        if self._tokenizer is None:
            raise HTTPException(400, "the server has no tokenizer; expected a list of token numbers")
        ids: list[int] = self._tokenizer.encode(prompt).ids
        return ids

    async def _answer(
        self, completion: Completion, stream: "asyncio.Queue[int | None]"
    ) -> AsyncIterator[tuple[int, str]]:
        text = Text(self._tokenizer)
        try:
            while (token := await stream.get()) is not None:
                yield token, text.add(token)
        finally:  # also when the client has gone away
            self._engine.leave(completion)

    async def _events(self, completion: Completion, answer: AsyncIterator[tuple[int, str]]) -> AsyncIterator[str]:
        async for token, text in answer:
            yield self._event({"index": 0, "token": token, "text": text, "finish_reason": None})
        reason = completion.finish if completion.finish in {"eos", "length"} else "error"
        yield self._event({"index": 0, "finish_reason": reason})
        yield "data: [DONE]\n\n"

    def _event(self, choice: dict[str, object]) -> str:
        return f"data: {json.dumps({'model': self._name, 'choices': [choice]})}\n\n"


def metrics_text(engine: Engine) -> str:
    """Return the counters in Prometheus' text format."""
    state = engine.scheduler.state()
    calls = engine.tuned.coverage().totals()
    lines = [
        f"tune_model_requests_total {engine.requests}",
        f"tune_model_requests_refused_total {engine.refused}",
        f"tune_model_requests_completed_total {state.completed}",
        f"tune_model_requests_waiting {state.waiting}",
        f"tune_model_rows_running {state.running}",
        f"tune_model_rows {state.rows}",
        f"tune_model_prompt_tokens_total {state.prompt_tokens}",
        f"tune_model_new_tokens_total {state.new_tokens}",
        f"tune_model_steps_total {state.steps}",
        f"tune_model_step_graphs {state.graphs}",
        f"tune_model_cache_bytes {state.cache_bytes}",
        # Kernels that ran: tuned at these very sizes, at near ones, or not tuned (torch's own operators).
        *(f'tune_model_kernel_calls_total{{outcome="{outcome}"}} {count}' for outcome, count in calls.items()),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Load the model and serve it."""
    parser = argparse.ArgumentParser(description="Serve completions from a tuned artifact.")
    parser.add_argument("artifact")
    parser.add_argument("--weights", help="folder of safetensors; not needed where they are in the artifact")
    parser.add_argument("--device", help="cuda:1, cpu; by default the first of the kind it was tuned for")
    parser.add_argument("--rows", type=int, help="requests that run at the same time; by default all that fit")
    parser.add_argument("--tokenizer", help="a tokenizer.json, for prompts and answers in text")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    tokenizer = None
    if arguments.tokenizer:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(arguments.tokenizer)
    started = time.perf_counter()
    tuned = tune_model.load(arguments.artifact, weights=arguments.weights, device=arguments.device)
    print(f"loaded {arguments.artifact} in {time.perf_counter() - started:.2f} s", flush=True)
    service = Service(Engine(tuned, arguments.rows), arguments.artifact, tokenizer)
    uvicorn.run(service.application(), host=arguments.host, port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
