"""A tuned model: programs, weights and kernels together, behind the calls a server makes."""

import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor

from tune_model.runtime.coverage import Coverage
from tune_model.runtime.engine import Engine, ModelParts
from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.execution.executor import Executor, InputError
from tune_model.runtime.generation.completion import Generation
from tune_model.runtime.generation.generate import Eos, Prompts, as_prompts, each_row, generate_tokens
from tune_model.runtime.generation.phases import Phases
from tune_model.runtime.generation.sampling import Sampling
from tune_model.runtime.generation.scheduler import Scheduler
from tune_model.runtime.kv_cache import KVCache
from tune_model.runtime.launch.cuda_driver import activate
from tune_model.runtime.launch.machine_code import CodeLoader, device_index
from tune_model.runtime.program import Program
from tune_model.runtime.weights.bound import BoundWeights, SharedMemory, StaleWeightsWarning
from tune_model.runtime.weights.checkpoint import WeightSource
from tune_model.runtime.weights.dense import not_dense

__all__ = ["ForkedProcessError", "ModelParts", "TunedModel"]


class ForkedProcessError(TuneModelError):
    """A model was loaded before this process was forked; running it would hang or fail somewhere deep."""


class TunedModel:
    """A model that runs with its tuned kernels.

    Safe to use from several threads. Generations share the model's one cache: the first takes it, any other that runs
    at the same time allocates its own; a server makes a scheduler instead.

    Args:
        parts: From an artifact, or straight from the tuner.
        weights: A module, a state dict or a path to safetensors.
        device: Where to run.
        graphs: Replay decode steps and repeated forward shapes as CUDA graphs; ignored on CPU.
        strict: Raise where nothing legal is tuned instead of running plain operators.
        share: `weights` is a module whose parameters become views of the weights made from them, where that can be.
    """

    def __init__(
        self,
        parts: ModelParts,
        weights: WeightSource,
        device: torch.device | str,
        *,
        graphs: bool = True,
        strict: bool = False,
        share: bool = False,
    ) -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", device_index(self.device))
            torch.empty(1, device=self.device)  # creates the context that kernels are loaded into
            activate(self.device)
        loader = CodeLoader(parts.code)
        loader.load_all(parts.replay, self.device)
        self._weights = BoundWeights(parts.programs, weights, self.device, share=share)
        self._warned_of: tuple[str, ...] = ()
        self._engine = Engine(parts, self._weights.tensors, loader, self.device, graphs=graphs, strict=strict)
        self._process = os.getpid()
        self._own_lock = threading.Lock()
        self._own: Scheduler | None = None

    @property
    def programs(self) -> Mapping[str, Program]:
        """One per phase, by name."""
        return self._engine.programs

    def executor(self, phase: str) -> Executor:
        """Return what runs one program without graphs, for measuring and for callers with graphs of their own.

        Raises:
            InputError: There is no such program.
        """
        return self._engine.executor(phase)

    def run(self, phase: str, inputs: Mapping[str, Tensor], **hints: int) -> dict[str, Tensor]:
        """Run one program.

        Args:
            phase: Its name.
            inputs: By name, on the model's device. On a CPU, what is looked up in a table or a cache is checked; on
                CUDA that would wait for the device, and the caller answers for it.
            hints: Values of symbols that no input binds.

        Returns:
            Outputs by name.

        Raises:
            InputError: There is no such program, or the inputs do not fit it.
        """
        self._check_process()
        return self._engine.run(phase, inputs, hints)

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor | dict[str, Tensor]:
        """Run the model once.

        A causal language model takes `input_ids` alone (rows of one length, no mask) and gives the logits after the
        last token, (batch, 1, vocabulary); other models take their program's inputs by position or name. Token numbers
        that lie on the host are checked; those on a GPU are not, as that would wait for it.

        Returns:
            The output, or outputs by name where there are several.

        Raises:
            InputError: The inputs do not fit.
        """
        self.check_weights()
        phase = next((name for name in ("forward", "prefill") if name in self.programs), next(iter(self.programs)))
        program = self.programs[phase]
        names = [item.name for item in program.inputs if item.role == "user"]
        cached = any(item.role == "cache" for item in program.inputs)
        if cached:
            names = names[:1]  # whoever passes a mask after the tokens must not have it taken for positions
        if len(args) > len(names):
            raise InputError(f"{len(args)} positional inputs given; the model takes {names}")
        twice = [name for name in names[: len(args)] if name in kwargs]
        if twice:
            raise InputError(f"input {twice[0]!r} is given by position and by name")
        given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
        if self.device.type != "cpu":
            self._engine.check(phase, given)
        inputs = {name: self._on_device(name, value) for name, value in given.items()}
        if cached:
            inputs = self._with_fresh_cache(program, inputs)
        outputs = self.run(phase, inputs)
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def _on_device(self, name: str, value: Any) -> Any:
        """Move an input to the model's device; what is no tensor, the program refuses."""
        if not isinstance(value, Tensor):
            return value
        seen = "a meta tensor" if value.is_meta else not_dense(value)
        if seen is not None:
            raise InputError(f"input {name!r} is {seen}; expected a dense tensor ({torch.strided}) with values")
        return value.to(self.device)

    def _with_fresh_cache(self, program: Program, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Complete a prefill's inputs for a call without a cache of its own."""
        ids = inputs.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            seen = f"of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
            seen = "missing" if ids is None else seen
            raise InputError(f"input 'input_ids' is {seen}; expected a tensor of shape (batch, length)")
        batch, length = ids.shape
        for symbol in program.symbols:  # before a cache of that many rows is made
            if symbol.input == "input_ids" and not symbol.minimum <= ids.shape[symbol.axis] <= symbol.maximum:
                raise InputError(
                    f"input 'input_ids' has size {ids.shape[symbol.axis]} in dim {symbol.axis}; expected "
                    f"{symbol.name} from {symbol.minimum} to {symbol.maximum}"
                )
        names = {item.name for item in program.inputs}
        positions = torch.arange(length, device=self.device).expand(batch, length)
        inputs.setdefault("positions", positions.contiguous())
        if "logits_index" in names:
            inputs.setdefault("logits_index", torch.full((1,), length - 1, device=self.device))
        cache = KVCache(program, batch, self.device)
        if length > cache.max_length:
            raise InputError(f"input 'input_ids' has {length} tokens per row; the cache holds {cache.max_length}")
        return {**inputs, **cache.slice(0, batch)}

    def scheduler(self, rows: int | None = None, *, prompt_tokens: int | None = None) -> Scheduler:
        """Make a scheduler with a cache of its own, for a server that takes prompts as they come.

        Args:
            rows: Prompts that run at the same time; by default as many as the model was traced for.
            prompt_tokens: Tokens of prompts that are read in between two steps of the running rows, at least one part
                of a prompt; by default one part of the largest size that was tuned.

        Raises:
            InputError: The model does not generate, or not so many rows at once, or `prompt_tokens` is below 1.
        """
        self._check_process()
        phases = self.language()
        if prompt_tokens is not None and prompt_tokens < 1:
            raise InputError(f"prompt_tokens is {prompt_tokens}; expected at least 1, or None for one tuned part")
        made = Scheduler(phases, self._rows_at_most() if rows is None else rows)
        made.prompt_tokens = made.buckets.chunk if prompt_tokens is None else prompt_tokens
        return made

    def generate(
        self,
        prompts: Prompts,
        max_new_tokens: int,
        *,
        eos: Eos = (),
        sampling: Sampling | Sequence[Sampling] | None = None,
    ) -> Iterator[tuple[int | None, ...]]:
        """Generate tokens, one per row and step.

        Args:
            prompts: One or more sequences of token numbers; lengths may differ. More than the model has rows wait.
            max_new_tokens: Per row.
            eos: Tokens that end a row, or the one that does; they are yielded.
            sampling: How tokens are picked, for all rows (the seed counts up from row to row) or for each; greedily by
                default.

        Returns:
            Each step's tokens, `None` for a row that has ended or still waits. Nothing runs before the first is asked
            for.

        Raises:
            InputError: The model does not generate, or a prompt does not fit.
        """
        self._check_process()
        self.language()
        self.check_weights()
        prompts = as_prompts(prompts)
        return self._generate(prompts, each_row(len(prompts), max_new_tokens, eos, sampling))

    def _generate(self, prompts: Prompts, generations: Sequence[Generation]) -> Iterator[tuple[int | None, ...]]:
        rows = max(min(len(prompts), self._rows_at_most()), 1)
        # A caller may hold one generation open while it starts another, so a busy cache is never waited for.
        if not self._own_lock.acquire(blocking=False):
            yield from generate_tokens(Scheduler(self.language(), rows), prompts, generations)
            return
        try:
            if self._own is None or self._own.cache.rows < rows:
                self._own = None  # frees the smaller cache first
                self._own = Scheduler(self.language(), rows)
            yield from generate_tokens(self._own, prompts, generations)
        finally:
            self._own_lock.release()

    def complete(
        self,
        prompts: Prompts,
        max_new_tokens: int,
        *,
        eos: Eos = (),
        sampling: Sampling | Sequence[Sampling] | None = None,
    ) -> list[list[int]]:
        """Generate as `generate` does and return each row's new tokens."""
        prompts = as_prompts(prompts)
        made: list[list[int]] = [[] for _ in prompts]
        for step in self.generate(prompts, max_new_tokens, eos=eos, sampling=sampling):
            for row, token in zip(made, step, strict=True):
                if token is not None:
                    row.append(token)
        return made

    def reload_weights(self, weights: WeightSource | None = None) -> None:
        """Make all weights again, after a fine-tune or a merged adapter.

        Nothing may run meanwhile; graphs and plans stay. Memory of a module that was given to `load` is not written to.

        Args:
            weights: As for `load`; by default the module that they came from last, if it was one.

        Raises:
            WeightError: They do not fit, or none were given and no module is there.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        replaced = self._weights.reload(weights)
        self._engine.rebind(self._weights.tensors, replaced)
        self._warned_of = ()

    def stale_weights(self, *, thorough: bool = True) -> tuple[str, ...]:
        """Name the parameters of the module given to `load` that have changed since their copies were made.

        Args:
            thorough: Compare a sample of their elements too; finds changes that torch's counters do not see, such as
                writes through `parameter.data`. Every call and generation looks without it, and warns.
        """
        return self._weights.stale(thorough=thorough)

    def check_weights(self) -> None:
        """Warn, once for each change, when the model computes with old values; cheap.

        Warns:
            StaleWeightsWarning: Names the weights.
        """
        stale = self._weights.stale()
        if stale and stale != self._warned_of:
            self._warned_of = stale
            names = ", ".join(stale[:5]) + (", ..." if len(stale) > 5 else "")
            message = f"{len(stale)} weights have changed since they were loaded: {names}; call reload_weights()"
            warnings.warn(message, StaleWeightsWarning, stacklevel=3)

    def shared_memory(self) -> SharedMemory:
        """Say how much of the weights lies in the memory of the module given to `load`, and what does not."""
        return self._weights.shared()

    def operators(self) -> AbstractContextManager[None]:
        """Return a context in which this thread's torch calls run on tuned kernels, one operator at a time.

        For code with a graph of its own, such as another serving engine: linear layers, products with a matrix, RMS and
        layer norms, softmax and attention that the artifact has as forms by themselves. Other calls, other sizes and
        calls that autograd follows run as they would; `coverage()` counts all under the program `operators`. Code that
        `torch.compile` has compiled makes no such calls.
        """
        return self._engine.operators()

    def coverage(self) -> Coverage:
        """Return the counters of what ran: tuned exactly, tuned nearby, or not."""
        return self._engine.coverage

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be copied or pickled, in words: its code and graphs belong to this process."""
        raise TypeError("a tuned model cannot be copied or pickled; load its artifact again where it is wanted")

    def _check_process(self) -> None:
        """Refuse to run in a forked child: the CUDA context and OpenMP's threads stayed in the parent.

        Raises:
            ForkedProcessError: It would not work.
        """
        if os.getpid() != self._process and (self.device.type == "cuda" or torch.get_num_threads() > 1):
            raise ForkedProcessError(
                f"the model was loaded in process {self._process}, of which this one was forked; expected to be loaded "
                f"here: load it after the fork or start processes by spawning (a CPU model also runs after "
                f"torch.set_num_threads(1) in the child)"
            )

    def _rows_at_most(self) -> int:
        symbols = self.language().decode.program.symbols
        return next((s.maximum for s in symbols if s.name == "batch"), 1)

    def language(self) -> Phases:
        """Return what generation needs of the model, for those that drive it themselves.

        Raises:
            InputError: It does not generate.
        """
        return self._engine.language()
