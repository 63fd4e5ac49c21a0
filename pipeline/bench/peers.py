"""What a user would run without us, as contenders: eager, eager in a CUDA graph, `torch.compile` at its best.

On CUDA the best is what `mode="max-autotune"` finds, captured in one CUDA graph as ours is: the graphs it makes itself
are cut wherever Python or a mutated input comes between, and depend on the host. As a user calls it, with those graphs,
it is a contender too. On a CPU the best is freezing, which pre-packs weights and without which max-autotune gains
nothing there.
"""

import gc
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from tune_model.pipeline.bench.interleave import Contender

__all__ = [
    "AS_CALLED",
    "COMPILED",
    "Peer",
    "captured",
    "compiled",
    "compiled_as_called",
    "decode_step",
    "peers",
    "prefill_call",
    "prepare",
    "release",
    "roll_back",
]

COMPILED = {"cuda": "max_autotune", "cpu": "compile_freezing"}
"""Name of the compiled contender by device type."""

AS_CALLED = "max_autotune_called"
"""Name of the contender on CUDA that is compiled and called as a user does it."""


def decode_step(model: nn.Module, batch: int, context: int, *, slots: int) -> Callable[[], torch.Tensor]:
    """Return one decode step of a transformers model over its own static cache, always at position `context`.

    The cache is filled by a real prefill; the position is rolled back before each step so that every call does the
    same work.

    Args:
        model: A causal LM on its device.
        batch: Rows.
        context: Tokens already in the cache.
        slots: Cache length; peers get the shortest that fits, which favours them.
    """
    from transformers import StaticCache

    device = next(model.parameters()).device
    config: Any = model.config
    vocabulary = config.get_text_config().vocab_size
    cache = StaticCache(config=config, max_cache_len=slots)
    # transformers 5.24 renamed the forward argument that takes the cache.
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    prompt = torch.randint(0, vocabulary, (batch, context), device=device)
    with torch.no_grad():
        model(prompt, use_cache=True, logits_to_keep=1, **{keyword: cache})
    token = torch.randint(0, vocabulary, (batch, 1), device=device)
    positions = torch.full((batch, 1), context, device=device)

    def step() -> torch.Tensor:
        roll_back(cache, context)
        with torch.no_grad():
            output = model(token, position_ids=positions, use_cache=True, **{keyword: cache})
        logits: torch.Tensor = output.logits
        return logits

    return step


def roll_back(cache: Any, context: int) -> None:
    """Set a static cache's length; some versions of transformers keep it as a tensor per layer, some as an integer."""
    for layer in cache.layers:
        length = getattr(layer, "cumulative_length", None)
        if isinstance(length, torch.Tensor):
            length.fill_(context)
        elif length is not None:
            layer.cumulative_length = context


def prefill_call(model: nn.Module, batch: int, sequence: int) -> Callable[[], torch.Tensor]:
    """Return a prefill of random prompts that computes the last position's logits."""
    device = next(model.parameters()).device
    config: Any = model.config
    prompt = torch.randint(0, config.get_text_config().vocab_size, (batch, sequence), device=device)

    def call() -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(prompt, use_cache=False, logits_to_keep=1).logits
        return logits

    return call


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """Capture a call into a CUDA graph and return its replay, which keeps what the call reads.

    Raises:
        RuntimeError: It does something that a graph cannot hold.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return partial(_replay, graph, call)


def _replay(graph: torch.cuda.CUDAGraph, _call: Callable[[], object]) -> None:
    graph.replay()


def compiled(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Compile a call with the best mode of the device, on CUDA into one graph where it can be, and warm it up.

    Args:
        call: Fixed shapes; compiled without dynamic dims.
        device: Chooses the mode.
    """
    torch._dynamo.reset()
    if device.type == "cuda":
        graph = _captured_or_none(_warm(torch.compile(call, mode="max-autotune-no-cudagraphs", dynamic=False)))
        return graph or compiled_as_called(call)
    import torch._inductor.config as inductor

    with inductor.patch(freezing=True), torch.no_grad():
        return _warm(torch.compile(call, dynamic=False))


def compiled_as_called(call: Callable[[], object]) -> Callable[[], object]:
    """Compile a call with `mode="max-autotune"`, whose graphs are its own, and warm it up.

    It is lost when Dynamo is reset, as `compiled` does: call this last.
    """
    return _warm(torch.compile(call, mode="max-autotune", dynamic=False))


def _warm(run: Callable[[], object]) -> Callable[[], object]:
    """Run a compiled call until nothing is compiled any more."""
    for _ in range(3):
        run()
    return run


def _captured_or_none(call: Callable[[], object]) -> Callable[[], object] | None:
    try:
        return captured(call)
    except RuntimeError:
        return None


class Peer(NamedTuple):
    """A contender that has still to be prepared.

    Attributes:
        name: As of a `Contender`.
        prepare: Compiles or captures, and returns what does the work once.
    """

    name: str
    prepare: Callable[[], Callable[[], object]]


def peers(call: Callable[[], object], device: torch.device, *, compile_too: bool, as_called: bool = True) -> list[Peer]:
    """Return every peer that runs `call`, in the order to prepare them in.

    Args:
        call: Fixed shapes.
        device: Decides which peers there are.
        compile_too: With `torch.compile`.
        as_called: On CUDA, also max-autotune with graphs of its own.
    """
    found = [Peer("eager", lambda: call)]
    if device.type == "cuda":
        found.append(Peer("eager_graph", lambda: captured(call)))
    if compile_too:
        found.append(Peer(COMPILED[device.type], lambda: compiled(call, device)))
        if device.type == "cuda" and as_called:
            found.append(Peer(AS_CALLED, lambda: compiled_as_called(call)))
    return found


def prepare(wanted: Sequence[Peer], device: torch.device, *, left_out: Callable[[str, str], None]) -> list[Contender]:
    """Prepare peers and run each once; one that fails costs itself only.

    Args:
        wanted: In the order to prepare them in.
        device: Where they run.
        left_out: Told the name of a peer that failed (no memory, say, or a compiler's error), and why.
    """
    contenders = []
    for name, make in wanted:
        try:
            run = make()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as error:  # noqa: BLE001 - a compiler may raise anything
            reason = next(iter(str(error).strip().splitlines()), "")
            left_out(name, f"{type(error).__name__}: {reason}"[:200])
            release(device)
            continue
        contenders.append(Contender(name, run))
    return contenders


def release(device: torch.device) -> None:
    """Free what compiled peers and graphs hold that nobody refers to any more; compiled calls compile again."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
