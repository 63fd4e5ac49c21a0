import pytest
import torch

from tune_model.runtime.execution.direct import _BINDINGS, direct_binding
from tune_model.runtime.operators.allowed import resolve

torch.manual_seed(0)
X, Y = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
M, W, B = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
Q, K = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
IMAGE, FILTER = torch.randn(1, 3, 8, 8), torch.randn(4, 3, 2, 2)

SAMPLES: dict[str, list[tuple[tuple[object, ...], dict[str, object]]]] = {
    "aten.add.Tensor": [((X, Y), {}), ((X, Y), {"alpha": 2}), ((X, 1.5), {}), ((X.int(), 2.5), {})],
    "aten.addmm.default": [((B, M, W.T), {}), ((B, M, W.T), {"beta": 0.5, "alpha": 2})],
    "aten.bitwise_and.Tensor": [((X > 0, Y > 0), {})],
    "aten.cat.default": [(([X, Y], 1), {}), (([X, Y],), {}), (([X, Y], -1), {})],
    "aten.contiguous.default": [((X.transpose(0, 1),), {}), ((X,), {})],
    "aten.conv2d.default": [((IMAGE, FILTER, None, [2, 2], [1, 1], [1, 1], 1), {}), ((IMAGE, FILTER, B[:4]), {})],
    "aten.div.Tensor": [((X, Y), {}), ((X, 3.0), {}), ((X.int(), 2), {})],
    "aten.embedding.default": [((W, torch.tensor([[0, 4]])), {}), ((W, torch.tensor([1]), 1, False, False), {})],
    "aten.expand.default": [((X[:, :1], [2, 3, 4]), {}), ((X[:, :1], [-1, 3, -1]), {})],
    "aten.gelu.default": [((X,), {}), ((X,), {"approximate": "tanh"})],
    "aten.index_select.default": [((X, 1, torch.tensor([2, 0])), {})],
    "aten.layer_norm.default": [
        ((X, [4], B[:4], W[0]), {}),
        ((X, [4], None, None, 1e-3), {}),
        ((X, [3, 4], M, M, 1e-5, False), {}),
    ],
    "aten.linear.default": [((X, W), {}), ((X, W, B), {}), ((M, W, None), {})],
    "aten.mm.default": [((M, W.T), {})],
    "aten.mul.Tensor": [((X, Y), {}), ((X, 0.5), {}), ((X.half(), 2), {})],
    "aten.neg.default": [((X,), {})],
    "aten.permute.default": [((X, [2, 0, 1]), {}), ((X, [-1, 0, 1]), {})],
    "aten.relu.default": [((X,), {})],
    "aten.reshape.default": [((X.transpose(0, 1), [6, 4]), {}), ((X, [-1]), {})],
    "aten.rsqrt.default": [((X.abs(),), {})],
    "aten.scaled_dot_product_attention.default": [
        ((Q, Q, Q), {}),
        ((Q, Q, Q, None, 0.0, True), {}),
        ((Q, K, K), {"enable_gqa": True, "scale": 0.3}),
        ((Q, Q, Q, torch.randn(3, 3)), {"scale": None}),
    ],
    "aten.select.int": [((X, 1, 0), {}), ((X, -1, -1), {})],
    "aten.sigmoid.default": [((X,), {})],
    "aten.silu.default": [((X,), {})],
    "aten.softmax.int": [((X, -1), {}), ((X.half(), 1, torch.float32), {})],
    "aten.sub.Tensor": [((X, Y), {}), ((X, 1.0), {"alpha": 2})],
    "aten.tanh.default": [((X,), {})],
    "aten.transpose.int": [((X, 0, 1), {}), ((X, -1, -2), {})],
    "aten.unsqueeze.default": [((X, 0), {}), ((X, -1), {})],
    "aten.view.default": [((X, [6, 4]), {}), ((X, [2, -1]), {})],
    "aten.where.self": [((X > 0, X, Y), {}), ((X > 0, X.double(), Y), {})],
}


def test_every_binding_has_samples():
    assert set(SAMPLES) == set(_BINDINGS)


@pytest.mark.parametrize("op", sorted(SAMPLES))
def test_a_direct_binding_does_what_the_operator_does(op: str):
    for args, kwargs in SAMPLES[op]:
        direct = direct_binding(op, frozenset(kwargs))
        assert direct is not None
        seen, expected = direct(*args, **kwargs), resolve(op)(*args, **kwargs)
        assert seen.dtype == expected.dtype
        assert seen.stride() == expected.stride()
        torch.testing.assert_close(seen, expected, rtol=0, atol=0)


def test_unknown_keywords_and_operators_go_the_long_way():
    assert direct_binding("aten.contiguous.default", frozenset({"memory_format"})) is None
    assert direct_binding("aten.from_file.default", frozenset()) is None
