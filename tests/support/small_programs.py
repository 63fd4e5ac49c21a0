"""Small programs written by hand, and shared libraries built with g++, for tests of the runtime."""

import hashlib
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from tune_model.runtime.kernel import Kernel
from tune_model.runtime.program import (
    Apply,
    Call,
    Constant,
    Form,
    Input,
    Items,
    Output,
    Parameter,
    Program,
    Ref,
    Size,
    Symbol,
    TensorType,
    Weight,
    fingerprint,
)
from tune_model.runtime.replay import Entry, Replay

F32 = "float32"


def f32(*shape: int | str, strides: tuple[int | str, ...] | None = None) -> TensorType:
    return TensorType(F32, shape, strides)


def i64(*shape: int | str) -> TensorType:
    return TensorType("int64", shape)


def call(op: str, *args: object, results: tuple[str | None, ...] = (), **kwargs: object) -> Call:
    """A call; strings among the arguments are values (`@v`) or sizes (`#s0*2`), tuples are lists."""

    def argument(value: object) -> object:
        if isinstance(value, str) and value[:1] == "@":
            return Ref(value[1:])
        if isinstance(value, str) and value[:1] == "#":
            return Size(value[1:])
        return Items(tuple(argument(v) for v in value)) if isinstance(value, tuple) else value

    return Call(op, tuple(argument(a) for a in args), tuple((k, argument(v)) for k, v in kwargs.items()), results)


def build_library(source: str, folder: Path) -> tuple[str, bytes]:
    """Compile C++ into a shared library; return its hash and bytes."""
    (folder / "kernel.cpp").write_text(source, encoding="utf-8")
    command = ["g++", "-O2", "-fopenmp", "-fPIC", "-c", "kernel.cpp", "-o", "kernel.o"]
    subprocess.run(command, cwd=folder, check=True)
    subprocess.run(["g++", "-shared", "-nodefaultlibs", "-lc", "kernel.o", "-o", "kernel.so"], cwd=folder, check=True)
    code = (folder / "kernel.so").read_bytes()
    return hashlib.sha256(code).hexdigest(), code


def entry(kernel: Kernel, dims: tuple[int, ...], candidate: str = "by_hand") -> Entry:
    return Entry(dims, "task", candidate, kernel, 1.0, 2.0, 1.5, 2.5)


def linear_relu(k: int = 8, n: int = 6) -> Form:
    """relu(a0 @ a1.T + a2) over collapsed rows."""
    return Form(
        "matmul",
        ("d0",),
        (
            Parameter("a0", f32("d0", k)),
            Parameter("a1", f32(n, k), "weight"),
            Parameter("a2", f32(n), "weight"),
        ),
        (
            call("aten.linear.default", "@a0", "@a1", "@a2", results=("t0",)),
            call("aten.relu.default", "@t0", results=("t1",)),
        ),
        (Parameter("t1", f32("d0", n)),),
    )


def softmax_program(k: int = 8, n: int = 6) -> Program:
    """softmax over rows of relu((x + 1) @ w.T + b), transposed: [b, s, k] -> [b, n, s]."""
    form = linear_relu(k, n)
    key = fingerprint(form)
    return Program(
        "forward",
        (Symbol("b", 1, 64, "x", 0), Symbol("s", 0, 64, "x", 1)),
        (Input("x", f32("b", "s", k)),),
        (Weight("w", f32(n, k), ("fc.weight",)), Weight("bias", f32(n), ("fc.bias",))),
        (Constant("one", f32(1), "one"),),
        {key: form},
        (
            call("aten.add.Tensor", "@x", "@one", results=("y",)),
            Apply(key, ("y", "w", "bias"), ("z",), ("b*s",)),
            call("aten.transpose.int", "@z", 1, 2, results=("q",)),
            call("aten.softmax.int", "@q", -1, results=("p",)),
        ),
        {
            "y": f32("b", "s", k),
            "z": f32("b", "s", n),
            "q": f32("b", n, "s", strides=(f"s*{n}", 1, n)),
            "p": f32("b", n, "s"),
        },
        (Output("out", "p"),),
    )


def softmax_weights(k: int = 8, n: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"fc.weight": torch.randn(n, k, generator=generator), "fc.bias": torch.randn(n, generator=generator)}


