"""Front end for transformers models: decoders with a cache, encoders, and single forward passes."""

import inspect
from typing import Any, NamedTuple

import msgspec
import torch

from tune_model.extract.checking.grid import check_grid, check_names
from tune_model.extract.checkpoint_names import checkpoint_names
from tune_model.extract.request import Phase, Request, TransformersSource
from tune_model.extract.tracing.attention_step import (
    ATTENTION,
    AttentionLog,
    causal_attention_steps,
    encoder_attention,
)
from tune_model.extract.tracing.build import Built, build_transformers, load_config, make_fake, torch_dtype
from tune_model.extract.tracing.cache_steps import add_cache
from tune_model.extract.tracing.front_end import SourceError, Trace, TraceError, UnknownAttentionError
from tune_model.extract.tracing.graph import ExampleInput, Run, Subject, example_sizes, trace_graph
from tune_model.extract.tracing.import_graph import NamedInput
from tune_model.extract.tracing.likeliest import add_likeliest_token
from tune_model.extract.tracing.one_token import at_one_token
from tune_model.extract.tracing.outputs import named_outputs
from tune_model.runtime.program import Call, Program, Symbol, ValueRange

__all__ = ["forward_settings", "trace_config", "trace_transformers"]

_INT = torch.int64


def trace_transformers(request: Request) -> tuple[Trace, ...]:
    """Trace every phase of a transformers model.

    Args:
        request: With a `TransformersSource`.

    Returns:
        One raw trace per phase, in the request's order.

    Raises:
        SourceError: The model cannot be built.
        TraceError: It cannot be traced, or not faithfully.
    """
    source = request.source
    if not isinstance(source, TransformersSource):
        raise TypeError(f"trace_transformers got a {type(source).__name__}")
    return trace_config(request, source, load_config(source))


def trace_config(request: Request, source: TransformersSource, config: Any) -> tuple[Trace, ...]:
    """Trace the model of a transformers configuration; as `trace_transformers` with the configuration given."""
    if request.task == "causal-lm":
        return _trace_decoder(request, source, config)
    return _trace_forward(request, source, config)


# ------------------------------------------------------------------------------------------------------------ decoders


def _trace_decoder(request: Request, source: TransformersSource, config: Any) -> tuple[Trace, ...]:
    _check_decoder_request(request)
    _check_layers(config)
    log = AttentionLog()
    with causal_attention_steps(log) as attention:
        model = build_transformers(source, config, request.task, request.dtype, attention)
        _check_positions(model, config)
        saved = checkpoint_names(model, source.folder)
        decoder = _Decoder(request, config, make_fake(model), log, saved)
        raw: dict[str, Trace] = {}
        for name in sorted({p.name for p in request.phases}, reverse=True):  # prefill first: decode derives from it
            derived = at_one_token(raw["prefill"]) if name == "decode" and "prefill" in raw else None
            raw[name] = derived or _trace_tokens(decoder, name)
    for phase in request.phases:
        check_grid(raw[phase.name].program, phase, f"the {config.model_type} model")
    return tuple(_with_cache(raw[phase.name], phase, request.max_length) for phase in request.phases)


class _Decoder(NamedTuple):
    """A decoder ready to be traced, the log its attention layers write to, and names of renamed weights."""

    request: Request
    config: Any
    built: Built
    log: AttentionLog
    saved: dict[str, str]


def _check_decoder_request(request: Request) -> None:
    if request.max_length < 1 or request.max_batch < 1:
        raise TraceError(
            f"a causal-lm request needs max_length and max_batch; got {request.max_length} and {request.max_batch}"
        )
    for phase in request.phases:
        if phase.name not in {"prefill", "decode"}:
            raise TraceError(f"a causal-lm workload has the phases prefill and decode; got {phase.name!r}")
        contexts = phase.grid.get("context", ())
        if any(c >= request.max_length for c in contexts):
            raise TraceError(
                f"phase {phase.name}: context {max(contexts)} leaves no slot for the new token in a cache of"
                f" {request.max_length}; raise max_length"
            )


