import math

import pytest
import torch
from attention_forms import decode_form, turned_form
from form_runs import fill, relative_error, run_body
from interpreted import interpret

from tune_model.extract.task import NumericRules, Task
from tune_model.tune.candidate import Rejected
from tune_model.tune.families.triton_decode_attention import FAMILY
from tune_model.tune.triton.kernels import decode_attention


def check(form, config, tolerance, positions=None, change=None):
    inputs = fill(form)
    if change is not None:
        change(inputs)
    place = [p.name for p in form.parameters].index("a4")
    if positions is not None:
        inputs[place] = torch.tensor(positions)[:, None]
    expected_inputs = [t.double() if t.is_floating_point() else t.clone() for t in inputs]
    # Exact results of the same (rounded) inputs; the cache holds garbage beyond each row's position.
    expected = run_body(form, expected_inputs)[0]
    plan = FAMILY.plan(Task(form, NumericRules()), tuple(config.items()))
    mine = [t.clone() for t in inputs]
    actual = interpret(plan, form, mine)[0]
    assert relative_error(actual, expected) < tolerance
    for cache in (0, 1):
        assert torch.equal(mine[cache].double(), expected_inputs[cache].double())


TILE = {"num_warps": 4, "num_stages": 2, "last_joins": False, "pdl": False, "prefetch": False}


@pytest.mark.parametrize(("splits", "last_joins"), [(1, False), (5, False), (16, False), (4, True), (16, True)])
def test_ragged_rows_at_the_edges_of_blocks(splits: int, last_joins: bool):
    form = decode_form(batch=6, heads=4, kv_heads=1)
    config = {"splits": splits, "block_n": 32, **TILE, "last_joins": last_joins}
    check(form, config, 2e-3, positions=[0, 1, 31, 32, 63, 199])


def test_float32_is_exact_to_float32():
    check(decode_form(batch=2, dtype="float32", head_dim=32), {"splits": 3, "block_n": 16, **TILE}, 1e-6)


def test_bfloat16():
    check(decode_form(dtype="bfloat16"), {"splits": 2, "block_n": 64, **TILE}, 1e-2)


@pytest.mark.parametrize(("window", "softcap"), [(40, None), (None, 20.0), (17, 5.0)])
def test_windows_and_soft_caps(window, softcap):
    form = decode_form(batch=4, window=window, softcap=softcap)
    check(form, {"splits": 3, "block_n": 16, **TILE}, 2e-3, positions=[3, 40, 41, 180])


@pytest.mark.parametrize(("splits", "last_joins"), [(1, False), (4, False), (4, True)])
def test_sinks_count_once(splits: int, last_joins: bool):
    form = decode_form(batch=4, heads=6, kv_heads=2, window=70, softcap=20.0, sinks=True)

    def large(inputs: list[torch.Tensor]) -> None:
        inputs[6][:] = torch.tensor([-40.0, -1.0, 0.0, 2.0, 9.0, 60.0])

    config = {"splits": splits, "block_n": 32, **TILE, "last_joins": last_joins}
    check(form, config, 2e-3, positions=[0, 31, 64, 199], change=large)
    check(decode_form(batch=2, append=False, sinks=True), config, 2e-3)


def test_a_head_dim_that_is_no_power_of_two_and_one_head_per_group():
    form = decode_form(heads=3, kv_heads=3, head_dim=80)
    for last in (False, True):
        check(form, {"splits": 2, "block_n": 32, **TILE, "last_joins": last}, 2e-3)


def test_groups_that_are_no_power_of_two_are_joined_by_the_last():
    form = decode_form(batch=2, heads=6, kv_heads=2)
    check(form, {"splits": 8, "block_n": 16, **TILE, "last_joins": True}, 2e-3, positions=[17, 150])


def test_a_cache_that_is_appended_elsewhere():
    form = decode_form(append=False)
    inputs = fill(form)
    expected = run_body(form, [t.double() if t.is_floating_point() else t for t in inputs])[0]
    config = {"splits": 2, "block_n": 32, **TILE}
    actual = interpret(FAMILY.plan(Task(form, NumericRules()), tuple(config.items())), form, inputs)[0]
    assert relative_error(actual, expected) < 2e-3


def test_the_whole_cache_in_use():
    form = decode_form(batch=1, length=64)
    check(form, {"splits": 4, "block_n": 16, **TILE}, 2e-3, positions=[63])