def softmax_reference(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """In float64."""
    hidden = (x.double() + 1) @ weights["fc.weight"].double().T + weights["fc.bias"].double()
    return torch.softmax(torch.relu(hidden).transpose(1, 2), -1)


VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM, MAX_LENGTH = 32, 16, 4, 2, 4, 24


def language_model(phase: str) -> Program:
    """One layer of attention over a cache, with tied embeddings: the `prefill` or `decode` program."""
    length: int | str = "sequence" if phase == "prefill" else 1
    symbols = [Symbol("batch", 1, 8, "input_ids", 0)]
    inputs = [Input("input_ids", i64("batch", length)), Input("positions", i64("batch", length))]
    cache = f32("batch", KV_HEADS, MAX_LENGTH, HEAD_DIM)
    if phase == "prefill":
        symbols.append(Symbol("sequence", 1, MAX_LENGTH, "input_ids", 1))
        inputs.append(Input("logits_index", i64(1)))
    else:
        symbols.append(Symbol("context", 1, MAX_LENGTH, default=8))
    inputs += [Input("k_cache.0", cache, "cache"), Input("v_cache.0", cache, "cache")]
    text = "#sequence" if phase == "prefill" else 1
    values: dict[str, TensorType] = {}
    steps: list[Call | Apply] = []

    def step(op: str, *args: object, result: str, type_: TensorType) -> None:
        steps.append(call(op, *args, results=(result,)))
        values[result] = type_

    hidden = f32("batch", length, WIDTH)
    step("aten.embedding.default", "@embed", "@input_ids", result="e", type_=hidden)
    step("aten.embedding.default", "@place", "@positions", result="p", type_=hidden)
    step("aten.add.Tensor", "@e", "@p", result="x", type_=hidden)
    for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        flat = heads * HEAD_DIM
        strides = (f"{length}*{flat}", HEAD_DIM, flat, 1)
        step("aten.linear.default", "@x", f"@w{name}", result=f"{name}0", type_=f32("batch", length, flat))
        split = f32("batch", length, heads, HEAD_DIM)
        step("aten.view.default", f"@{name}0", ("#batch", text, heads, HEAD_DIM), result=f"{name}1", type_=split)
        turned = f32("batch", heads, length, HEAD_DIM, strides=strides)
        step("aten.transpose.int", f"@{name}1", 1, 2, result=f"{name}2", type_=turned)
    steps.append(call("tune_model.append_kv", "@k_cache.0", "@v_cache.0", "@k2", "@v2", "@positions"))
    attended = f32("batch", HEADS, length, HEAD_DIM, strides=(f"{length}*{WIDTH}", HEAD_DIM, WIDTH, 1))
    if phase == "prefill":
        step("tune_model.causal_attention", "@q2", "@k2", "@v2", 0.5, None, None, result="a0", type_=attended)
    else:
        args = ("@q2", "@k_cache.0", "@v_cache.0", "@positions", 0.5, None, None)
        step("tune_model.cached_attention", *args, result="a0", type_=attended)
    step("aten.transpose.int", "@a0", 1, 2, result="a1", type_=f32("batch", length, HEADS, HEAD_DIM))
    step("aten.reshape.default", "@a1", ("#batch", text, WIDTH), result="a2", type_=hidden)
    step("aten.add.Tensor", "@x", "@a2", result="h", type_=hidden)
    last = "h"
    if phase == "prefill":
        last = "h_last"
        step("aten.index_select.default", "@h", 1, "@logits_index", result=last, type_=f32("batch", 1, WIDTH))
    step("aten.linear.default", f"@{last}", "@embed", result="logits", type_=f32("batch", 1, VOCABULARY))
    weights = (
        Weight("embed", f32(VOCABULARY, WIDTH), ("model.embed_tokens.weight",)),
        Weight("place", f32(MAX_LENGTH, WIDTH), ("model.place.weight",)),
        *(
            Weight(f"w{n}", f32(h * HEAD_DIM, WIDTH), (f"model.layers.0.{n}_proj.weight",))
            for n, h in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        ),
    )
    outputs = (Output("logits", "logits"),)
    return Program(phase, tuple(symbols), tuple(inputs), weights, (), {}, tuple(steps), values, outputs)


def language_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, WIDTH),
        "model.place.weight": (MAX_LENGTH, WIDTH),
        "model.layers.0.q_proj.weight": (HEADS * HEAD_DIM, WIDTH),
        "model.layers.0.k_proj.weight": (KV_HEADS * HEAD_DIM, WIDTH),
        "model.layers.0.v_proj.weight": (KV_HEADS * HEAD_DIM, WIDTH),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def language_logits(tokens: list[int], weights: dict[str, Tensor]) -> Tensor:
    """Logits after the last of `tokens`, computed from scratch in float64."""
    w = {name.split(".")[-2]: tensor.double() for name, tensor in weights.items()}
    x = w["embed_tokens"][tokens] + w["place"][: len(tokens)]
    length = len(tokens)
    q = (x @ w["q_proj"].T).view(length, HEADS, HEAD_DIM).transpose(0, 1)
    k, v = (
        (x @ w[n].T).view(length, KV_HEADS, HEAD_DIM).transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0)
        for n in ("k_proj", "v_proj")
    )
    scores = (q @ k.transpose(1, 2)) * 0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    attended = torch.softmax(scores.masked_fill(future, float("-inf")), -1) @ v
    x = x + attended.transpose(0, 1).reshape(length, WIDTH)
    return x[-1] @ w["embed_tokens"].T


def language_greedy(prompt: list[int], new: int, weights: dict[str, Tensor]) -> list[int]:
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(language_logits(tokens, weights).argmax()))
    return tokens[len(prompt) :]


def empty_replay() -> Replay:
    return Replay({})
