"""The server example against requests of every bad kind: each gets one clear answer, and all others their tokens."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import serving
import torch
from serving import SLOTS, Answer, Running, Served, greedy

import tune_model
from tune_model.runtime.generation.completion import Completion
from tune_model.runtime.tuned import TunedModel

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

PROMPTS = [[5, 17, 3], [9], [400, 7, 7, 12, 999, 0, 31, 8, 8, 8, 250], list(range(3, 40))]
NEW = 6


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return serving.example("fastapi_server")


@pytest.fixture(scope="module")
def tuned(served: Served) -> TunedModel:
    return tune_model.load(served.artifact, weights=served.original)


@pytest.fixture(scope="module")
def expected(served: Served) -> list[list[int]]:
    """The original's tokens after each of `PROMPTS`."""
    return [greedy(served.original, prompt, NEW) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def server(module: ModuleType, tuned: TunedModel) -> Iterator[Running]:
    with serving.running(module, tuned) as running:
        yield running


def is_well(server: Running, expected: list[list[int]]) -> None:
    """Nothing is left of what was asked before, and the next request is served."""
    assert server.at_rest()
    assert server.engine.alive
    assert server.complete(prompt=PROMPTS[0], max_tokens=NEW).tokens == expected[0]
    assert server.get("/health").status == 200


def as_json(**ask: Any) -> bytes:
    return json.dumps({"prompt": [1, 2], "max_tokens": 2, **ask}).encode()


BODIES: dict[str, tuple[bytes, int, str]] = {
    "cut off": (b'{"prompt": [1, 2', 422, "the body: Invalid JSON: EOF while parsing"),
    "empty": (b"", 422, "the body: Invalid JSON"),
    "no text": (b"\xff\xfe\x00", 422, "the body: Invalid JSON"),
    "a form": (b"prompt=1", 422, "the body: Invalid JSON"),
    "a list": (b"[]", 422, "the body: Input should be an object"),
    "null": (b"null", 422, "the body: Input should be an object"),
    "nested deeply": (b"[" * 200_000, 422, "the body: Invalid JSON: recursion limit"),
    "half a character": (b'{"prompt": "\\ud800"}', 422, "the body: Invalid JSON"),
    "a number without end": (b'{"prompt": [' + b"9" * 6000 + b"]}", 422, "the body: Invalid JSON"),
    "no prompt": (b'{"max_tokens": 2}', 422, "prompt: Field required"),
    "prompt is null": (as_json(prompt=None), 422, "prompt: Input should be a valid array"),
    "prompt is a number": (as_json(prompt=7), 422, "prompt: Input should be a valid array"),
    "prompt is an object": (as_json(prompt={"a": 1}), 422, "prompt: Input should be a valid array"),
    "prompt has text": (as_json(prompt=[1, "2"]), 422, "prompt.1: Input should be a valid integer"),
    "prompt has a fraction": (as_json(prompt=[1.5]), 422, "prompt.0: Input should be a valid integer"),
    "prompt has true": (as_json(prompt=[True]), 422, "prompt.0: Input should be a valid integer"),
    "prompt has a list": (as_json(prompt=[[1]]), 422, "prompt.0: Input should be a valid integer"),
    "prompt is text": (as_json(prompt="text"), 400, "no tokenizer"),
    "prompt is empty": (as_json(prompt=[]), 400, "expected at least one token"),
    "a negative token": (as_json(prompt=[3, -1]), 400, "token 1 of the prompt is -1; expected 0 to 999"),
    "a token too many": (as_json(prompt=[1000]), 400, "token 0 of the prompt is 1000; expected 0 to 999"),
    "a token of 64 bits": (as_json(prompt=[2**62]), 400, "expected 0 to 999"),
    "a token of 70 bits": (as_json(prompt=[2**70]), 400, "a prompt cannot be read"),
    "prompt longer than a row": (as_json(prompt=[1] * (SLOTS + 1)), 400, f"the cache holds {SLOTS} per row"),
    "prompt of 100,000 tokens": (as_json(prompt=[1] * 100_000), 400, f"the cache holds {SLOTS} per row"),
    "answer longer than a row": (as_json(max_tokens=500), 400, f"the cache holds {SLOTS} per row"),
    "no tokens wanted": (as_json(max_tokens=0), 422, "max_tokens: Input should be greater than or equal to 1"),
    "negative tokens wanted": (as_json(max_tokens=-5), 422, "max_tokens: Input should be greater than or equal"),
    "too many tokens wanted": (as_json(max_tokens=10**30), 422, "max_tokens: "),
    "half a token wanted": (as_json(max_tokens=1.5), 422, "max_tokens: Input should be a valid integer"),
    "tokens wanted in text": (as_json(max_tokens="2"), 422, "max_tokens: Input should be a valid integer"),
    "no temperature": (as_json(temperature=float("nan")), 400, "temperature is nan; expected 0 or more"),
    "negative temperature": (as_json(temperature=-1), 400, "temperature is -1.0; expected 0 or more"),
    "endless temperature": (as_json(temperature=float("inf")), 400, "temperature is inf; expected 0 or more"),
    "top_p above 1": (as_json(top_p=3), 400, "top_p is 3"),
    "top_p of 0": (as_json(top_p=0), 400, "top_p is 0"),
    "negative top_k": (as_json(top_k=-1), 422, "top_k: Input should be greater than or equal to 0"),
    "endless top_k": (as_json(top_k=10**30), 422, "top_k: "),
    "no penalty": (as_json(repetition_penalty=0), 400, "repetition_penalty is 0"),
    "seed of 65 bits": (as_json(seed=2**64), 422, "seed: "),
    "stop in text": (as_json(stop_token_ids=["a"]), 422, "stop_token_ids.0: Input should be a valid integer"),
    "stream in text": (as_json(stream="perhaps"), 422, "stream: Input should be a valid boolean"),
    "too long": (as_json(prompt="x" * (8 << 20)), 413, "the body is too long; expected at most 8388608 bytes"),
}


@pytest.mark.parametrize("what", BODIES)
def test_bad_bodies_are_answered_with_what_is_wrong(server: Running, what: str):
    body, status, message = BODIES[what]
    answer = server.post(body)
    assert (answer.status, message in answer.detail) == (status, True), answer
    assert len(answer.detail) < 600
    assert server.engine.scheduler.idle


def test_extreme_bodies_that_are_legal_are_served(server: Running, expected: list[list[int]]):
    for extreme in ({"temperature": 1e-300}, {"top_k": 2**31}, {"top_p": 1e-300}, {"stop_token_ids": [-1, 2**62]}):
        answer = server.complete(prompt=PROMPTS[0], max_tokens=NEW, **extreme)
        assert (answer.status, answer.tokens) == (200, expected[0])
    for extreme in ({"temperature": 1e300}, {"repetition_penalty": 1e300}, {"seed": -(2**63), "temperature": 1.0}):
        answer = server.complete(prompt=PROMPTS[0], max_tokens=NEW, **extreme)
        assert (answer.status, len(answer.tokens)) == (200, NEW)
    full = server.complete(prompt=[1] * SLOTS, max_tokens=1)
    assert (full.status, len(full.tokens)) == (200, 1)
    is_well(server, expected)


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
PARTS = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
RAW: dict[str, tuple[bytes, str]] = {
    "no HTTP": (b"\x16\x03\x01\x02\x00 hello\r\n\r\n", "400"),
    "endless header": (b"GET /health HTTP/1.1\r\nX: " + b"a" * 200_000 + b"\r\n\r\n", "400"),
    "no such page": (b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n", "404"),
    "another method": (b"DELETE /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n", "405"),
    "length is no number": (POST + b"Content-Length: many\r\n\r\n{}", "400"),
    "length is negative": (POST + b"Content-Length: -1\r\n\r\n{}", "400"),
    "length of a terabyte": (POST + b"Content-Length: 1000000000000\r\n\r\n{}", "413"),
    "parts without end": (POST + b"Transfer-Encoding: chunked\r\n\r\n" + PARTS * 9, "413"),
    "body that never comes": (POST + b"Content-Length: 50\r\n\r\n{", "408"),
}


@pytest.mark.parametrize("what", RAW)
def test_bad_connections_are_answered_too(
    server: Running, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, module: ModuleType, what: str
):
    data, status = RAW[what]
    if status == "408":
        monkeypatch.setattr(module, "BODY_SECONDS_AT_MOST", 0.3)
    assert server.raw(data).startswith(f"HTTP/1.1 {status} ")
    is_well(server, expected)


def slow(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let answers take a while, so that something happens meanwhile."""
    step = server.engine.scheduler.step
    monkeypatch.setattr(server.engine.scheduler, "step", lambda: (time.sleep(0.03), step())[1])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("reads", [True, False])
def test_clients_that_leave_keep_no_row_and_no_place(
    server: Running, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, stream: bool, reads: bool
):
    """40 clients over 16 rows leave with their answers under way, not begun, or still waiting."""
    slow(server, monkeypatch)
    asked: list[Completion] = []
    submit = server.engine.scheduler.submit
    monkeypatch.setattr(server.engine.scheduler, "submit", lambda *ask: (asked.append(submit(*ask)), asked[-1])[1])
    leaving = [server.begin(prompt=[1, 2, 3], max_tokens=90, stream=stream) for _ in range(40)]
    staying = server.begin(prompt=PROMPTS[0], max_tokens=NEW, stream=True)
    if reads and stream:
        leaving[0].recv(10)
    for connection in leaving:
        connection.close()
    is_well(server, expected)
    assert len(asked) > 2
    assert {completion.finish for completion in asked if completion.prompt.tolist() == [1, 2, 3]} == {"cancelled"}
    said = b""
    while b"[DONE]" not in said:
        said += staying.recv(65536)
    staying.close()
    assert f'"token": {expected[0][-1]}' in said.decode()


def await_that(holds: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Wait until something holds."""
    ends = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < ends, "it never held"
        time.sleep(0.01)


def together(count: int, ask: Callable[[int], Answer]) -> list[Answer]:
    """Ask from so many threads at once."""
    answers: list[Answer | None] = [None] * count
    gate = threading.Barrier(count)

    def one(index: int) -> None:
        gate.wait()
        answers[index] = ask(index)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answer for answer in answers if answer is not None]


def test_two_hundred_requests_at_once(server: Running, expected: list[list[int]]):
    """Good and bad, streamed and not, in one heap over 16 rows."""
    bad = [name for name, (body, _, _) in BODIES.items() if len(body) < 10_000]

    def ask(index: int) -> Answer:
        if index % 5 == 4:
            return server.post(BODIES[bad[index % len(bad)]][0])
        return server.complete(prompt=PROMPTS[index % 4], max_tokens=NEW, stream=index % 2 == 0)

    answers = together(200, ask)
    assert len(answers) == 200
    for index, answer in enumerate(answers):
        if index % 5 == 4:
            assert answer.status == BODIES[bad[index % len(bad)]][1]
        else:
            assert (answer.status, answer.tokens) == (200, expected[index % 4])
    is_well(server, expected)


def test_a_full_server_refuses_and_serves_those_it_took(
    server: Running, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, module: ModuleType
):
    monkeypatch.setattr(module, "WAITING_AT_MOST", 8)
    slow(server, monkeypatch)
    refused = server.engine.refused
    answers = together(60, lambda index: server.complete(prompt=PROMPTS[index % 4], max_tokens=NEW))
    turned_away = [answer for answer in answers if answer.status == 503]
    assert 0 < len(turned_away) < 60
    assert {answer.detail for answer in turned_away} == {"too many requests wait"}
    assert server.engine.refused - refused == len(turned_away)
    for index, answer in enumerate(answers):
        assert answer.status == 503 or answer.tokens == expected[index % 4]
    is_well(server, expected)


def test_texts_that_are_none_are_refused(module: ModuleType, tuned: TunedModel):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<unk>": 0, "a": 5, "b": 17, "far": 5000}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    with serving.running(module, tuned, 2, tokenizer) as server:
        assert server.complete(prompt="a b a", max_tokens=2).status == 200
        for prompt, message in (("", "expected at least one token"), ("a far", "token 1 of the prompt is 5000")):
            answer = server.complete(prompt=prompt, max_tokens=2)
            assert (answer.status, message in answer.detail) == (400, True)
        assert server.at_rest()


# ------------------------------------------------------------------------------------------------- a model that fails


class Fault:
    """Lets the calls of a method fail that `when` says."""

    def __init__(self, when: Callable[[int, tuple[Any, ...]], bool], error: str) -> None:
        self.calls = 0
        self._when, self._error = when, error

    def put(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        function = getattr(owner, name)

        def failing(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self._when(self.calls, args):
                raise torch.OutOfMemoryError(self._error)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, failing)


OUT_OF_MEMORY = "out of luck\nand of memory"


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_fails_is_alone_with_it(
    server: Running, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, stream: bool
):
    poison = [666, 6]
    prompts = server.engine.scheduler._prompts
    Fault(lambda _, args: args[1].tolist() == poison, OUT_OF_MEMORY).put(monkeypatch, prompts, "run")

    def ask(index: int) -> Answer:
        prompt = poison if index % 3 == 2 else PROMPTS[index % 3]
        return server.complete(prompt=prompt, max_tokens=NEW, stream=stream)

    failed = server.engine.scheduler.state().failed
    for index, answer in enumerate(together(24, ask)):
        if index % 3 != 2:
            assert (answer.status, answer.tokens) == (200, expected[index % 3])
        elif stream:
            (last,) = answer.choices
            assert (last["finish_reason"], last["message"]) == ("error", "OutOfMemoryError: out of luck")
        else:
            assert (answer.status, answer.detail) == (500, "the request failed: OutOfMemoryError: out of luck")
    assert server.engine.scheduler.state().failed - failed == 8
    monkeypatch.undo()
    is_well(server, expected)


@pytest.mark.parametrize(
    ("where", "every"),
    [("_decode", 2), ("_gather_rows", 2), ("_next_kind", 2), ("_free_rows", 2), ("_hand_out", 20)],
)
def test_a_step_that_fails_now_and_then_is_repeated(
    server: Running,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    where: str,
    every: int,
):
    """Tokens that one step had handed out before it failed were lost to their streams."""
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    fault = Fault(lambda call, _: call % every == 0, OUT_OF_MEMORY)
    fault.put(monkeypatch, server.engine.scheduler, where)
    steps = server.engine.failed_steps
    answers = together(24, lambda index: server.complete(prompt=PROMPTS[index % 4], max_tokens=NEW))
    assert [answer.tokens for answer in answers] == [expected[index % 4] for index in range(24)]
    assert server.engine.failed_steps > steps
    monkeypatch.undo()
    is_well(server, expected)


def test_steps_that_keep_failing_cost_those_in_rows(
    server: Running, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, module: ModuleType
):
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    Fault(lambda call, _: 4 <= call < 7, OUT_OF_MEMORY).put(monkeypatch, server.engine.scheduler, "_decode")
    answers = together(24, lambda index: server.complete(prompt=PROMPTS[index % 4], max_tokens=NEW, stream=True))
    failed = [answer for answer in answers if answer.choices[-1]["finish_reason"] == "error"]
    assert 0 < len(failed) <= 16
    for index, answer in enumerate(answers):
        tokens = answer.tokens
        assert tokens == expected[index % 4][: len(tokens)]  # what was said was right
        assert len(tokens) == NEW or answer in failed
    monkeypatch.undo()
    is_well(server, expected)
    assert f"tune_model_requests_failed_total {server.engine.scheduler.state().failed}" in server.get("/metrics").body


def test_a_device_that_is_gone_is_said_to_every_client(
    module: ModuleType, tuned: TunedModel, monkeypatch: pytest.MonkeyPatch
):
    """The model's thread ends in the middle of an answer: the stream ends with `error`, health turns to 503."""

    class Gone:
        def item(self) -> int:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with serving.running(module, tuned, 2) as server:
        step, calls = server.engine.scheduler.step, []

        def fail() -> Any:
            calls.append(1)
            # Who asks later than the end is refused, which is another answer.
            await_that(lambda: server.engine.scheduler.state().waiting + server.engine.scheduler.state().running == 5)
            if len(calls) > 3:
                server.engine._probe = Gone()
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return step()

        monkeypatch.setattr(server.engine.scheduler, "step", fail)
        answers = together(5, lambda index: server.complete(prompt=[1, 2], max_tokens=20, stream=index < 2))
        for answer in answers[:2]:
            assert answer.choices[-1]["finish_reason"] == "error"
            assert "illegal memory access" in answer.choices[-1]["message"]
        for answer in answers[2:]:
            assert (answer.status, "illegal memory access" in answer.detail) == (500, True)
        assert server.get("/health").status == 503
        late = server.complete(prompt=[1, 2])
        assert (late.status, late.detail) == (503, "the model has stopped")
    server.engine.scheduler = None  # FastAPI remembers every route's owner, and so what lay in the rows