def _check_layers(config: Any) -> None:
    """Refuse layers that keep a state instead of keys and values; tracing them only to count them takes minutes."""
    kinds = dict.fromkeys(getattr(config.get_text_config(), "layer_types", None) or ())
    others = [str(kind) for kind in kinds if kind == "linear_attention" or "attention" not in str(kind)]
    if others:
        raise TraceError(
            f"{config.model_type} has {' and '.join(others)} layers; expected attention over keys and values in every"
            " layer of a causal-lm model, whose programs keep no other state between tokens. Trace it as task: forward"
        )


def _check_positions(model: torch.nn.Module, config: Any) -> None:
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise TraceError(
            f"{config.model_type} takes no position_ids, so a cached step cannot say where its tokens are; expected a"
            " decoder with explicit positions. Trace it as task: forward"
        )


def _trace_tokens(decoder: _Decoder, phase: str) -> Trace:
    """Trace a decoder on `sequence` tokens, or on one for the decode phase, without cache steps yet."""
    request, config, built, log, saved = decoder
    decode = phase == "decode"
    ids = ValueRange(0, int(config.get_text_config().vocab_size) - 1)
    length = 1 if decode else "sequence"
    inputs = [
        ExampleInput(NamedInput("input_ids", ("batch", length), ids), _INT),
        ExampleInput(NamedInput("positions", ("batch", length), ValueRange(0, "sequence - 1")), _INT),
    ]
    if not decode:
        inputs.append(ExampleInput(NamedInput("logits_index", (1,), ValueRange(0, "sequence - 1")), _INT))
    log.layers.clear()
    entry = Subject(
        phase=phase,
        model=f"the {config.model_type} model",
        built=built,
        run=_run_decoder(built.module),
        inputs=tuple(inputs),
        maximum={"batch": request.max_batch, "sequence": request.max_length},
        saved=saved,
    )
    trace = trace_graph(entry, (), {"batch": 2, "sequence": 5})
    _check_attention(trace.program, log, config)
    note = f"torch.export with dynamic sizes; {len(log.layers)} attention layers as one step each"
    return trace._replace(notes=(note, *trace.notes))


