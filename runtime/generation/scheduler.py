"""Continuous batching: prompts wait, take a free row, decode beside the others and leave when they are complete.

A step reads prompts in (a limited number of tokens, so that running rows are not held up), then lets every row advance
by one token. Rows in use are kept at the front of the cache, and a step runs on the smallest tuned number of rows that
holds them all.
"""

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import msgspec
import torch
from torch import Tensor

from tune_model.runtime.execution.executor import InputError
from tune_model.runtime.execution.layout import layout_of
from tune_model.runtime.execution.lookups import index_limits
from tune_model.runtime.generation.buckets import Buckets, Chunk, buckets_of
from tune_model.runtime.generation.completion import Completion, CompletionFailedError, Generation
from tune_model.runtime.generation.decoder import Decoder, StepKind
from tune_model.runtime.generation.phases import Phases
from tune_model.runtime.generation.prompts import PromptRunner, read_prompt
from tune_model.runtime.generation.readback import Readback
from tune_model.runtime.generation.rows import Rows
from tune_model.runtime.generation.sampling import Sampling, needs_of, pick
from tune_model.runtime.kv_cache import KVCache

__all__ = ["Scheduler", "SchedulerState"]


class SchedulerState(msgspec.Struct, frozen=True):
    """How busy a scheduler is.

    Attributes:
        waiting: Prompts that have no row yet.
        running: Rows in use.
        rows: Rows there are.
        completed: Answers so far, cancelled and failed ones included.
        failed: Those that an error ended.
        prompt_tokens: Tokens of prompts that ran, without padding.
        new_tokens: Tokens that were handed out.
        steps: Steps that decoded.
        graphs: Graphs of decode steps.
        cache_bytes: Memory of the cache.
    """

    waiting: int
    running: int
    rows: int
    completed: int
    failed: int
    prompt_tokens: int
    new_tokens: int
    steps: int
    graphs: int
    cache_bytes: int


class _Running:
    """A completion in a row, the `number`-th to get one.

    `launched` counts the tokens that are picked or being picked; `length` the slots that are filled then.
    """

    def __init__(self, number: int, completion: Completion, chunks: Sequence[Chunk]) -> None:
        self.number = number
        self.completion = completion
        self.chunks = deque(chunks)
        self.length = 0
        self.launched = 0

    @property
    def decodes(self) -> bool:
        return not self.chunks


