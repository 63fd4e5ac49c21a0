"""What follows a matmul: in the same kernel, or in one of its own? By stopwatch, against plain ATen as well."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from bench.arena import Arena, Contender, Run, Setting, extern
from bench.run import Bench, attempt, print_table
from bench.tuned import Tuned, tune_forms

from matmuls.forms import (
    gelu_form,
    gelu_tail,
    linear_form,
    residual_form,
    residual_tail,
    swiglu_form,
    swiglu_tail,
)
from matmuls.shapes import llama_8b
from tune_model.runtime.execution.binding import bind_kernel
from tune_model.runtime.execution.invoke import torch_dtype
from tune_model.runtime.program import Form, TensorType
from tune_model.tune.candidate import Candidate, label
from tune_model.tune.choice import Choice
from tune_model.tune.measuring.interval import paired_ratio

__all__ = ["Layer", "layers", "measure", "run_epilogues", "runs_apart"]

SHARD: Final = "epilogues"
SEED: Final = 20_003
_RESERVE_S: Final = 2.0


class Layer(NamedTuple):
    """A linear layer and what follows it, three ways.

    Attributes:
        name: Of the row.
        fused: All of it as one form: what the tuner gets from a model.
        linear: The product alone, with its bias.
        tail: What follows alone.
        m: Rows.
    """

    name: str
    fused: Form
    linear: Form
    tail: Form
    m: int


def layers(rows: Sequence[int], scale: int = 1) -> list[Layer]:
    """Return BERT-base's and Llama-3-8B's layers with an epilogue; sizes are divided by `scale`."""
    hidden, inner = 768 // scale, 3072 // scale
    found: list[Layer] = []
    gate_up, down, o = (tuple(size // scale for size in llama_8b(part)) for part in ("gate_up", "down", "o"))
    for m in rows:
        found += [
            Layer(
                f"BERT-base up + bias + gelu, {m} rows",
                gelu_form(m, inner, hidden),
                linear_form(m, inner, hidden, bias=True),
                gelu_tail(m, inner),
                m,
            ),
            Layer(
                f"BERT-base down + bias + residual, {m} rows",
                residual_form(m, hidden, inner, bias=True),
                linear_form(m, hidden, inner, bias=True),
                residual_tail(m, hidden),
                m,
            ),
            Layer(
                f"Llama-3-8B gate_up + swiglu, {m} rows",
                swiglu_form(m, *gate_up),
                linear_form(m, *gate_up),
                swiglu_tail(m, gate_up[0]),
                m,
            ),
        ]
        for part, (n, k) in (("o", o), ("down", down)):
            found.append(
                Layer(
                    f"Llama-3-8B {part} + residual, {m} rows",
                    residual_form(m, n, k),
                    linear_form(m, n, k),
                    residual_tail(m, n),
                    m,
                )
            )
    return found


def run_epilogues(bench: Bench, found: Sequence[Layer]) -> None:
    """Tune the three forms of every layer and let them meet, until the time is over."""
    missing = bench.missing(SHARD, found)
    if missing:
        left_s = bench.clock.left_s
        budget_s = None if left_s is None else max(0.6 * left_s, left_s - _RESERVE_S * len(missing))
        forms = [form for layer in missing for form in (layer.fused, layer.linear, layer.tail)]
        tuned = tune_forms(forms, bench.shop, bench.shop.options(budget_s=budget_s), bench.tell)
        arena = Arena(bench.shop.target)
        for layer in missing:
            if bench.clock.is_over:
                bench.tell("time is over; run again to continue")
                break
            if all(tuned.is_searched(form) for form in (layer.fused, layer.linear, layer.tail)):
                attempt(bench, SHARD, layer.name, lambda layer=layer: measure(arena, layer, tuned))  # type: ignore[misc]
    _print(bench)


def measure(arena: Arena, layer: Layer, tuned: Tuned) -> dict[str, Any]:
    """Let eager ATen, the tuner's choice and the best unfused way meet."""
    winner = tuned.winner(layer.fused)
    contenders = [
        extern(layer.fused, arena.target),
        tuned.contender("ours", layer.fused),
        _apart(layer, tuned),
    ]
    timed = arena.meet(layer.fused, contenders, seed=SEED)
    eager, ours, apart = timed["extern"], timed["ours"], timed["apart"]
    gain = paired_ratio(apart.us, ours.us)
    over_eager = paired_ratio(eager.us, ours.us)
    fused = _best_fused(tuned.choices[layer.fused])
    return {
        "m": layer.m,
        "verdict": "kept unfused" if runs_apart(winner) else "fused",
        "winner": label(winner),
        "unfused": f"{label(tuned.winner(layer.linear))}, then {label(tuned.winner(layer.tail))}",
        "eager_us": eager.median_us,
        "unfused_us": apart.median_us,
        "ours_us": ours.median_us,
        "best_fused": None if fused is None else fused[0],
        "best_fused_race_us": None if fused is None else fused[1],
        "gain": gain.median,
        "gain_low": gain.low,
        "gain_high": gain.high,
        "gain_over_eager": over_eager.median,
        "gain_over_eager_low": over_eager.low,
        "gain_over_eager_high": over_eager.high,
        "error": ours.error,
        "eager_error": eager.error,
        "disturbed": any(found.disturbed for found in timed.values()),
    }


