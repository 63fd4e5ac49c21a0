import pytest
import torch

from tune_model.runtime.operators.allowed import OperatorError, is_view, resolve, returns_list


@pytest.mark.parametrize(
    "op",
    [
        "aten.linear.default",
        "aten.view.default",
        "aten.index_put_.default",
        "aten.scaled_dot_product_attention.default",
        "aten._softmax.default",
        "aten._to_copy.default",
        "aten.convolution.default",
        "aten.native_layer_norm.default",
        "aten.embedding.default",
        "aten.arange.start_step",
        "aten.einsum.default",
        "mkldnn._linear_pointwise.default",
        "mkl._mkl_linear.default",
        "tune_model.append_kv",
        "tune_model.cached_attention",
        "tune_model.causal_attention",
    ],
)
def test_what_inference_needs_is_allowed(op: str):
    assert callable(resolve(op))


@pytest.mark.parametrize(
    "op",
    [
        "aten.from_file.default",
        "aten.item.default",
        "aten._local_scalar_dense.default",
        "aten.set_.source_Tensor",
        "aten.resize_.default",
        "aten.nonzero.default",
        "aten.masked_select.default",
        "aten.sym_size.int",
        "aten._nested_view_from_buffer.default",
        "aten.embedding_dense_backward.default",
        "aten.to_sparse.default",
        "aten.record_stream.default",
        "mkldnn.data_ptr.default",
        "quantized.linear.default",
        "prim.device.default",
        "os.system",
        "torch.load",
        "tune_model.unknown",
        "aten.linear.no_such_overload",
        "aten.no_such_operator.default",
        "aten.add.__class__",
        "aten.__class__.__init__",
        "aten.linear.default.__call__",
        "aten/linear",
        "",
    ],
)
def test_everything_else_is_denied(op: str):
    with pytest.raises(OperatorError, match="expected an ATen operator"):
        resolve(op)


def test_views_and_lists_are_told_apart():
    assert is_view("aten.view.default")
    assert is_view("aten.add_.Tensor")
    assert not is_view("aten.add.Tensor")
    assert not is_view("tune_model.append_kv")
    assert returns_list("aten.split.Tensor")
    assert returns_list("aten.native_layer_norm.default")
    assert not returns_list("aten.linear.default")
    assert not returns_list("tune_model.cached_attention")


@pytest.mark.parametrize("op", ["aten.bmm.default", "aten.matmul.default"])
def test_outer_products_never_reach_the_kernel_that_compiles(op: str):
    """torch 2.13 sends a CUDA bmm of inner size 1 to a Triton kernel; the product here must not call bmm at all."""

    class OnCuda(torch.Tensor):
        @property
        def is_cuda(self) -> bool:
            return True

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            assert not str(func).startswith(("aten.bmm", "aten.matmul"))
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    a, b = torch.randn(2, 5, 1), torch.randn(2, 1, 3)
    out = resolve(op)(a.as_subclass(OnCuda), b.as_subclass(OnCuda))
    torch.testing.assert_close(out.as_subclass(torch.Tensor), torch.bmm(a, b))
    c, d = torch.randn(2, 5, 4), torch.randn(2, 4, 3)
    assert torch.equal(resolve(op)(c, d), torch.bmm(c, d))
