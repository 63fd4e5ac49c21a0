"""Linear layers in float32, which hostile and planted kernels are written for."""

from tune_model.runtime.program import Call, Form, Parameter, Ref, TensorType

__all__ = ["linear"]


def linear(m: int, n: int, k: int) -> Form:
    """Return `x [m, k] @ w.T` for a weight [n, k]."""
    return Form(
        "matmul",
        (),
        (
            Parameter("a0", TensorType("float32", (m, k))),
            Parameter("a1", TensorType("float32", (n, k)), "weight"),
        ),
        (Call("aten.linear.default", (Ref("a0"), Ref("a1")), results=("t0",)),),
        (Parameter("t0", TensorType("float32", (m, n))),),
    )