def runs_apart(candidate: Candidate) -> bool:
    """Say whether a candidate of a fused form leaves the product to the library and the rest to another kernel.

    `triton_epilogue` with `block=0` is the library's own addition of a residual: fused.
    """
    if candidate.family == "triton_epilogue":
        return dict(candidate.config).get("block") != 0
    return candidate.family in {"aten", "aten_transposed", "cpp_epilogue", "cublaslt", "library_halves"}


def _best_fused(choice: Choice) -> tuple[str, float] | None:
    """Return the fastest candidate of a race that is one kernel, and its time there."""
    times = {m.candidate: m.median_us for m in choice.measurements if not runs_apart(m.candidate)}
    if not times:
        return None
    best = min(times, key=lambda candidate: times[candidate])
    return label(best), float(f"{times[best]:.6g}")


def _apart(layer: Layer, tuned: Tuned) -> Contender:
    """Return the best unfused way: the tuned linear, then the tuned rest, one after the other."""
    kernel, code = tuned.kernel(layer.tail)
    linear = tuned.contender("linear", layer.linear)

    def bind(setting: Setting) -> Run:
        own = len(layer.linear.parameters)
        product = _empty(layer.linear.results[0].type, setting.device)
        multiply = linear.bind(Setting(layer.linear, [s[:own] for s in setting.sets], [product], setting.device))
        follow = bind_kernel(kernel, layer.tail, code, setting.device)
        given, result = setting.sets[0][own:], setting.outputs[0]
        flat = _as(result, layer.tail.results[0].type)

        def run(number: int) -> Sequence[torch.Tensor]:
            # Where the library multiplies, the product is not the tensor that was offered for it.
            (made,) = multiply(number)
            (end,) = follow(_tail_inputs(layer.tail, made, given), [flat])
            return (end.view(result.shape),)

        return run

    return Contender("apart", bind)


def _tail_inputs(tail: Form, product: torch.Tensor, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return what the rest reads: the product, or its parts side by side; then what it was given."""
    parts = len(tail.parameters) - len(given)
    columns = product.shape[-1] // parts
    views = [_as(product, parameter.type, part * columns) for part, parameter in enumerate(tail.parameters[:parts])]
    return views + [_as(value, p.type) for value, p in zip(given, tail.parameters[parts:], strict=True)]


def _as(value: torch.Tensor, type_: TensorType, offset: int = 0) -> torch.Tensor:
    """View a contiguous tensor as a type says, from an element on."""
    shape = [int(size) for size in type_.shape]
    strides = torch.empty(shape, device="meta").stride() if type_.strides is None else [int(s) for s in type_.strides]
    return value.as_strided(shape, strides, value.storage_offset() + offset)


def _empty(type_: TensorType, device: torch.device) -> torch.Tensor:
    return torch.empty([int(size) for size in type_.shape], dtype=torch_dtype(type_.dtype), device=device)


def _print(bench: Bench) -> None:
    head = (
        "row",
        "eager us",
        "unfused us",
        "ours us",
        "over unfused",
        "95 % interval",
        "over eager",
        "verdict",
        "winner",
    )
    body = [
        (
            row["row"],
            f"{row['eager_us']:.2f}",
            f"{row['unfused_us']:.2f}",
            f"{row['ours_us']:.2f}",
            f"{row['gain']:.3f}",
            f"{row['gain_low']:.3f} to {row['gain_high']:.3f}",
            f"{row['gain_over_eager']:.3f}",
            row["verdict"],
            row["winner"],
        )
        for row in bench.finished(SHARD)
    ]
    print_table(bench, "Epilogues", head, body)
