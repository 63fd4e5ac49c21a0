"""Calls of causal language models: prompts, later parts of them, and single tokens, over the caller's cache object.

`generate` of transformers works through these calls. Left-padded batches run as rows of their own lengths.
"""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tune_model.package.attach.matching import Unmatched, check_settings, check_use, output_class, same
from tune_model.package.attach.sessions import Session, SessionStore
from tune_model.runtime.execution.executor import InputError
from tune_model.runtime.execution.lookups import first_outside, index_limits
from tune_model.runtime.generation.buckets import buckets_of
from tune_model.runtime.generation.decoder import context_hint
from tune_model.runtime.generation.phases import Phase, Phases
from tune_model.runtime.generation.prompts import PromptRunner
from tune_model.runtime.kv_cache import KVCache, fixed_sizes
from tune_model.runtime.tuned import TunedModel

__all__ = ["DecoderCalls"]

_CACHE_NAMES = ("cache", "past_key_values")
"""What transformers calls the argument and the output, newest first."""


class _Call(NamedTuple):
    """What a call asks for, as far as programs know it."""

    ids: Tensor
    mask: Tensor | None
    positions: Tensor | None
    cache: Any
    keeps: bool


class DecoderCalls:
    """Answers calls of a causal language model's `forward`.

    Args:
        module: Whose calls.
        tuned: Has the programs.
        signature: Of the original `forward`.
    """

    def __init__(self, module: nn.Module, tuned: TunedModel, signature: inspect.Signature) -> None:
        self._module = module
        self._tuned = tuned
        self._phases: Phases = tuned.language()
        self._positional = list(signature.parameters)
        decode = self._phases.decode.program
        self._store = SessionStore(decode, tuned.device)
        self._slots = next(fixed_sizes(i)[1] for i in decode.inputs if i.role == "cache")
        prefill = self._phases.prefill.program
        self._tokens = index_limits(prefill).get("input_ids", torch.iinfo(torch.int64).max)
        self._rows = next((s.maximum for s in decode.symbols if s.name == "batch"), 1)
        self._buckets = buckets_of(
            prefill,
            self._phases.grids,
            rows=self._rows,
            slots=self._slots,
            exact=tuned.device.type == "cpu",
            chunked=self._phases.continuation is not None,
        )
        self._output = output_class(module, ("logits",))
        fields = getattr(self._output, "__dataclass_fields__", {})
        self._cache_field = next((name for name in _CACHE_NAMES if name in fields), _CACHE_NAMES[0])

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call.

        Raises:
            Unmatched: The programs do not compute what is asked for.
        """
        if len(args) > len(self._positional):
            raise Unmatched("more positional arguments than forward takes")
        given = {**dict(zip(self._positional, args, strict=False)), **kwargs}
        return_dict = given.get("return_dict") is not False
        call = self._understand(given)
        session = SessionStore.of(call.cache)
        if session is not None:
            logits = self._go_on(session, call)
        else:
            self._check_new(call)
            logits, call = self._begin(call)
        made = self._output(**{"logits": logits, self._cache_field: call.cache})
        return made if return_dict else made.to_tuple()

    def _understand(self, given: dict[str, Any]) -> _Call:
        """Read a call's arguments.

        Raises:
            Unmatched: One of them asks for something that no program does.
        """
        ids, mask, positions = (given.pop(n, None) for n in ("input_ids", "attention_mask", "position_ids"))
        caches = [cache for name in _CACHE_NAMES if (cache := given.pop(name, None)) is not None]
        kept = given.pop("logits_to_keep", 0)
        use_cache = given.get("use_cache")
        check_settings(given)
        given_tensors = [tensor for tensor in (ids, mask, positions) if isinstance(tensor, Tensor)]
        check_use(self._module, given_tensors, self._tuned.device.type)
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype != torch.int64 or 0 in ids.shape:
            raise Unmatched("input_ids are not (rows, length) of int64")
        if not isinstance(kept, int):
            raise Unmatched("logits_to_keep is no number")
        if ids.shape[1] > 1 and kept != 1:
            raise Unmatched("the logits of every position are asked for")
        for name, tensor in (("attention_mask", mask), ("position_ids", positions)):
            if tensor is not None and (not isinstance(tensor, Tensor) or tensor.dim() != 2):
                raise Unmatched(f"{name} is not (rows, length)")
        if ids.device.type == "cpu" and first_outside(ids, self._tokens) is not None:
            raise Unmatched(f"input_ids are not from 0 to {self._tokens - 1}")
        if use_cache is None:
            use_cache = getattr(getattr(self._module, "config", None), "use_cache", True)
        return _Call(ids, mask, positions, caches[0] if caches else None, bool(use_cache))

    # --------------------------------------------------------------------------------------------------- a new cache

    def _check_new(self, call: _Call) -> None:
        from transformers.cache_utils import DynamicCache

        if call.cache is not None:
            if type(call.cache) is not DynamicCache or getattr(call.cache, "offloading", False):
                raise Unmatched(f"the cache is a {type(call.cache).__name__}")
            if call.cache.get_seq_length() > 0:
                raise Unmatched("the cache was filled or changed by other code")
        rows, length = call.ids.shape
        if rows > self._rows or length > self._slots:
            raise Unmatched(f"{rows} rows of {length} tokens; the cache holds {self._rows} of {self._slots}")

    def _begin(self, call: _Call) -> tuple[Tensor, _Call]:
        """Run prompts into a new session, or into memory that is given back at once."""
        pads = self._pads(call)
        cache = call.cache
        if cache is None and call.keeps:
            cache = self._new_cache()
        if cache is None:
            memory = self._store.memory(len(pads))
            try:
                return self._prompts(memory.cache, call.ids, pads), call
            finally:
                self._store.give_back(memory)
        session = self._store.open(cache, pads)
        try:
            logits = self._prompts(session.memory.cache, call.ids, pads)
        except BaseException:
            session.close()  # the caller's cache object is empty again
            raise
        session.advance(call.ids.shape[1])
        return logits, call._replace(cache=cache)

    def _new_cache(self) -> Any:
        from transformers.cache_utils import DynamicCache

        return DynamicCache(config=self._module.config)

    def _pads(self, call: _Call) -> list[int]:
        """Return how many empty columns each row begins with."""
        rows, length = call.ids.shape
        columns = torch.arange(length, device=call.ids.device)
        pads = [0] * rows
        if call.mask is not None:
            if tuple(call.mask.shape) != (rows, length):
                raise Unmatched(f"attention_mask is {tuple(call.mask.shape)}; the tokens are {(rows, length)}")
            pads = (length - (call.mask != 0).sum(1)).tolist()
            starts = torch.tensor(pads, device=call.ids.device)[:, None]
            if max(pads) == length or not same(call.mask != 0, columns >= starts):
                raise Unmatched("attention_mask leaves out tokens after the first that it lets through")
        if call.positions is not None:
            starts = torch.tensor(pads, device=call.ids.device)[:, None]
            right = (call.positions == columns - starts) | (columns < starts)
            if not bool(right.all()):
                raise Unmatched("position_ids do not count up from 0")
        return pads

    def _prompts(self, memory: KVCache, ids: Tensor, pads: list[int]) -> Tensor:
        """Run prompts into rows; returns the logits after their last tokens, (rows, 1, vocabulary)."""
        if not any(pads) and len(pads) > 1 and ids.shape[1] <= self._buckets.chunk:
            return self._together(self._phases.prefill, memory, ids, 0)
        runner = PromptRunner(self._phases, memory, self._buckets, self._tuned.device)
        made = []
        for row, pad in enumerate(pads):
            prompt = ids[row, pad:]
            for chunk in self._buckets.chunks(prompt.shape[0]):
                logits = runner.run(row, prompt, chunk)
            made.append(logits)
        return torch.stack(made)

    def _together(self, phase: Phase, memory: KVCache, ids: Tensor, start: int) -> Tensor:
        """Run as many tokens of every row at once, from slot `start` on."""
        rows, length = ids.shape
        positions = torch.arange(start, start + length, device=ids.device).expand(rows, length)
        inputs = {"input_ids": ids, "positions": positions, **memory.slice(0, rows)}
        if any(item.name == "logits_index" for item in phase.program.inputs):
            inputs["logits_index"] = torch.full((1,), length - 1, device=ids.device)
        outputs = phase.run(inputs, context_hint(phase.program, start + length))
        return next(iter(outputs.values()))[:, -1:]

    # ------------------------------------------------------------------------------------------------ a known cache

    def _go_on(self, session: Session, call: _Call) -> Tensor:
        """Run further tokens of the rows of a session."""
        rows, length = call.ids.shape
        if rows != len(session.pads):
            raise Unmatched(f"{rows} rows of tokens over a cache of {len(session.pads)}")
        if session.length - min(session.pads) + length > self._slots:
            raise Unmatched(f"the cache holds {self._slots} tokens per row")
        self._check_columns(session, call)
        session.memory.used()
        logits = self._step(session, call.ids) if length == 1 else self._part(session, call.ids)
        session.advance(length)
        return logits

    def _check_columns(self, session: Session, call: _Call) -> None:
        """Compare mask and positions with what they must be if the session's rows just go on; waits once."""
        length = call.ids.shape[1]
        right: list[Tensor] = []
        if call.mask is not None:
            columns = torch.arange(session.length + length, device=call.mask.device)
            if tuple(call.mask.shape) != (len(session.pads), columns.shape[0]):
                raise Unmatched(f"attention_mask is {tuple(call.mask.shape)}; the cache has {session.length} columns")
            right.append(((call.mask != 0) == (columns >= session.pads_column)).all())
        if call.positions is not None:
            expected = session.positions + torch.arange(length, device=call.positions.device)
            right.append((call.positions == expected).all())
        if right and not bool(torch.stack(right).all()):
            raise Unmatched("attention_mask or position_ids are not those of rows that go on")

    def _step(self, session: Session, ids: Tensor) -> Tensor:
        longest = session.length - min(session.pads)
        inputs = {"input_ids": ids, "positions": session.positions, **session.memory.cache.slice(0, ids.shape[0])}
        program = self._phases.decode.program
        hint = context_hint(program, self._buckets.context(longest))
        return next(iter(self._tuned.run("decode", inputs, **hint).values()))[:, -1:]

    def _part(self, session: Session, ids: Tensor) -> Tensor:
        """Run a later part of prompts: a continued conversation, or a prompt that the caller splits."""
        if self._phases.continuation is None or any(session.pads):
            raise Unmatched("further parts of a padded prompt, or of one that cannot be split")
        try:
            return self._together(self._phases.continuation, session.memory.cache, ids, session.length)
        except InputError as error:
            raise Unmatched(str(error)) from error