def check_turned(form, config, tolerance, positions):
    """As `check`; the new keys are made in float32 and rounded once, so the cache is near the exact one, not equal."""
    inputs = fill(form)
    place = [p.name for p in form.parameters].index("a4")
    inputs[place] = torch.tensor(positions)[:, None]
    exact = [t.double() if t.is_floating_point() else t.clone() for t in inputs]
    expected = run_body(form, exact)[0]
    plan = FAMILY.plan(Task(form, NumericRules()), tuple(config.items()))
    assert not isinstance(plan, Rejected), plan
    mine = [*(t.clone() for t in inputs[:2]), *inputs[2:]]  # a clone of a strided part is contiguous
    actual = interpret(plan, form, mine)[0]
    assert relative_error(actual, expected) < tolerance
    for cache in (0, 1):
        for row, position in enumerate(positions):
            written = mine[cache][row, :, position], exact[cache][row, :, position]
            assert relative_error(*written) < tolerance
            untouched = torch.ones(mine[cache].shape[2], dtype=torch.bool)
            untouched[position] = False
            assert torch.equal(mine[cache][row][:, untouched], inputs[cache][row][:, untouched])


@pytest.mark.parametrize("normal", [False, True])
@pytest.mark.parametrize(("splits", "last_joins"), [(1, False), (5, False), (4, True)])
def test_heads_are_turned_where_they_are_used(splits: int, last_joins: bool, normal: bool):
    form = turned_form(batch=4, normal=normal)
    config = {"splits": splits, "block_n": 32, **TILE, "last_joins": last_joins}
    check_turned(form, config, 2e-3, [0, 31, 64, 199])


@pytest.mark.parametrize("normal", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 3, "kv_heads": 1, "head_dim": 80},
        {"heads": 4, "kv_heads": 4, "head_dim": 32},
        {"batch": 1, "heads": 8, "kv_heads": 1},
        {"heads": 1, "kv_heads": 1},
    ],
)
def test_heads_of_every_number_and_size_are_turned(sizes: dict[str, int], normal: bool):
    form = turned_form(**{"batch": 2, **sizes}, normal=normal)
    batch = form.results[0].type.shape[0]
    check_turned(form, {"splits": 2, "block_n": 32, **TILE}, 2e-3, [77, 5][:batch])


def test_turned_heads_in_float32_are_exact_to_float32():
    form = turned_form(batch=2, dtype="float32", head_dim=32)
    check_turned(form, {"splits": 3, "block_n": 16, **TILE}, 1e-6, [100, 3])


def test_a_broken_head_breaks_no_other():
    """NaN in one query head, and an infinity in another row's new key, reach what depends on them alone."""
    form = turned_form(batch=3, heads=4, kv_heads=2, head_dim=32)
    inputs = fill(form)
    inputs[4] = torch.tensor([[9], [40], [70]])
    inputs[2][0, 1, 0, 5] = float("nan")
    inputs[2][2, 4, 0, 7] = float("inf")
    expected = run_body(form, [t.double() if t.is_floating_point() else t.clone() for t in inputs])[0]
    plan = FAMILY.plan(Task(form, NumericRules()), tuple({"splits": 2, "block_n": 32, **TILE}.items()))
    assert not isinstance(plan, Rejected), plan
    actual = interpret(plan, form, inputs)[0]
    finite = torch.isfinite(expected)
    assert finite.all(-1).sum() == 3 * 4 - 1 - 2
    assert torch.equal(torch.isfinite(actual), finite)
    assert relative_error(actual[finite], expected[finite]) < 2e-3


@pytest.mark.parametrize("last_joins", [False, True])
def test_an_infinite_new_value_reaches_its_own_column_alone(last_joins: bool):
    form = decode_form(batch=2, heads=4, kv_heads=2, head_dim=32)
    inputs = fill(form)
    inputs[4] = torch.tensor([[9], [70]])
    inputs[3][1, 0, 0, 5] = float("inf")
    expected = run_body(form, [t.double() if t.is_floating_point() else t.clone() for t in inputs])[0]
    config = {"splits": 2, "block_n": 32, **TILE, "last_joins": last_joins}
    plan = FAMILY.plan(Task(form, NumericRules()), tuple(config.items()))
    assert not isinstance(plan, Rejected), plan
    actual = interpret(plan, form, inputs)[0]
    infinite = torch.isposinf(expected)
    assert infinite.sum() == 2
    assert torch.equal(torch.isposinf(actual), infinite)
    assert relative_error(actual[~infinite], expected[~infinite]) < 2e-3


@pytest.mark.parametrize("last_joins", [False, True])
@pytest.mark.parametrize("where", ["the new token", "a block of the cache"])
def test_scores_of_minus_infinity_weigh_nothing(where: str, last_joins: bool):
    """A split that had no other score was 0 / 0, and so the whole row was NaN."""
    form = decode_form(batch=1, heads=4, kv_heads=2, head_dim=32)
    inputs = fill(form)
    inputs[4] = torch.tensor([[32]])
    inputs[5][..., 7] = 1.0
    if where == "the new token":
        inputs[2][0, :, 0, 7] = float("-inf")
    else:
        inputs[0][0, :, :32, 7] = float("-inf")
    expected = run_body(form, [t.double() if t.is_floating_point() else t.clone() for t in inputs])[0]
    assert bool(torch.isfinite(expected).all())
    config = {"splits": 2, "block_n": 32, **TILE, "last_joins": last_joins}
    plan = FAMILY.plan(Task(form, NumericRules()), tuple(config.items()))
    assert not isinstance(plan, Rejected), plan
    assert relative_error(interpret(plan, form, inputs)[0], expected) < 2e-3


