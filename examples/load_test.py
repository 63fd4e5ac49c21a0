"""Put a completion server under load: clients that stream, one request after another, for a while.

    python examples/load_test.py --port 8000 --clients 64 --seconds 60 [--expect answers.json]

`--expect` is a list of {"prompt": [...], "answer": [...]}: greedy answers, of which every streamed one must be the
beginning. Without it prompts are random and answers are not judged. Prints a summary as JSON; the exit code is 1 when a
request failed or a token was wrong. Standard library alone.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Outcome:
    """What came of all requests."""

    requests: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)

    def summary(self, seconds: float) -> dict[str, object]:
        """Flat numbers."""
        return {
            "requests": self.requests,
            "tokens": self.tokens,
            "tokens_per_s": round(self.tokens / seconds, 1),
            "errors": len(self.errors),
            "wrong": len(self.wrong),
            "first_token_p50_s": quantile(self.first_token_s, 0.5),
            "first_token_p99_s": quantile(self.first_token_s, 0.99),
            "between_tokens_p50_s": quantile(self.gap_s, 0.5),
            "between_tokens_p99_s": quantile(self.gap_s, 0.99),
        }


def quantile(values: list[float], at: float) -> float | None:
    """Return a quantile of some times."""
    ordered = sorted(values)
    return round(ordered[min(int(at * len(ordered)), len(ordered) - 1)], 4) if ordered else None


async def stream(host: str, port: int, ask: dict[str, object], outcome: Outcome) -> tuple[list[int], str]:
    """Send one request; returns its tokens and why it ended."""
    body = json.dumps({**ask, "stream": True}).encode()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        sent = last = time.perf_counter()
        status = (await reader.readline()).decode()
        if " 200 " not in status:
            raise RuntimeError(f"{status.strip()}: {(await reader.read())[-200:]!r}")
        tokens: list[int] = []
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue  # headers, chunk sizes, blank lines, [DONE]
            (choice,) = json.loads(line[6:])["choices"]
            if choice["finish_reason"] is not None:
                return tokens, choice["finish_reason"]
            tokens.append(choice["token"])
            now = time.perf_counter()
            (outcome.gap_s if len(tokens) > 1 else outcome.first_token_s).append(now - last)
            last = now
        raise RuntimeError(f"the answer ended after {len(tokens)} tokens, {last - sent:.1f} s, without a reason")
    finally:
        writer.close()


async def client(number: int, arguments: argparse.Namespace, expected: list[dict], until: float, outcome: Outcome):
    """Ask until the time is over, or as often as is wanted."""
    draw = random.Random(number)  # noqa: S311 - test data
    asked = 0
    while asked < arguments.requests if arguments.requests else time.perf_counter() < until:
        asked += 1
        if expected:
            one = draw.choice(expected)
            prompt, answer = one["prompt"], one["answer"]
        else:
            prompt, answer = [draw.randrange(arguments.vocabulary) for _ in range(draw.randint(1, 16))], None
        count = draw.randint(1, len(answer) if answer else arguments.max_tokens)
        outcome.requests += 1
        try:
            tokens, reason = await stream(
                arguments.host, arguments.port, {"prompt": prompt, "max_tokens": count}, outcome
            )
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            outcome.errors.append(repr(error))
            await asyncio.sleep(0.1)
            continue
        outcome.tokens += len(tokens)
        if reason != "length" or len(tokens) != count or (answer and tokens != answer[:count]):
            outcome.wrong.append(f"{prompt} -> {tokens} ({reason}); expected {answer and answer[:count]}")


async def run(arguments: argparse.Namespace) -> Outcome:
    """Run all clients."""
    expected = json.loads(Path(arguments.expect).read_text(encoding="utf-8")) if arguments.expect else []
    outcome = Outcome()
    until = time.perf_counter() + arguments.seconds
    await asyncio.gather(*(client(n, arguments, expected, until, outcome) for n in range(arguments.clients)))
    return outcome


def main() -> None:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description="Put a completion server under load.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--requests", type=int, default=0, help="of each client, however long they take")
    parser.add_argument("--expect", help="JSON with prompts and greedy answers")
    parser.add_argument("--vocabulary", type=int, default=1000, help="of random prompts")
    parser.add_argument("--max-tokens", type=int, default=32, help="of random requests")
    arguments = parser.parse_args()
    started = time.perf_counter()
    outcome = asyncio.run(run(arguments))
    print(json.dumps(outcome.summary(time.perf_counter() - started), indent=1))
    for problem in (*outcome.errors[:5], *outcome.wrong[:5]):
        print(problem, file=sys.stderr)
    if outcome.errors or outcome.wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
