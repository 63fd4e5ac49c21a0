import pytest
import torch
from attention_forms import causal_form, chunk_form, sdpa_form
from devices import cuda_target
from form_runs import fill, relative_error, run_body
from interpreted import interpret

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.program import Form
from tune_model.tune.candidate import Effort, Rejected
from tune_model.tune.families.triton_flash_attention import FAMILY

TILE = {"block_m": 16, "block_n": 32, "num_warps": 1, "num_stages": 2, "pdl": False}


def check(form: Form, change=None, tolerance: float = 2e-3, **config) -> None:
    """Compare with the body in float64, caches included."""
    inputs = fill(form)
    if change is not None:
        change(inputs)
    exact = [t.double() if t.is_floating_point() else t.clone() for t in inputs]
    expected = run_body(form, exact)[0]
    plan = FAMILY.plan(Task(form, NumericRules()), tuple({**TILE, **config}.items()))
    assert not isinstance(plan, Rejected), plan
    mine = [t.clone() for t in inputs]
    result = interpret(plan, form, mine)[0]
    assert bool(torch.isfinite(result).all())
    assert relative_error(result, expected) < tolerance
    for got, wanted in zip(mine, exact, strict=True):
        assert torch.equal(got.double(), wanted.double())


@pytest.mark.parametrize("length", [1, 31, 32, 70])
def test_prefill_with_the_append(length: int):
    check(causal_form(heads=4, kv_heads=2, head_dim=32, length=length, max_length=72, dtype="float16"))


def test_bfloat16_and_float32():
    check(causal_form(heads=2, kv_heads=1, head_dim=32, length=40, dtype="bfloat16"), tolerance=1e-2)
    check(causal_form(heads=2, kv_heads=1, head_dim=32, length=40, dtype="float32"), tolerance=1e-6)


@pytest.mark.parametrize(("window", "softcap"), [(7, None), (40, None), (None, 5.0), (13, 2.0)])
def test_windows_and_soft_caps(window, softcap):
    form = causal_form(heads=2, kv_heads=1, head_dim=32, length=75, dtype="float16", window=window, softcap=softcap)
    check(form)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (13, 2.0)])
def test_sinks(window, softcap):
    def spread(inputs: list[torch.Tensor]) -> None:
        inputs[6][:] = torch.tensor([-40.0, 0.5, 8.0, 60.0])

    form = causal_form(heads=4, kv_heads=2, head_dim=32, length=75, dtype="float16", window=window, softcap=softcap,
                       sinks=True)  # fmt: skip
    check(form, spread)


@pytest.mark.parametrize("window", [None, 20])
def test_a_chunk_of_a_prompt_over_a_ragged_cache(window):
    form = chunk_form(window=window)

    def positions(inputs: list[torch.Tensor]) -> None:
        inputs[4][0] = torch.arange(5)
        inputs[4][1] = torch.arange(60, 65)

    check(form, positions)


@pytest.mark.parametrize("causal", [False, True])
def test_grouped_queries_and_other_numbers_of_keys(causal: bool):
    check(sdpa_form(heads=4, kv_heads=2, head_dim=24, length=19, keys=50, causal=causal))


@pytest.mark.parametrize(
    "shape", [(2, 1, 33, 33), (1, 1, 33, 33), (2, 4, 33, 33), (2, 1, 1, 33), (1, 1, 1, 33)], ids=str
)
@pytest.mark.parametrize("kind", ["bool", "float16", "float32"])
def test_masks_of_every_shape(kind: str, shape: tuple[int, ...]):
    def let_something_through(inputs: list[torch.Tensor]) -> None:
        if kind == "bool":
            inputs[3][..., 3] = True
        else:
            inputs[3][..., 5:9] = float("-inf")

    check(sdpa_form(head_dim=32, mask=(kind, shape)), let_something_through)


def test_a_query_that_sees_nothing_gives_zeros():
    def hide(inputs: list[torch.Tensor]) -> None:
        inputs[3][0, :, 4] = False
        inputs[3][1, :, :, 20:] = False

    check(sdpa_form(head_dim=32, masked=True), hide)


def test_padding_is_not_read():
    """Keys behind the last visible one may be anything: NaN there would spread if it were read."""
    form = sdpa_form(batch=3, head_dim=32, length=70, mask=("bool", (3, 1, 1, 70)))
    inputs = fill(form)
    lengths = (70, 33, 1)
    for row, length in enumerate(lengths):
        inputs[3][row] = torch.arange(70) < length
    expected = run_body(form, [t.double() if t.is_floating_point() else t for t in inputs])[0]
    for row, length in enumerate(lengths):
        behind = -(-length // 32) * 32
        inputs[1][row, :, behind:] = float("nan")
        inputs[2][row, :, behind:] = float("nan")
    plan = FAMILY.plan(Task(form, NumericRules()), tuple(TILE.items()))
    assert not isinstance(plan, Rejected)
    assert relative_error(interpret(plan, form, inputs)[0], expected) < 2e-3


@pytest.mark.parametrize("queries", [1, 2, 5, 15, 16, 17, 40])
def test_a_few_queries_have_a_choice_too(queries: int):
    """Below 16 there was nothing to race: a warp takes 16 queries, and one warp was not offered."""
    task = Task(causal_form(heads=32, kv_heads=8, head_dim=128, length=queries), NumericRules())
    for effort in Effort:
        assert len(list(FAMILY.configurations(task, cuda_target(), effort))) >= 4