@pytest.mark.parametrize("last_joins", [False, True])
def test_a_row_without_any_finite_score_is_zero_as_in_aten(last_joins: bool):
    form = decode_form(batch=2, heads=2, kv_heads=1, head_dim=32)
    inputs = fill(form)
    inputs[4] = torch.tensor([[40], [40]])
    inputs[5][0, :, 0, 7] = 1.0
    inputs[0][0, :, :, 7] = inputs[2][0, :, 0, 7] = float("-inf")
    expected = run_body(form, [t.double() if t.is_floating_point() else t.clone() for t in inputs])[0]
    for splits in (2,) if last_joins else (1, 2):
        config = {"splits": splits, "block_n": 32, **TILE, "last_joins": last_joins}
        plan = FAMILY.plan(Task(form, NumericRules()), tuple(config.items()))
        assert not isinstance(plan, Rejected), plan
        actual = interpret(plan, form, [t.clone() for t in inputs])[0]
        assert not bool(actual[0].any())
        assert relative_error(actual, expected) < 2e-3


def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Note which pieces of memory the second-level cache is asked for, where each begins and ends."""
    asked: list[tuple[int, int]] = []

    def ask(pointers, sizes, wanted, count) -> None:
        there = wanted.handle.data
        assert pointers.handle.data.shape == sizes.handle.data.shape == (int(count),)
        pieces = zip(pointers.handle.data[there], sizes.handle.data[there], strict=True)
        asked.extend((int(begin), int(begin) + int(size)) for begin, size in pieces)

    monkeypatch.setattr(decode_attention, "ask", ask)
    return asked


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("old", [-1, 0, 31, 32, 199, 200, 2**31 - 1, 2**40 + 7, -(2**40)])
def test_an_old_position_asks_for_what_is_in_the_cache_and_decides_nothing(
    monkeypatch: pytest.MonkeyPatch, old: int, window: int | None
):
    """Before the predecessor is done, positions may be the last step's, or nothing that was ever written."""
    form = decode_form(batch=2, heads=4, kv_heads=2, head_dim=32, window=window)
    inputs = fill(form)
    caches = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in inputs[:2]]
    positions = inputs[4].copy_(torch.tensor([[150], [100]])).clone()
    expected = run_body(form, [t.double() if t.is_floating_point() else t.clone() for t in inputs])[0]
    asked = asked_for(monkeypatch)
    monkeypatch.setattr(decode_attention, "wait_for_predecessor", lambda _pdl: inputs[4].copy_(positions))
    config = {"splits": 4, "block_n": 16, **TILE, "prefetch": True}
    plan = FAMILY.plan(Task(form, NumericRules()), tuple(config.items()))
    assert not isinstance(plan, Rejected), plan
    inputs[4].fill_(old)
    assert relative_error(interpret(plan, form, inputs)[0], expected) < 2e-3
    assert asked
    assert all(any(low <= begin < end <= high for low, high in caches) for begin, end in asked)
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize("row", [32, 48], ids=["dense", "apart"])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("last", [0, 15, 16, 100, 199])
def test_the_first_block_of_every_split_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, last: int, window: int | None, row: int
):
    form = decode_form(batch=2, heads=4, kv_heads=2, head_dim=32, window=window, row=row)
    inputs = fill(form)
    inputs[4].fill_(last)
    asked = asked_for(monkeypatch)
    config = {"splits": 4, "block_n": 16, **TILE, "prefetch": True}
    plan = FAMILY.plan(Task(form, NumericRules()), tuple(config.items()))
    assert not isinstance(plan, Rejected), plan
    interpret(plan, form, inputs)
    assert sorted(asked) == sorted(requests_for(inputs[:2], last, window, splits=4, block_n=16))


def requests_for(caches: list[torch.Tensor], last: int, window: int | None, splits: int, block_n: int):
    """Yield one request for a block of a dense cache, one for each slot of another."""
    start = 0 if window is None else max(last - window + 1, 0)
    span = math.ceil(math.ceil((last + 1 - start) / block_n) / splits) * block_n
    for cache in caches:
        size = cache.shape[3] * cache.element_size()
        for head in (cache[row, head] for row in range(cache.shape[0]) for head in range(cache.shape[1])):
            for low in range(start, last + 1, span):
                keys = head[low : min(low + block_n, low + span, last + 1)]
                if cache.stride(2) == cache.shape[3]:
                    yield keys.data_ptr(), keys.data_ptr() + len(keys) * size
                else:
                    yield from ((key.data_ptr(), key.data_ptr() + size) for key in keys)
