"""Random regions: pointwise chains, views and reductions over operands of random shapes, types and strides."""

import random

import torch
from form_builder import FormBuilder

from tune_model.runtime.program import Form, Ref, ValueRange

UNARY = ("neg", "abs", "sigmoid", "tanh", "silu", "gelu", "relu", "exp", "erf", "cos", "sin", "expm1", "hardswish")
BINARY = ("add.Tensor", "sub.Tensor", "mul.Tensor", "maximum.default", "minimum.default")
SIZES = (1, 2, 3, 4, 8, 17, 40)
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class _Maker:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - tests want the same forms every time
        self.dtype = self.random.choice(("float32", "float32", "bfloat16", "float16"))
        self.shape = [self.random.choice(SIZES) for _ in range(self.random.choice((1, 2, 3)))]
        self.shape.append(self.random.choice((2, 4, 8, 18, 40)))
        self.builder = FormBuilder("pointwise")
        self.dims = self._reduced_dims()
        self.values: list[Ref] = [self.operand() for _ in range(self.random.choice((1, 2, 3)))]
        self.first = self.values[0]
        """An operand as it is: whoever asks which of its elements is larger gets the same answer in every precision."""

    def _reduced_dims(self) -> list[int]:
        """All reductions of a region run over the same dims: mostly the last, sometimes others."""
        rank = len(self.shape)
        if self.random.random() < 0.65:
            return [rank - 1]
        return sorted(self.random.sample(range(rank), self.random.randint(1, rank)))

    def operand(self) -> Ref:
        """Return a value of the full shape: as it is, broadcast, laid out in another order, or looked up in a table."""
        shape, b = list(self.shape), self.builder
        match self.random.choice(("full", "full", "ones", "row", "permuted", "table", "part")):
            case "ones":
                for d in range(len(shape)):
                    shape[d] = self.random.choice((1, shape[d]))
                return b.call("expand.default", b.input(shape, self.dtype), self.shape)
            case "row":
                return b.call("expand.default", b.input(shape[-1:], self.dtype), self.shape)
            case "permuted":
                order = self.random.sample(range(len(shape)), len(shape))
                strides, stride = [0] * len(shape), 1
                for d in reversed(order):
                    strides[d] = stride
                    stride *= shape[d]
                return b.input(shape, self.dtype, strides)
            case "table":
                table = b.input((11, shape[-1]), self.dtype)
                return b.call("embedding.default", table, b.input(shape[:-1], "int64", values=ValueRange(0, 10)))
            case "part":
                # Columns of a wider matrix, as the parts of a merged projection are.
                wide = self.random.choice((2, 3)) * shape[-1]
                strides, stride = [0] * len(shape), wide
                strides[-1] = 1
                for d in reversed(range(len(shape) - 1)):
                    strides[d] = stride
                    stride *= shape[d]
                return b.input(shape, self.dtype, strides)
        return b.input(shape, self.dtype)

    def pick(self) -> Ref:
        return self.random.choice(self.values)

    def step(self) -> Ref:
        steps = (self.simple_step, self.choice_step, self.rotate_step, self.view_step, self.row_step, self.safe_step)
        return self.random.choice((*steps, self.cast_step, self.simple_step, self.simple_step, self.row_step))()

    def simple_step(self) -> Ref:
        b = self.builder
        match self.random.choice(("unary", "binary", "binary", "scalar")):
            case "unary":
                # Bounded first: a chain of exponentials has no accurate digits left.
                return b.call(f"{self.random.choice(UNARY)}.default", b.call("tanh.default", self.pick()))
            case "binary":
                return b.call(self.random.choice(BINARY), self.pick(), self.pick())
        return b.call("mul.Tensor", b.call("add.Tensor", self.pick(), 0.75), 0.5)

    def choice_step(self) -> Ref:
        """Choose by an operand, by a mask, or between limits."""
        b = self.builder
        match self.random.choice(("compare", "mask", "clamp")):
            case "compare":
                return b.call("where.self", b.call("gt.Scalar", self.first, 0), self.pick(), self.pick())
            case "mask":
                mask = b.input((*[1] * (len(self.shape) - 2), *self.shape[-2:]), "bool")
                return b.call("masked_fill.Scalar", self.pick(), mask, -0.5)
        return b.call("clamp.default", self.pick(), -0.7, 0.9)

    def safe_step(self) -> Ref:
        """Operators with poles and branch points, away from them."""
        b = self.builder
        away = b.call("add.Tensor", b.call("abs.default", self.pick()), 0.75)
        match self.random.choice(("div", "sqrt", "rsqrt", "log", "log1p", "reciprocal", "pow")):
            case "div":
                return b.call("div.Tensor", self.pick(), away)
            case "pow":
                return b.call("pow.Tensor_Scalar", away, self.random.choice((2, 3, 0.5, -1, 1.7)))
            case name:
                return b.call(f"{name}.default", away)

    def cast_step(self) -> Ref:
        """Compute a part in float32, or round on purpose."""
        b = self.builder
        if self.dtype == "float32":
            rounded = b.call("_to_copy.default", self.pick(), dtype=torch.bfloat16)
            return b.call("_to_copy.default", rounded, dtype=torch.float32)
        wide = b.call("_to_copy.default", self.pick(), dtype=torch.float32)
        return b.call("_to_copy.default", b.call("mul.Tensor", wide, 1.25), dtype=HALVES[self.dtype])

    def rotate_step(self) -> Ref:
        # By an even number: pairs of an oddly rotated row are no index that is linear.
        b, last, x = self.builder, self.shape[-1], self.pick()
        cut = 2 * self.random.randint(1, max(1, last // 2 - 1))
        if last == 2:
            return b.call("flip.default", x, [-1])
        parts = [b.call("slice.Tensor", x, -1, cut, last), b.call("slice.Tensor", x, -1, 0, cut)]
        return b.call("cat.default", [b.call("neg.default", parts[0]), parts[1]], -1)

    def view_step(self) -> Ref:
        b, x, last = self.builder, self.pick(), self.shape[-1]
        if self.random.random() < 0.5:
            turned = b.call("transpose.int", x, 0, -1)
            return b.call("transpose.int", b.call("mul.Tensor", turned, 1.5), 0, -1)
        flat = b.call("reshape.default", x, [-1, last // 2, 2])
        mixed = b.call("add.Tensor", flat, b.call("flip.default", flat, [2]))
        return b.call("reshape.default", mixed, self.shape)

    def row_step(self) -> Ref:
        self.builder.kind = "reduction"
        last = self.dims == [len(self.shape) - 1]
        return self.norm_step() if last and self.random.random() < 0.5 else self.value_step()

    def norm_step(self) -> Ref:
        b, x, width = self.builder, self.pick(), self.shape[-1:]
        match self.random.choice(("_softmax", "_log_softmax", "layer_norm", "rms_norm")):
            case "layer_norm":
                return b.call("layer_norm.default", x, width, b.input(width, self.dtype), b.input(width, self.dtype))
            case "rms_norm":
                return b.call("rms_norm.default", x, width, b.input(width, self.dtype), 1e-5)
            case name:
                return b.call(f"{name}.default", x, -1, False)

    def value_step(self) -> Ref:
        """Combine a value with what one reduction gives per row."""
        b, x = self.builder, self.pick()
        match self.random.choice(("mean", "sum", "var", "norm", "amax", "amin", "logsumexp")):
            case "mean":
                return b.call("sub.Tensor", x, b.call("mean.dim", x, self.dims, True))
            case "sum":
                # Of what does not cancel: a sum near zero has as many digits as luck gives it.
                total = b.call("sum.dim_IntList", b.call("abs.default", x), self.dims, True)
                return b.call("mul.Tensor", total, b.call("mul.Tensor", x, 0.05))
            case "var":
                spread = b.call("var.correction", b.call("tanh.default", x), self.dims, correction=0, keepdim=True)
                return b.call("add.Tensor", x, spread)
            case "norm":
                size = b.call("linalg_vector_norm.default", x, self.random.choice((1, 2, 3)), self.dims, True)
                return b.call("div.Tensor", x, b.call("add.Tensor", size, 1.0))
            case name:
                return b.call("sub.Tensor", x, b.call(f"{name}.default", x, self.dims, True))

    def row_results(self) -> list[Ref]:
        """Return results with one element per row."""
        b = self.builder
        found = [b.call("sum.dim_IntList", b.call("abs.default", self.values[-1]), self.dims)]
        if len(self.dims) == 1 and self.random.random() < 0.5:
            found.append(b.call(f"{self.random.choice(('argmax', 'argmin'))}.default", self.first, self.dims[0]))
        if self.random.random() < 0.3:
            found.append(b.call("any.dims", b.call("gt.Scalar", self.first, 1.5), self.dims))
        return found


def random_form(seed: int) -> Form:
    """Make a form; the same for the same seed."""
    maker = _Maker(seed)
    for _ in range(maker.random.randint(2, 6)):
        maker.values.append(maker.step())
    results = [maker.builder.call("mul.Tensor", maker.values[-1], 1.0)]
    if maker.random.random() < 0.3:
        results.append(maker.builder.call("mul.Tensor", maker.values[-2], 0.5))
    if maker.builder.kind == "reduction" and maker.random.random() < 0.3:
        results += maker.row_results()
    return maker.builder.form(*results)
