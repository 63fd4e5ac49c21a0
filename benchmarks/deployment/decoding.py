"""Decode steps and prefills of Llama, ours and the peers'."""

import inspect
import statistics
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from bench.run import Bench, attempt
from torch import Tensor, nn

from deployment.artifacts import Deployment, deploy, tuned_artifact
from deployment.models import LONG, PREFILL, SHORT, SPARE_SLOTS, llama
from deployment.timings import meet, synchronise
from tune_model.pipeline.bench.interleave import Contender, device_time_ms
from tune_model.pipeline.bench.peers import decode_step, peers, prefill_call, release, roll_back
from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.execution.graphs import GraphPool, GraphRunner
from tune_model.runtime.generation.completion import Generation
from tune_model.runtime.kv_cache import KVCache
from tune_model.tune.target import CudaTarget

__all__ = ["device_of", "run_decode", "run_prefill"]


_RUNS: Final = 5
"""Of steps in a row, whose wall time is taken; the median counts."""


class Step(NamedTuple):
    """A decode step: rows, and slots that are filled already."""

    name: str
    batch: int
    context: int


class Prompt(NamedTuple):
    """A prefill of one row."""

    name: str
    sequence: int


def run_decode(bench: Bench, *, small: bool) -> None:
    """Measure steps at batch 1 and 16 over short contexts and at batch 64 over long ones."""
    steps = [Step("b1", 1, SHORT), Step("b16", 16, SHORT), Step("b64_8k", 64, LONG)]
    if small:
        steps = [Step("b1", 1, 32), Step("b4", 4, 32)]
    _run(bench, "decode", bench.missing("decode", steps), _decode, small=small)


def run_prefill(bench: Bench, *, small: bool) -> None:
    """Measure prompts of three lengths; everyone computes the last token's logits."""
    prompts = [Prompt(str(n), n) for n in ((8, 32) if small else PREFILL)]
    _run(bench, "prefill", bench.missing("prefill", prompts), _prefill, small=small)


def _run(bench: Bench, shard: str, rows: Any, measure: Callable[..., dict[str, Any]], *, small: bool) -> None:
    if not rows:
        return
    path = tuned_artifact(bench, llama(small=small))
    here = deploy(path, device_of(bench))
    for row in rows:
        if bench.clock.is_over:
            return
        made = attempt(bench, shard, row.name, lambda row=row: measure(bench, here, row))
        if made is not None:
            bench.tell(f"  {shard} {row.name}: {made['tuned_ms']:.3f} ms")
        release(here.tuned.device)


def device_of(bench: Bench) -> torch.device:
    """Return where the benchmark runs."""
    return torch.device("cuda", 0) if isinstance(bench.shop.target, CudaTarget) else torch.device("cpu")


def _prefill(bench: Bench, here: Deployment, row: Prompt) -> dict[str, Any]:
    device = here.tuned.device
    ids = _tokens(here.original, 1, row.sequence, device)
    inputs = {"input_ids": ids, "positions": torch.arange(row.sequence, device=device)[None]}
    program = here.tuned.programs["prefill"]
    if any(item.name == "logits_index" for item in program.inputs):
        inputs["logits_index"] = torch.full((1,), row.sequence - 1, device=device)
    inputs |= KVCache(program, 1, device).slice(0, 1)
    ours = Contender("tuned", _call(here, "prefill", inputs, {}))
    call = prefill_call(here.original, 1, row.sequence)
    return meet(bench, row.name, ours, peers(call, device, compile_too=True), device)


def _decode(bench: Bench, here: Deployment, row: Step) -> dict[str, Any]:
    device = here.tuned.device
    memory = KVCache(here.tuned.programs["decode"], row.batch, device)
    for tensor in memory.slice(0, row.batch).values():
        tensor.normal_()
    ids = _tokens(here.original, row.batch, 1, device)
    inputs = {"input_ids": ids, "positions": torch.full((row.batch, 1), row.context, device=device)}
    inputs |= memory.slice(0, row.batch)
    ours = Contender("tuned", _call(here, "decode", inputs, {"context": row.context}))
    call = _original_step(here.original, ids, row.context, memory)
    made = meet(bench, row.name, ours, peers(call, device, compile_too=True), device)
    del ours, inputs, call, memory
    release(device)
    try:
        return {**made, **_token_times(here, row)}
    except (RuntimeError, TuneModelError) as error:  # no memory for another cache, say: the step's times stand
        failed = f"{type(error).__name__}: {str(error).strip()[:160]}"
        bench.tell(f"  {row.name}: steps of generate failed: {failed}")
        return {**made, "token_failed": failed}


