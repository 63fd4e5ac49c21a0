"""Asking for weights before the predecessor is done: only for whole pieces inside the weight, and really before."""

import itertools
import math
import subprocess
import tempfile

import pytest
from devices import cuda_target
from product_forms import batched, linear

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.program import Form
from tune_model.tune.candidate import Built, Effort, Rejected
from tune_model.tune.families import family_named
from tune_model.tune.triton.matmul_plan import Product, asked_ahead, read_product


def asked(product: Product, config: dict) -> list[tuple[int, int]]:
    """Where pieces begin and end, in bytes from the weight's start, as `prefetch_weights` asks for them."""
    ahead = asked_ahead(product, tuple(config.items()))
    if ahead == 0:
        return []
    block_n, splits = config["block_n"], config["split_k"]
    _, stride_n, stride_k = product.w_strides
    steps = math.ceil(product.k / config["block_k"])
    span = math.ceil(steps / splits) * config["block_k"]
    pieces = []
    for column, split, half in itertools.product(range(0, product.n, block_n), range(splits), range(product.halves)):
        if stride_k == 1:
            for c in range(column, column + block_n):
                begin = (c % product.n + half * product.n) * stride_n + split * span
                pieces.append((2 * begin, 2 * (begin + ahead)))
        else:
            for k in range(split * span, split * span + ahead):
                begin = k * stride_k + column + half * product.n
                pieces.append((2 * begin, 2 * (begin + block_n)))
    return pieces


@pytest.mark.parametrize("layout", ["plain", "transposed"])
@pytest.mark.parametrize(
    ("n", "k", "tail", "reached"),
    [
        (64, 128, "", True),
        (96, 1000, "", True),
        (40, 104, "swiglu", True),
        (33, 77, "", False),
        (1000, 48, "bias", True),
    ],
)
def test_what_is_asked_for_lies_inside_the_weight(n: int, k: int, tail: str, reached: bool, layout: str):
    product = read_product(Task(linear(16, n, k, tail=tail), NumericRules()), layout)
    assert not isinstance(product, Rejected)
    found = []
    for block_n, block_k, splits in itertools.product((1, 8, 32, 128), (16, 64, 256), (1, 2, 3, 7)):
        config = {"block_n": block_n, "block_k": block_k, "split_k": splits, "prefetch": True}
        for begin, end in asked(product, config):
            assert 0 <= begin < end <= 2 * n * product.halves * k, config
            assert begin % 16 == 0, config
            assert end % 16 == 0, config
            found.append(begin)
    assert bool(found) == reached


def test_nothing_is_asked_for_unless_the_configuration_says_so():
    product = read_product(Task(linear(16, 64, 128), NumericRules()))
    assert not isinstance(product, Rejected)
    config = {"block_n": 32, "block_k": 64, "split_k": 1, "prefetch": False}
    assert asked_ahead(product, tuple(config.items())) == 0


@pytest.mark.parametrize(("stride", "asks"), [(96 * 136, True), (96 * 136 + 8, True), (96 * 136 + 4, False)])
def test_nothing_is_asked_for_where_a_batch_begins_between_16_bytes(stride: int, asks: bool):
    form = batched(3, 16, 96, 136, "bfloat16", b=(stride, 1, 136))
    product = read_product(Task(form, NumericRules()))
    assert not isinstance(product, Rejected)
    config = {"block_n": 32, "block_k": 64, "split_k": 1, "prefetch": True}
    assert (asked_ahead(product, tuple(config.items())) > 0) == asks


def instructions(cubin: bytes) -> str:
    """The machine code of a cubin as text."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("layout", ["plain", "transposed"])
@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("triton_gemv", linear(1, 4096, 4096)),
        ("triton_gemv", linear(3, 4096, 4096, tail="swiglu")),
        ("triton_matmul", linear(64, 4096, 4096, tail="swiglu")),
        ("triton_split_k", linear(16, 4096, 4096)),
        ("triton_persistent", linear(64, 4096, 4096)),
    ],
)
def test_weights_are_asked_for_before_the_wait(family: str, form: Form, layout: str):
    task = Task(form, NumericRules())
    configs = family_named(family).configurations(task, cuda_target(), Effort.THOROUGH)
    config = next(c for c in configs if {"prefetch": True, "layout": layout}.items() <= dict(c).items())
    assert dict(config)["pdl"]
    built = family_named(family).build(task, config, cuda_target())
    assert isinstance(built, Built), built
    text = instructions(built.code[built.kernel.steps[0].code])
    # UBLKPF asks the second-level cache, ACQBULK is the wait.
    assert 0 < text.find("UBLKPF") < text.find("ACQBULK")
