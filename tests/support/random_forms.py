"""Random regions: pointwise chains, views and row reductions over operands of random shapes, types and strides."""

import random

from form_builder import FormBuilder

from tune_model.runtime.program import Form, Ref

UNARY = ("neg", "abs", "sigmoid", "tanh", "silu", "gelu", "relu", "exp", "erf", "cos")
BINARY = ("add.Tensor", "sub.Tensor", "mul.Tensor", "maximum.default", "minimum.default")
SIZES = (1, 2, 3, 4, 8, 17, 40)


class _Maker:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - tests want the same forms every time
        self.dtype = self.random.choice(("float32", "float32", "bfloat16", "float16"))
        self.shape = [self.random.choice(SIZES) for _ in range(self.random.choice((1, 2, 3)))]
        self.shape.append(self.random.choice((2, 4, 8, 18, 40)))
        self.builder = FormBuilder("pointwise")
        self.values: list[Ref] = [self.operand() for _ in range(self.random.choice((1, 2, 3)))]

    def operand(self) -> Ref:
        """Return a value of the full shape: an operand as it is, broadcast, or laid out in another order."""
        shape, b = list(self.shape), self.builder
        match self.random.choice(("full", "full", "ones", "row", "permuted")):
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
        return b.input(shape, self.dtype)

    def pick(self) -> Ref:
        return self.random.choice(self.values)

    def step(self) -> Ref:
        b, last = self.builder, self.shape[-1]
        match self.random.choice(("unary", "binary", "binary", "scalar", "where", "rotate", "reshape", "swap", "row")):
            case "unary":
                # Bounded first: a chain of exponentials has no accurate digits left.
                return b.call(f"{self.random.choice(UNARY)}.default", b.call("tanh.default", self.pick()))
            case "binary":
                return b.call(self.random.choice(BINARY), self.pick(), self.pick())
            case "scalar":
                return b.call("mul.Tensor", b.call("add.Tensor", self.pick(), 0.75), 0.5)
            case "where":
                return b.call("where.self", b.call("gt.Scalar", self.values[0], 0), self.pick(), self.pick())
            case "rotate":
                # By an even number: pairs of an oddly rotated row are no index that is linear.
                x, cut = self.pick(), 2 * self.random.randint(1, max(1, last // 2 - 1))
                if last == 2:
                    return b.call("flip.default", x, [-1])
                parts = [b.call("slice.Tensor", x, -1, cut, last), b.call("slice.Tensor", x, -1, 0, cut)]
                return b.call("cat.default", [b.call("neg.default", parts[0]), parts[1]], -1)
            case "reshape" | "swap":
                return self.view_step()
        return self.row_step()

    def view_step(self) -> Ref:
        b, x, last = self.builder, self.pick(), self.shape[-1]
        if self.random.random() < 0.5:
            turned = b.call("transpose.int", x, 0, -1)
            return b.call("transpose.int", b.call("mul.Tensor", turned, 1.5), 0, -1)
        flat = b.call("reshape.default", x, [-1, last // 2, 2])
        mixed = b.call("add.Tensor", flat, b.call("flip.default", flat, [2]))
        return b.call("reshape.default", mixed, self.shape)

    def row_step(self) -> Ref:
        b, x = self.builder, self.pick()
        self.builder.kind = "reduction"
        match self.random.choice(("softmax", "layer_norm", "rms_norm", "mean", "amax")):
            case "softmax":
                return b.call("_softmax.default", x, -1, False)
            case "layer_norm":
                width = self.shape[-1:]
                return b.call("layer_norm.default", x, width, b.input(width, self.dtype), b.input(width, self.dtype))
            case "rms_norm":
                return b.call("rms_norm.default", x, self.shape[-1:], b.input(self.shape[-1:], self.dtype), 1e-5)
            case "mean":
                return b.call("sub.Tensor", x, b.call("mean.dim", x, [-1], True))
        return b.call("sub.Tensor", x, b.call("amax.default", x, [-1], True))


def random_form(seed: int) -> Form:
    """Make a form; the same for the same seed."""
    maker = _Maker(seed)
    for _ in range(maker.random.randint(2, 6)):
        maker.values.append(maker.step())
    results = [maker.builder.call("mul.Tensor", maker.values[-1], 1.0)]
    if maker.random.random() < 0.3:
        results.append(maker.builder.call("mul.Tensor", maker.values[-2], 0.5))
    if maker.builder.kind == "reduction" and maker.random.random() < 0.3:
        results.append(maker.builder.call("sum.dim_IntList", maker.values[-1], [-1]))
    return maker.builder.form(*results)