class Scheduler:
    """Generates for many prompts at once over one cache.

    `submit`, `cancel` and `state` may be called from any thread at any time; they wait neither for a step nor for the
    scheduler's stream. `step`, `abort` and `warm_up` may be called from any thread too, and run one at a time. All work
    of a scheduler goes to the CUDA stream that was current when it was made.

    An exception never leaves a row half done. One while a prompt is read ends that completion and comes as
    `CompletionFailedError`. After any other, of a step of all rows, `step` may be called again, and `abort` ends the
    rows in use where that keeps failing. No token of another completion is lost or wrong either way.

    Args:
        phases: The model.
        rows: Of the cache.
        exact: Run rows and lengths as they are, without padding; by default on a CPU.

    Attributes:
        buckets: Which sizes run.
        prompt_tokens: Tokens of prompts that a step reads in at most (at least one part); `None` for all that have a
            row.

    Raises:
        InputError: The programs cannot have so many rows.
    """

    def __init__(self, phases: Phases, rows: int, *, exact: bool | None = None) -> None:
        program = phases.decode.program
        most = next((s.maximum for s in program.symbols if s.name == "batch"), rows)
        if not 1 <= rows <= most:
            raise InputError(f"a cache of {rows} rows asked for; the decode program takes 1 to {most}")
        device = phases.decode.device
        cache = KVCache(program, rows, device)
        logits = program.values[program.outputs[0].value]
        self._rows = Rows(cache, layout_of(logits, {s.name: s.minimum for s in program.symbols}).shape[-1], device)
        self.buckets: Buckets = buckets_of(
            phases.prefill.program,
            phases.grids,
            rows=rows,
            slots=cache.max_length,
            exact=device.type == "cpu" if exact is None else exact,
            chunked=phases.continuation is not None,
        )
        self._prompts = PromptRunner(phases, cache, self.buckets, device)
        self._decoder = Decoder(phases.decode, self._rows, phases.pool)
        self._readback: Readback[Completion] = Readback(rows, device)
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.prompt_tokens: int | None = None
        self._running: list[_Running | None] = [None] * rows
        self._waiting: deque[Completion] = deque()
        self._token_limit = index_limits(phases.prefill.program).get("input_ids")
        self._unsettled: set[int] = set()  # rows out of use that the device may not know of yet
        self._lock = threading.RLock()
        self._queue_lock = threading.Lock()
        self._made: list[tuple[Completion, int]] = []  # arrived, and not handed out yet
        self._sweep = False  # somebody who may wait was cancelled
        self._admitted = self._completed = self._failed = self._read_in = self._handed_out = self._steps = 0

    @property
    def cache(self) -> KVCache:
        """Its cache."""
        return self._rows.cache

    def submit(self, prompt: Sequence[int] | Tensor, generation: Generation) -> Completion:
        """Queue a copy of a prompt.

        Args:
            prompt: Token numbers. Those on a device are waited for, on the caller's stream.
            generation: What is to follow.

        Raises:
            InputError: It is empty, has numbers that are no tokens, or does not fit a row together with its new tokens.
        """
        tokens = read_prompt(prompt, self._token_limit)
        # The last token that is generated is never run, so it needs no slot.
        needed = tokens.shape[0] + max(generation.max_new_tokens - 1, 0)
        if needed > self.cache.max_length:
            raise InputError(
                f"a prompt has {tokens.shape[0]} tokens and {generation.max_new_tokens} are to follow; "
                f"the cache holds {self.cache.max_length} per row"
            )
        completion = Completion(tokens, generation)
        if generation.max_new_tokens == 0:
            completion.finish = "length"
        else:
            with self._queue_lock:
                self._waiting.append(completion)
        return completion

    def cancel(self, completions: Iterable[Completion]) -> None:
        """End completions early; those that are complete stay as they are. Their rows are free at the next step."""
        for completion in completions:
            if completion.finish is None:
                completion.finish = "cancelled"
                self._sweep = True

    def abort(self, error: BaseException) -> list[Completion]:
        """End every completion that has a row, for steps that keep failing; those that wait go on with the next step.

        Args:
            error: What is to blame.

        Returns:
            Those that were ended.
        """
        with self._lock, _on(self._stream), torch.no_grad():
            ended = []
            for row, running in enumerate(self._running):
                if running is not None:
                    if running.completion.finish is None:
                        running.completion.fail(error)
                        ended.append(running.completion)
                    self._leave(row)
            self._settle()
            return ended

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not self._waiting and not len(self._readback) and not any(self._running) and not self._made

    def state(self) -> SchedulerState:
        """Return how busy it is."""
        return SchedulerState(
            waiting=len(self._waiting),
            running=sum(r is not None for r in self._running),
            rows=self.cache.rows,
            completed=self._completed,
            failed=self._failed,
            prompt_tokens=self._read_in,
            new_tokens=self._handed_out,
            steps=self._steps,
            graphs=self._decoder.graphs,
            cache_bytes=self.cache.size_bytes + self._rows.size_bytes,
        )

    def warm_up(self, samplings: Iterable[Sampling] = (Sampling(),)) -> None:
        """Capture the graphs of decode steps for every number of rows now instead of at their first use.

        Args:
            samplings: One for each kind of sampling that will come.

        Raises:
            InputError: Prompts are under way.
        """
        with self._lock, _on(self._stream), torch.no_grad():
            if not self.idle:
                raise InputError("graphs are captured before the first prompt is submitted, or after the last ended")
            contexts = self.buckets.contexts or (self.buckets.context(self.cache.max_length // 2),)
            for needs in dict.fromkeys(needs_of([sampling]) for sampling in samplings):
                for rows in reversed(self.buckets.batches_all()):
                    for context in contexts:
                        self._decoder.capture(StepKind(rows, context, needs))

    def step(self) -> list[tuple[Completion, int]]:
        """Read prompts in, decode every row once, and hand out the tokens that have arrived since.

        On CUDA tokens arrive one step late: the host reads them while the device is at the next.

        Returns:
            Completions with one new token each; a completion may come twice.

        Raises:
            CompletionFailedError: A prompt could not be read. Its completion has ended; the next step goes on.
        """
        with self._lock, _on(self._stream), torch.no_grad():
            self._settle()
            self._free_rows()
            self._admit()
            self._read_prompts()
            self._gather_rows()
            kind = self._next_kind()
            # A graph takes a while to capture: first tokens are handed out before.
            waits = kind is not None and len(self._readback) > 0 and not self._decoder.is_ready(kind)
            in_flight = 0
            if kind is not None and not waits:
                self._decode(kind)
                in_flight = 1 if self._readback.overlaps else 0
            while len(self._readback) > in_flight:
                self._hand_out()
            made, self._made = self._made, []
            return made

    # ------------------------------------------------------------------------------------------------------------ rows

    def _free_rows(self) -> None:
        for row, running in enumerate(self._running):
            if running is not None and running.completion.finish is not None:
                self._release(row)
        if self._sweep:
            self._sweep = False
            with self._queue_lock:
                kept = deque(completion for completion in self._waiting if completion.finish is None)
                self._completed += len(self._waiting) - len(kept)
                self._waiting = kept

    def _release(self, row: int) -> None:
        self._leave(row)
        self._settle()

    def _leave(self, row: int) -> None:
        """Take a row out of use on the host alone."""
        running = self._running[row]
        if running is not None:
            self._running[row] = None
            self._unsettled.add(row)
            self._completed += 1
            self._failed += running.completion.finish == "error"

    def _settle(self) -> None:
        """Let rows that are out of use rest on the device; what an exception leaves undone is done by the next step."""
        for row in tuple(self._unsettled):
            self._rows.rest(row)
            self._unsettled.discard(row)

    def _admit(self) -> None:
        for row in range(len(self._running)):
            while self._running[row] is None and self._waiting:
                completion = self._waiting.popleft()
                if completion.finish is not None:
                    self._completed += 1  # cancelled just now
                    continue
                chunks = self.buckets.chunks(completion.prompt.shape[0])
                self._running[row] = _Running(self._admitted, completion, chunks)
                self._admitted += 1

    def _gather_rows(self) -> None:
        """Move the last rows into gaps where that lets the step run on fewer."""
        while True:
            used = [row for row, running in enumerate(self._running) if running is not None and running.decodes]
            gap = next((row for row, running in enumerate(self._running) if running is None), len(self._running))
            if not used or used[-1] < gap or self.buckets.batch(used[-1] + 1) == self.buckets.batch(len(used)):
                return
            last = used[-1]
            running = self._running[last]
            assert running is not None  # noqa: S101 (it is in use)
            self._unsettled.add(gap)
            self._rows.move(last, gap, running.length)
            self._unsettled.discard(gap)
            self._running[gap], self._running[last] = running, None

    # ------------------------------------------------------------------------------------------------------------ work

    def _read_prompts(self) -> None:
        budget = self.prompt_tokens
        reading = [(running.number, row, running) for row, running in enumerate(self._running) if running is not None]
        for _, row, running in sorted(reading):  # in the order they came
            while running.chunks:
                if budget is not None and budget <= 0:
                    return
                chunk = running.chunks[0]
                try:
                    self._read_part(row, running, chunk)
                except Exception as error:
                    self._end(row, running, error)
                    message = f"request {running.number}, a prompt of {running.completion.prompt.shape[0]} tokens"
                    raise CompletionFailedError(running.completion, f"{message}: {error}") from error
                budget = None if budget is None else budget - chunk.size

    def _read_part(self, row: int, running: _Running, chunk: Chunk) -> None:
        logits = self._prompts.run(row, running.completion.prompt, chunk)
        if len(running.chunks) > 1:
            self._rows.rest(row, chunk.stop)
        else:
            self._begin(row, running, logits, chunk.stop)
        self._read_in += chunk.stop - chunk.start
        running.length = chunk.stop
        running.chunks.popleft()
        if running.launched == running.completion.generation.max_new_tokens:
            self._release(row)

    def _begin(self, row: int, running: _Running, logits: Tensor, length: int) -> None:
        """Pick the first token after a prompt of so many tokens, and let the row take part in steps."""
        completion, generation = running.completion, running.completion.generation
        needs = needs_of([generation.sampling])
        position = torch.full((1, 1), length, device=self._rows.device)
        self._rows.prepare(row, generation.sampling, completion.prompt, generation.max_new_tokens)
        token = pick(logits, self._rows.sampling, row, position, needs)
        if needs.penalises:
            self._rows.sampling.note(row, token)
        self._rows.start(row, token, length)
        self._readback.start(token, [(0, completion)])
        running.launched = 1

    def _end(self, row: int, running: _Running, error: Exception) -> None:
        """End a completion that failed."""
        running.completion.fail(error)
        self._leave(row)
        self._settle()

    def _decoding(self) -> list[tuple[int, _Running]]:
        return [(row, r) for row, r in enumerate(self._running) if r is not None and r.decodes]

    def _next_kind(self) -> StepKind | None:
        """Return what the next step depends on; `None` when no row decodes."""
        rows = self._decoding()
        if not rows:
            return None
        longest = max(running.length for _, running in rows)
        needs = needs_of(running.completion.generation.sampling for _, running in rows)
        return StepKind(self.buckets.batch(rows[-1][0] + 1), self.buckets.context(longest), needs)

    def _decode(self, kind: StepKind) -> None:
        rows = self._decoding()
        self._readback.reserve()  # once the rows have advanced, nothing may fail
        tokens = self._decoder.step(kind)
        self._readback.start(tokens, [(row, running.completion) for row, running in rows])
        self._steps += 1
        for row, running in rows:
            running.length += 1
            running.launched += 1
            if running.launched == running.completion.generation.max_new_tokens:
                self._release(row)

    def _hand_out(self) -> None:
        """Give the oldest tokens on their way to their completions; a step that fails afterwards loses none."""
        for completion, token in self._readback.finish():
            if completion.finish is None:
                completion.add(token)
                self._made.append((completion, token))
                self._handed_out += 1


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