def _call(here: Deployment, phase: str, inputs: dict[str, Tensor], hints: dict[str, int]) -> Callable[[], object]:
    executor = here.tuned.executor(phase)
    if here.tuned.device.type != "cuda":
        return lambda: executor.run(inputs, hints)
    runner = GraphRunner(executor, GraphPool(here.tuned.device))
    return lambda: runner.run(inputs, hints, clone=False)


def _tokens(model: nn.Module, rows: int, length: int, device: torch.device) -> Tensor:
    config: Any = model.config
    return torch.randint(0, config.get_text_config().vocab_size, (rows, length), device=device)


def _original_step(model: nn.Module, ids: Tensor, context: int, memory: KVCache) -> Callable[[], object]:
    """Return one step of the original over its own static cache.

    The cache is the shortest that fits, which favours the original; where that is as long as ours it lies in the memory
    of ours, because two of them would not fit at batch 64.
    """
    if context + SPARE_SLOTS < memory.max_length:
        return decode_step(model, ids.shape[0], context, slots=context + SPARE_SLOTS)
    from transformers import StaticCache

    config: Any = model.config
    cache = StaticCache(config=config, max_cache_len=memory.max_length)
    for index, layer in enumerate(cache.layers):
        keys, values = (memory.slice(0, ids.shape[0])[f"{n}_cache.{index}"] for n in ("k", "v"))
        layer.lazy_initialization(keys[:, :, :0], values[:, :, :0])
        layer.keys, layer.values = keys, values
        torch._dynamo.mark_static_address(keys)
        torch._dynamo.mark_static_address(values)
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    positions = torch.full((ids.shape[0], 1), context, device=ids.device)

    def step() -> Tensor:
        roll_back(cache, context)
        with torch.no_grad():
            logits: Tensor = model(ids, position_ids=positions, use_cache=True, **{keyword: cache}).logits
        return logits

    return step


def _token_times(here: Deployment, row: Step) -> dict[str, float]:
    """Time whole steps as `generate` runs them, choice of tokens included: on the device, and on the wall.

    Wall time is that of many steps in a row until the device is done, per step: the host reads tokens and launches the
    next step meanwhile, as it does in `generate`. Contexts grow by the tokens that are made, which is within the noise.
    """
    device = here.tuned.device
    scheduler = here.tuned.scheduler(row.batch)
    scheduler.prompt_tokens = None
    tokens = max(min(256, scheduler.cache.max_length - row.context - 1), 8)
    prompt = _tokens(here.original, 1, row.context - 8, torch.device("cpu"))[0]
    for _ in range(row.batch):
        scheduler.submit(prompt, Generation(tokens))
    for _ in range(3):  # the prompts, a step that is captured, and one from its graph
        scheduler.step()
    count = (tokens - 4) // 2
    device_times = [device_time_ms(scheduler.step, device) for _ in range(count)]
    walls = [_wall_ms(scheduler.step, max(count // _RUNS, 1), device) for _ in range(min(_RUNS, count))]
    if scheduler.state().running != row.batch:
        raise RuntimeError("rows ended before all steps were timed")
    return {"token_ms": statistics.median(device_times), "token_wall_ms": statistics.median(walls)}


def _wall_ms(step: Callable[[], object], count: int, device: torch.device) -> float:
    """Return the wall time of so many steps in a row until the device is done, per step."""
    synchronise(device)
    started = time.perf_counter()
    for _ in range(count):
        step()
    synchronise(device)
    return (time.perf_counter() - started) * 1e3 / count