def _with_cache(raw: Trace, phase: Phase, max_length: int) -> Trace:
    """Add cache steps; to decode also the greedy choice, and the hint symbol that says how far the cache is filled."""
    decode = phase.name == "decode"
    program = add_cache(raw.program, max_length=max_length, decode=decode)
    if decode:
        program = add_likeliest_token(program)
        contexts = phase.grid.get("context", ())
        context = Symbol("context", 0, max_length - 1, None, 0, contexts[0] if contexts else max_length // 2)
        filled = ValueRange("context", "context")
        program = msgspec.structs.replace(
            program,
            symbols=(*program.symbols, context),
            inputs=tuple(
                msgspec.structs.replace(i, values=filled) if i.name == "positions" else i for i in program.inputs
            ),
        )
    return Trace(program, raw.constants, tuple(f"{phase.name}: {note}" for note in raw.notes))


def _run_decoder(model: torch.nn.Module) -> Run:
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    def run(module: torch.nn.Module, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        index = given.get("logits_index")
        extra = {"logits_to_keep": index} if keeps and index is not None else {}
        logits = module(
            input_ids=given["input_ids"], position_ids=given["positions"], use_cache=False, return_dict=True, **extra
        ).logits
        return {"logits": logits if keeps or index is None else logits[:, index]}

    return run


def _check_attention(program: Program, log: AttentionLog, config: Any) -> None:
    """A layer that computed attention (or another mixing of tokens) by itself would be silently without cache."""
    steps = sum(isinstance(s, Call) and s.op == ATTENTION for s in program.steps)
    expected = int(config.get_text_config().num_hidden_layers)
    if steps == expected == len(log.layers):
        return
    raise TraceError(
        f"{config.model_type} has {expected} layers, but {len(log.layers)} attention calls were seen, {steps} of which"
        " reach the logits; expected one per layer. Its layers mix tokens in another way (their own attention, a"
        " recurrent state, shared keys), which causal-lm programs do not support yet. Trace it as task: forward"
    )


# -------------------------------------------------------------------------------------------------- encoders, forward


def _trace_forward(request: Request, source: TransformersSource, config: Any) -> tuple[Trace, ...]:
    """Trace with attention as one operator, else with the implementations that transformers has."""
    refused: list[str] = []
    log = AttentionLog()
    with encoder_attention(log) as ours:
        for attention in (ours, "sdpa", "eager"):
            try:
                traces = _trace_with_attention(request, source, config, attention)
                if attention == ours and log.masks and not log.layers:
                    raise UnknownAttentionError(f"{config.model_type} masks its attention but computes it by itself")
            except UnknownAttentionError as error:
                refused.append(f"{attention}: {error}")
                continue
            note = () if attention == ours else (f"attention is transformers' own {attention!r}",)
            return tuple(t._replace(notes=(*t.notes, *note)) for t in traces)
    raise TraceError(f"no attention implementation of {config.model_type} can be traced: {'; '.join(refused)}")


def _trace_with_attention(
    request: Request, source: TransformersSource, config: Any, attention: str
) -> tuple[Trace, ...]:
    model = build_transformers(source, config, request.task, request.dtype, attention)
    inputs = _inputs(request, model, config)
    check_names((i.named for i in inputs), request.phases, f"the {config.model_type} model")
    run = _run_forward(model)
    saved = checkpoint_names(model, source.folder)
    built = make_fake(model)
    traces = []
    for phase in request.phases:
        entry = Subject(phase.name, f"the {config.model_type} model", built, run, inputs, {}, saved)
        trace = trace_graph(entry, request.phases, example_sizes(inputs, request.phases))
        check_grid(trace.program, phase, entry.model)
        notes = ("torch.export with dynamic sizes", *trace.notes)
        traces.append(trace._replace(notes=tuple(f"{phase.name}: {n}" for n in notes)))
    return tuple(traces)


def _inputs(request: Request, model: torch.nn.Module, config: Any) -> tuple[ExampleInput, ...]:
    """The inputs named in the request, else those the model's kind implies."""
    if request.inputs:
        return tuple(
            ExampleInput(NamedInput(i.name, i.shape, _measured(i.name, config)), torch_dtype(i.dtype))
            for i in request.inputs
        )
    dtype = torch_dtype(request.dtype)
    main = str(getattr(model, "main_input_name", "input_ids"))
    accepted = inspect.signature(model.forward).parameters
    if main == "input_ids" and "decoder_input_ids" not in accepted:
        names = [n for n in ("input_ids", "attention_mask") if n in accepted]
        dims = ("batch", "sequence")
        return tuple(ExampleInput(NamedInput(n, dims, _measured(n, config)), _INT) for n in names)
    if main == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        size = config.image_size
        picture = ("batch", int(getattr(config, "num_channels", 3)), size, size)
        return (ExampleInput(NamedInput("pixel_values", picture), dtype),)
    if main == "input_features" and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        frames = 2 * int(config.max_source_positions)
        features = NamedInput("input_features", ("batch", int(config.num_mel_bins), frames))
        ids = NamedInput("decoder_input_ids", ("batch", "sequence"), _measured("decoder_input_ids", config))
        return (ExampleInput(features, dtype), ExampleInput(ids, _INT))
    raise SourceError(
        f"the inputs of {config.model_type} (main input {main!r}) cannot be derived; list them under inputs: with name,"
        " shape and dtype"
    )


def _measured(name: str, config: Any) -> ValueRange | None:
    """What to fill an integer input with when measuring."""
    if name.endswith("mask"):
        return ValueRange(1, 1)
    if name.endswith("input_ids") and hasattr(config.get_text_config(), "vocab_size"):
        return ValueRange(0, int(config.get_text_config().vocab_size) - 1)
    return None


def forward_settings(model: torch.nn.Module) -> dict[str, bool]:
    """Return the keyword arguments that make a model return its outputs by name and keep no cache."""
    accepted = inspect.signature(model.forward).parameters
    return {k: v for k, v in (("use_cache", False), ("return_dict", True)) if k in accepted}


def _run_forward(model: torch.nn.Module) -> Run:
    settings = forward_settings(model)

    def run(module: torch.nn.Module, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        returned = module(**given, **settings)
        for names in (("logits",), ("last_hidden_state", "pooler_output")):
            found = {n: returned[n] for n in names if isinstance(returned.get(n), torch.Tensor)}
            if found:
                return found
        return named_outputs(returned)

    return run
