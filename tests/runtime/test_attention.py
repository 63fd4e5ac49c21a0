import pytest
import torch
from torch import Tensor

from tune_model.runtime.attention import append_kv, cached_attention, causal_attention

BATCH, HEADS, KV_HEADS, LENGTH, HEAD_DIM = 3, 6, 2, 32, 8
SCALE = 0.4
RULES = [(None, None), (4, None), (None, 3.0), (5, 2.0)]


def naive(  # noqa: PLR0917 (as what it checks)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    last: Tensor,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One query at a time, in float64."""
    out = torch.zeros((*q.shape[:3], v.shape[3]), dtype=torch.float64)
    zero = torch.zeros((1, v.shape[3]), dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for t in range(q.shape[2]):
                stop = int(last[b, t]) + 1
                start = 0 if window is None else max(0, stop - window)
                keys, values = k[b, h // group, start:stop].double(), v[b, h // group, start:stop].double()
                scores = keys @ q[b, h, t].double() * SCALE
                if cap is not None:
                    scores = torch.tanh(scores / cap) * cap
                if sinks is not None:
                    scores, values = torch.cat([scores, sinks[h : h + 1].double()]), torch.cat([values, zero])
                out[b, h, t] = torch.softmax(scores, 0) @ values
    return out


@pytest.mark.parametrize(("window", "softcap"), RULES)
@pytest.mark.parametrize("new", [1, 3])
def test_cached_attention_sees_each_rows_own_slots(new: int, window: int | None, softcap: float | None):
    torch.manual_seed(0)
    q = torch.randn(BATCH, HEADS, new, HEAD_DIM)
    k, v = torch.randn(2, BATCH, KV_HEADS, LENGTH, HEAD_DIM)
    first = torch.tensor([[0], [11], [LENGTH - new]])
    positions = first + torch.arange(new)
    out = cached_attention(q, k, v, positions, SCALE, window, softcap)
    torch.testing.assert_close(out.double(), naive(q, k, v, positions, window, softcap), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("window", "softcap"), [*RULES, (100, None)])
def test_causal_attention_sees_the_past(window: int | None, softcap: float | None):
    torch.manual_seed(0)
    q = torch.randn(BATCH, HEADS, 9, HEAD_DIM)
    k, v = torch.randn(2, BATCH, KV_HEADS, 9, HEAD_DIM)
    out = causal_attention(q, k, v, SCALE, window, softcap)
    last = torch.arange(9).expand(BATCH, 9)
    torch.testing.assert_close(out.double(), naive(q, k, v, last, window, softcap), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("window", "softcap"), RULES)
def test_a_sink_takes_weight_and_gives_nothing(window: int | None, softcap: float | None):
    torch.manual_seed(0)
    q, sinks = torch.randn(BATCH, HEADS, 4, HEAD_DIM), torch.randn(HEADS)
    k, v = torch.randn(2, BATCH, KV_HEADS, 4, HEAD_DIM)
    last = torch.arange(4).expand(BATCH, 4)
    expected = naive(q, k, v, last, window, softcap, sinks)
    assert not torch.allclose(expected, naive(q, k, v, last, window, softcap), atol=1e-2)
    fresh = causal_attention(q, k, v, SCALE, window, softcap, sinks)
    torch.testing.assert_close(fresh.double(), expected, atol=1e-5, rtol=1e-5)
    over_cache = cached_attention(q, k, v, last, SCALE, window, softcap, sinks)
    torch.testing.assert_close(over_cache.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("window", "softcap"), RULES)
def test_values_may_have_a_head_dim_of_their_own(window: int | None, softcap: float | None):
    """Latent attention (DeepSeek) has longer keys than values; a result over a cache was given the keys' length."""
    torch.manual_seed(0)
    q, k = torch.randn(BATCH, HEADS, 2, HEAD_DIM), torch.randn(BATCH, KV_HEADS, LENGTH, HEAD_DIM)
    v = torch.randn(BATCH, KV_HEADS, LENGTH, HEAD_DIM - 3)
    positions = torch.tensor([[3, 4], [0, 1], [LENGTH - 2, LENGTH - 1]])
    out = cached_attention(q, k, v, positions, SCALE, window, softcap)
    torch.testing.assert_close(out.double(), naive(q, k, v, positions, window, softcap), atol=1e-5, rtol=1e-5)
    fresh = causal_attention(torch.randn(BATCH, HEADS, LENGTH, HEAD_DIM), k, v, SCALE, window, softcap)
    assert fresh.shape == (BATCH, HEADS, LENGTH, HEAD_DIM - 3)


def test_joining_heads_after_attention_is_free():
    q = torch.randn(BATCH, HEADS, 5, HEAD_DIM)
    k, v = torch.randn(2, BATCH, KV_HEADS, LENGTH, HEAD_DIM)
    positions = torch.arange(5).expand(BATCH, 5)
    cached = cached_attention(q, k, v, positions, 1.0)
    causal = causal_attention(q, k[:, :, :5], v[:, :, :5], 1.0)
    for out in (cached, causal):
        assert out.transpose(1, 2).is_contiguous()


def test_append_writes_each_rows_own_slots_and_nothing_else():
    k_cache, v_cache = torch.zeros(2, BATCH, KV_HEADS, LENGTH, HEAD_DIM)
    k, v = torch.randn(2, BATCH, KV_HEADS, 2, HEAD_DIM)
    positions = torch.tensor([[0, 1], [30, 31], [7, 3]])
    append_kv(k_cache, v_cache, k, v, positions)
    for cache, new in ((k_cache, k), (v_cache, v)):
        expected = torch.zeros_like(cache)
        for b in range(BATCH):
            for t in range(2):
                expected[b, :, positions[b, t]] = new[b, :, t]
        assert torch.equal(cache, expected)


def test_append_reaches_the_cache_through_a_slice_of_its_rows():
    cache = torch.zeros(8, KV_HEADS, LENGTH, HEAD_DIM)
    k = torch.randn(1, KV_HEADS, 1, HEAD_DIM)
    append_kv(cache[5:6], cache[5:6].clone(), k, k, torch.tensor([[2]]))
    assert torch.equal(cache[5, :, 2], k[0, :, 0])
    assert int((cache != 0).sum()) == k.numel()
