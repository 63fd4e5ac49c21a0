r"""A completion server over one tuned language model: concurrent requests share steps, tokens stream as they are made.

    pip install "tune-model[serve]"
    python examples/fastapi_server.py llama-3-8b.tuned --weights ./Meta-Llama-3-8B --rows 64 --port 8000

    curl -N localhost:8000/v1/completions -H 'content-type: application/json' \
        -d '{"prompt": [128000, 9906], "max_tokens": 32, "stream": true}'

Prompts are token numbers, or text with `--tokenizer tokenizer.json`. What is wrong with a request is its answer alone:
422 for what is no request, 400 for one that does not fit the model, 413 and 408 for bodies without end, 503 when too
many wait. A request that fails in the model is answered with 500, and the others go on; `/health` answers 503 once the
device no longer does, and somebody has to start the process again. `/metrics` is Prometheus text. One process serves
one model on one device. Serving needs torch, fastapi and uvicorn: no compiler, no Triton, no transformers.
`examples/load_test.py` puts it under load.
"""

import argparse
import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

import tune_model
from tune_model import Completion, CompletionFailedError, Generation, TunedModel, TuneModelError

LOG = logging.getLogger("uvicorn.error")

WAITING_AT_MOST = 1024
"""Requests that wait for a row; more are refused with 503, so memory stays bounded and clients can go elsewhere."""

KINDS_OF_SAMPLING = (tune_model.Sampling(), tune_model.Sampling(temperature=1.0, top_p=0.9))
"""What graphs are captured for before the first request; others are captured when they come up."""


BODY_BYTES_AT_MOST = 8 << 20
"""A prompt of 128 k token numbers takes one megabyte."""

BODY_SECONDS_AT_MOST = 30.0

STEPS_TRIED = 3
"""Steps of all rows that fail one after the other before the requests in the rows are given up."""

PAUSE_S = 0.05
"""Between two of them: memory that ran out may come back."""


class Ask(BaseModel):
    """A request for a completion. Numbers are what they are: no text, no `true`, no fractions of tokens."""

    model_config = ConfigDict(strict=True)

    prompt: list[int] | str
    max_tokens: int = Field(16, ge=1, le=2**31)
    temperature: float = 0.0
    top_k: int = Field(0, ge=0, le=2**31)
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = Field(0, ge=-(2**63), lt=2**63)
    stop_token_ids: list[int] = []
    stream: bool = False


async def read_ask(request: Request) -> Ask:
    """Read a request's body.

    Raises:
        HTTPException: It is too long, takes too long, or is no `Ask`.
    """
    body = bytearray()
    too_long = HTTPException(413, f"the body is too long; expected at most {BODY_BYTES_AT_MOST} bytes")
    if len(declared := request.headers.get("content-length", "0")) > 15 or int(declared) > BODY_BYTES_AT_MOST:
        raise too_long
    try:
        async with asyncio.timeout(BODY_SECONDS_AT_MOST):
            async for part in request.stream():
                body += part
                if len(body) > BODY_BYTES_AT_MOST:
                    raise too_long
    except TimeoutError:
        raise HTTPException(408, f"the body has not come within {BODY_SECONDS_AT_MOST:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the body ended early") from None
    try:
        return Ask.model_validate_json(bytes(body))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"] if not str(part).startswith("list["))
        raise HTTPException(422, f"{place or 'the body'}: {first['msg']}"[:500]) from None


def failure_text(error: BaseException | None) -> str:
    """Say in one line what went wrong."""
    return "it was ended" if error is None else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:300]


class Engine:
    """The thread that runs the model, and the streams of its answers.

    Requests come from the event loop, and tokens go back to it, all of a step in one go. A prompt that fails ends its
    own request; a step that fails is repeated, and after `STEPS_TRIED` times the requests in the rows are given up. The
    thread ends only when the device does not answer: after an illegal access CUDA gives up the context for good.
    """

    def __init__(self, tuned: TunedModel, rows: int | None) -> None:
        self.tuned = tuned
        self.scheduler = tuned.scheduler(rows)
        self.failure: BaseException | None = None
        self.requests = self.refused = self.failed_steps = 0
        self._probe = torch.zeros(1, device=tuned.device)
        self._streams: dict[int, tuple[Completion, asyncio.Queue[int | None]]] = {}
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
        self._streams[id(completion)] = completion, stream
        self._work.set()
        return completion, stream

    def leave(self, completion: Completion) -> None:
        """Forget a request, and end it if it still runs."""
        self._streams.pop(id(completion), None)
        self.scheduler.cancel([completion])
        self._work.set()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        failures = 0
        while not self._stopping:
            self._work.clear()
            if self.scheduler.idle:
                self._work.wait(timeout=1.0)
                continue
            try:
                made = self.scheduler.step()
            except Exception as error:  # whatever it is, those whom it concerns must hear of it, and the others go on
                LOG.exception("a step failed")
                failures = 0 if isinstance(error, CompletionFailedError) else failures + 1
                if not self._mend(error, failures):
                    self.failure = error.with_traceback(None)  # what its frames hold may go
                    LOG.critical("the model has stopped: the device does not answer")
                    loop.call_soon_threadsafe(self._end_all)
                    return
                loop.call_soon_threadsafe(self._end_failed)
                continue
            failures = 0
            if made:
                complete = {id(c) for c, _ in made if c.finish is not None}
                loop.call_soon_threadsafe(self._deliver, made, complete)

    def _mend(self, error: Exception, failures: int) -> bool:
        """Make ready for the next step after one that failed; false when there can be none."""
        try:
            self._probe.item()
        except RuntimeError:
            return False
        if isinstance(error, CompletionFailedError):
            return True
        self.failed_steps += 1
        if failures % STEPS_TRIED == 0:
            try:
                self.scheduler.abort(error)
            except RuntimeError:
                LOG.exception("rows could not be freed yet")
        time.sleep(PAUSE_S)
        return True

    def _deliver(self, made: list[tuple[Completion, int]], complete: set[int]) -> None:
        for completion, token in made:
            if id(completion) in self._streams:
                self._streams[id(completion)][1].put_nowait(token)
        for key in complete:
            if key in self._streams:
                self._streams.pop(key)[1].put_nowait(None)

    def _end_failed(self) -> None:
        for key in [key for key, (completion, _) in self._streams.items() if completion.finish == "error"]:
            self._streams.pop(key)[1].put_nowait(None)

    def _end_all(self) -> None:
        for completion, stream in self._streams.values():
            if self.failure is not None:
                completion.fail(self.failure)
            stream.put_nowait(None)
        self._streams.clear()


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


