"""A tuned model: programs, weights and kernels together, behind the calls a server makes."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tune_model.runtime.checkpoint import WeightSource
from tune_model.runtime.coverage import Coverage
from tune_model.runtime.cuda_driver import activate
from tune_model.runtime.executor import Executor, InputError
from tune_model.runtime.generate import Generation, Phases, RunProgram, generate_tokens
from tune_model.runtime.graphs import GraphPool, GraphRunner
from tune_model.runtime.kv_cache import KVCache
from tune_model.runtime.machine_code import CodeLoader, device_index
from tune_model.runtime.program import Program
from tune_model.runtime.replay import Replay
from tune_model.runtime.sampling import Sampling
from tune_model.runtime.weights import bind_weights

__all__ = ["ModelParts", "TunedModel"]


class ModelParts(NamedTuple):
    """What an artifact holds.

    Attributes:
        programs: One per phase.
        constants: By key.
        replay: What was tuned.
        code: Machine code by SHA-256.
    """

    programs: Sequence[Program]
    constants: Mapping[str, Tensor]
    replay: Replay
    code: Mapping[str, bytes]


class TunedModel:
    """A model that runs with its tuned kernels.

    Safe to use from several threads. Generations share the model's one cache: the first takes it, any other that runs
    at the same time allocates its own.

    Args:
        parts: From an artifact, or straight from the tuner.
        weights: A module, a state dict or a path to safetensors.
        device: Where to run.
        graphs: Replay decode steps and repeated forward shapes as CUDA graphs; ignored on CPU.
        strict: Raise where nothing legal is tuned instead of running plain operators.
    """

    def __init__(
        self,
        parts: ModelParts,
        weights: WeightSource,
        device: torch.device | str,
        *,
        graphs: bool = True,
        strict: bool = False,
    ) -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", device_index(self.device))
            torch.empty(1, device=self.device)  # creates the context that kernels are loaded into
            activate(self.device)
        self.programs: dict[str, Program] = {program.name: program for program in parts.programs}
        self._coverage = Coverage()
        loader = CodeLoader(parts.code)
        loader.load_all(parts.replay, self.device)
        bound = bind_weights(parts.programs, weights, self.device)
        self._executors = {
            name: Executor(
                program, bound, parts.constants, parts.replay, loader, self.device, strict, coverage=self._coverage
            )
            for name, program in self.programs.items()
        }
        self._run: dict[str, RunProgram] = {name: e.run for name, e in self._executors.items()}
        if graphs and self.device.type == "cuda":
            pool = GraphPool(self.device)
            for name, executor in self._executors.items():
                if name != "prefill":  # every prompt length is its own shape, and its kernels outlast their launches
                    runner = GraphRunner(executor, pool, eager_runs=0 if name == "decode" else 1)
                    self._run[name] = runner.run
        self._cache_lock = threading.Lock()
        self._cache: KVCache | None = None

    def executor(self, phase: str) -> Executor:
        """Return what runs one program without graphs, for measuring and for callers with graphs of their own.

        Raises:
            InputError: There is no such program.
        """
        executor = self._executors.get(phase)
        if executor is None:
            raise InputError(f"the model has no program {phase!r}; it has {list(self.programs)}")
        return executor

    def run(self, phase: str, inputs: Mapping[str, Tensor], **hints: int) -> dict[str, Tensor]:
        """Run one program.

        Args:
            phase: Its name.
            inputs: By name, on the model's device.
            hints: Values of symbols that no input binds.

        Returns:
            Outputs by name.

        Raises:
            InputError: There is no such program, or the inputs do not fit it.
        """
        run = self._run.get(phase)
        if run is None:
            raise InputError(f"the model has no program {phase!r}; it has {list(self.programs)}")
        return run(inputs, hints)

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor | dict[str, Tensor]:
        """Run the model once.

        A causal language model takes `input_ids` (rows of one length) and gives the logits after the last token,
        (batch, 1, vocabulary); other models take their program's inputs by position or name.

        Returns:
            The output, or outputs by name where there are several.

        Raises:
            InputError: The inputs do not fit.
        """
        phase = next((name for name in ("forward", "prefill") if name in self.programs), next(iter(self.programs)))
        program = self.programs[phase]
        names = [item.name for item in program.inputs if item.role == "user"]
        if len(args) > len(names):
            raise InputError(f"{len(args)} positional inputs given; the model takes {names}")
        twice = [name for name in names[: len(args)] if name in kwargs]
        if twice:
            raise InputError(f"input {twice[0]!r} is given by position and by name")
        given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
        inputs = {name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in given.items()}
        if any(item.role == "cache" for item in program.inputs):
            inputs = self._with_fresh_cache(program, inputs)
        outputs = self.run(phase, inputs)
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def _with_fresh_cache(self, program: Program, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Complete a prefill's inputs for a call without a cache of its own."""
        ids = inputs.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            raise InputError("expected input_ids of shape (batch, length)")
        batch, length = ids.shape
        names = {item.name for item in program.inputs}
        positions = torch.arange(length, device=self.device).expand(batch, length)
        inputs.setdefault("positions", positions.contiguous())
        if "logits_index" in names:
            inputs.setdefault("logits_index", torch.full((1,), length - 1, device=self.device))
        return {**inputs, **KVCache(program, batch, self.device).slice(0, batch)}

    def allocate_cache(self, rows: int) -> KVCache:
        """Allocate a cache for `generate` with room for `rows` sequences.

        Raises:
            InputError: The model does not generate.
        """
        return KVCache(self._phases().decode, rows, self.device)

    def generate(
        self,
        prompts: Sequence[Sequence[int]] | Sequence[Tensor] | Tensor,
        max_new_tokens: int,
        *,
        eos: Sequence[int] = (),
        sampling: Sampling | None = None,
        cache: KVCache | None = None,
    ) -> Iterator[tuple[int | None, ...]]:
        """Generate tokens, one per row and step.

        Args:
            prompts: One or more sequences of token numbers; lengths may differ.
            max_new_tokens: Per row.
            eos: Tokens that end a row; they are yielded.
            sampling: How tokens are picked; greedily by default.
            cache: From `allocate_cache`; by default the model's own, or a new one while that is in use.

        Returns:
            Each step's tokens, `None` for a row that has ended. Nothing runs before the first is asked for.

        Raises:
            InputError: The model does not generate, or a prompt does not fit.
        """
        phases = self._phases()
        rows = [torch.as_tensor(prompt, dtype=torch.int64).to(self.device) for prompt in prompts]
        generation = Generation(max_new_tokens, frozenset(eos), sampling or Sampling())
        if cache is not None:
            return generate_tokens(phases, cache, rows, generation)
        return self._generate_in_own_cache(phases, rows, generation)

    def _generate_in_own_cache(
        self, phases: Phases, rows: list[Tensor], generation: Generation
    ) -> Iterator[tuple[int | None, ...]]:
        # A caller may hold one generation open while it starts another, so a busy cache is never waited for.
        if not self._cache_lock.acquire(blocking=False):
            yield from generate_tokens(phases, self.allocate_cache(len(rows)), rows, generation)
            return
        try:
            if self._cache is None or self._cache.rows < len(rows):
                self._cache = None  # frees the smaller one first
                self._cache = self.allocate_cache(len(rows))
            yield from generate_tokens(phases, self._cache, rows, generation)
        finally:
            self._cache_lock.release()

    def complete(
        self,
        prompts: Sequence[Sequence[int]] | Sequence[Tensor] | Tensor,
        max_new_tokens: int,
        *,
        eos: Sequence[int] = (),
        sampling: Sampling | None = None,
    ) -> list[list[int]]:
        """Generate as `generate` does and return each row's new tokens."""
        made: list[list[int]] = [[] for _ in prompts]
        for step in self.generate(prompts, max_new_tokens, eos=eos, sampling=sampling):
            for row, token in zip(made, step, strict=True):
                if token is not None:
                    row.append(token)
        return made

    def coverage(self) -> Coverage:
        """Return the counters of what ran: tuned exactly, tuned nearby, or not."""
        return self._coverage

    def _phases(self) -> Phases:
        if not {"prefill", "decode"} <= set(self.programs):
            raise InputError(f"the model has programs {list(self.programs)}; generation needs prefill and decode")
        return Phases(self.programs["prefill"], self.programs["decode"], self._run["prefill"], self._run["decode"])