class Events(StreamingResponse):
    """Server-sent events of one request, which is over when they are, or when the client has gone away."""

    def __init__(self, events: AsyncIterator[str], leave: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        try:
            await super().__call__(scope, receive, send)
        finally:  # an iterator that nobody has begun to read would not notice
            self._leave()


async def until_gone(request: Request) -> None:
    """Wait for the client to go away; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
        body = {"required": True, "content": {"application/json": {"schema": Ask.model_json_schema()}}}
        described = {"requestBody": body}
        app.add_api_route(
            "/v1/completions", self.complete, methods=["POST"], response_model=None, openapi_extra=described
        )
        app.add_api_route("/health", self.health, response_model=None)
        app.add_api_route("/metrics", self.metrics, response_model=None)
        return app

    async def complete(self, request: Request) -> Response:
        """Complete a prompt."""
        ask = await read_ask(request)
        try:
            penalty = ask.repetition_penalty
            sampling = tune_model.Sampling(ask.temperature, ask.top_k, ask.top_p, ask.seed, repetition_penalty=penalty)
            generation = Generation(ask.max_tokens, frozenset(ask.stop_token_ids), sampling)
        except TuneModelError as error:
            raise HTTPException(400, str(error)) from error
        prompt = await self._encode(ask.prompt)
        completion, stream = self._engine.submit(prompt, generation)
        if ask.stream:
            return Events(self._events(completion, stream), lambda: self._engine.leave(completion))
        answer = asyncio.ensure_future(self._whole(stream))
        gone = asyncio.ensure_future(until_gone(request))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            answer.cancel()
            gone.cancel()
            self._engine.leave(completion)
        if answer.cancelled() or not answer.done():
            return Response(status_code=499)  # nobody reads it
        if completion.finish not in {"eos", "length"}:
            raise HTTPException(500, f"the request failed: {failure_text(completion.error)}")
        chunks = answer.result()
        choice = {"index": 0, "finish_reason": completion.finish, "tokens": [token for token, _ in chunks]}
        choice["text"] = "".join(text for _, text in chunks)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(chunks)}
        return JSONResponse({"object": "text_completion", "model": self._name, "choices": [choice], "usage": usage})

    async def health(self) -> JSONResponse:
        """Say whether requests are answered."""
        alive = self._engine.alive
        return JSONResponse({"alive": alive, "model": self._name}, status_code=200 if alive else 503)

    async def metrics(self) -> PlainTextResponse:
        """Return all counters."""
        return PlainTextResponse(metrics_text(self._engine))

    async def _encode(self, prompt: list[int] | str) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        if self._tokenizer is None:
            raise HTTPException(400, "the server has no tokenizer; expected a list of token numbers")
        encoded = await asyncio.to_thread(self._tokenizer.encode, prompt)  # long texts take a while
        ids: list[int] = encoded.ids
        return ids

    async def _answer(self, stream: "asyncio.Queue[int | None]") -> AsyncIterator[tuple[int, str]]:
        text = Text(self._tokenizer)
        while (token := await stream.get()) is not None:
            yield token, text.add(token)

    async def _whole(self, stream: "asyncio.Queue[int | None]") -> list[tuple[int, str]]:
        return [chunk async for chunk in self._answer(stream)]

    async def _events(self, completion: Completion, stream: "asyncio.Queue[int | None]") -> AsyncIterator[str]:
        async for token, text in self._answer(stream):
            yield self._event({"index": 0, "token": token, "text": text, "finish_reason": None})
        if completion.finish in {"eos", "length"}:
            yield self._event({"index": 0, "finish_reason": completion.finish})
        else:
            message = failure_text(completion.error)
            yield self._event({"index": 0, "finish_reason": "error", "message": message})
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
        f"tune_model_requests_failed_total {state.failed}",
        f"tune_model_requests_waiting {state.waiting}",
        f"tune_model_rows_running {state.running}",
        f"tune_model_rows {state.rows}",
        f"tune_model_prompt_tokens_total {state.prompt_tokens}",
        f"tune_model_new_tokens_total {state.new_tokens}",
        f"tune_model_steps_total {state.steps}",
        f"tune_model_steps_failed_total {engine.failed_steps}",
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
    uvicorn.run(
        service.application(),
        host=arguments.host,
        port=arguments.port,
        log_level="warning",
        timeout_graceful_shutdown=10,
    )


if __name__ == "__main__":
    main()
