"""Taking a matmul form apart at its matmul: the call, and what comes after it as ATen calls or as one loop nest.

The nest reads the product where the library left it and, where it reads and writes the same places, writes its result
over it.
"""

from collections.abc import Mapping

import msgspec

from tune_model.runtime.expression import Dim, rename, symbols
from tune_model.runtime.kernel import Multiple, Requirement, Within
from tune_model.runtime.program import Arg, Call, Form, Items, Parameter, Ref, TensorType
from tune_model.tune.candidate import Rejected
from tune_model.tune.loops.body import Body, Step, Unsupported, read_body
from tune_model.tune.loops.ir import Load, LoopNest
from tune_model.tune.loops.lower import lower
from tune_model.tune.loops.rounding import elide_rounding

__all__ = ["MatmulParts", "RestKernel", "lower_halves", "lower_rest", "take_apart"]

_LINEAR = frozenset({"aten.linear", "aten.mm", "aten.addmm"})


class MatmulParts(msgspec.Struct, frozen=True):
    """A matmul form at its matmul.

    Attributes:
        call: The matmul.
        op: Its name without the overload.
        product: Name of what it makes.
        type: Of the product, contiguous.
        a: Slot of the left operand, of which the product has the rows.
        weight: Slot of the right operand, stored [n, k].
        bias: Slot of a bias that the call adds itself.
        before: Calls that must run first (views of operands).
        rest: Calls after it.
        k: Length of the dot products.
    """

    call: Call
    op: str
    product: str
    type: TensorType
    a: str
    weight: str
    bias: str | None
    before: tuple[Call, ...]
    rest: tuple[Call, ...]
    k: int

    @property
    def m(self) -> int:
        """Rows of the product."""
        return int(self.type.shape[0])

    @property
    def n(self) -> int:
        """Columns of the product."""
        return int(self.type.shape[1])


def take_apart(form: Form) -> MatmulParts | Rejected:
    """Split a concrete form at its only linear layer.

    Returns:
        The parts, or why not: no or several matmuls, operands that are not the form's own, a weight that is not [n, k].
    """
    try:
        body = read_body(form)
    except Unsupported as reason:
        return Rejected("unsupported", str(reason))
    at = [k for k, step in enumerate(body.steps) if step.op in _LINEAR]
    if len(at) != 1:
        return Rejected("unsupported", f"{len(at)} linear layers; expected one")
    step, call = body.steps[at[0]], form.body[at[0]]
    product = step.results[0]
    if product is None or len(body.values[product].shape) != 2:
        return Rejected("unsupported", "a product that is not a matrix")
    operands = _operands(form, body, step)
    if isinstance(operands, Rejected):
        return operands
    a, weight, bias = operands
    value = body.values[product]
    return MatmulParts(
        call,
        step.op,
        product,
        TensorType(value.dtype, value.shape),
        a,
        weight,
        bias,
        form.body[: at[0]],
        form.body[at[0] + 1 :],
        body.values[a].shape[-1],
    )


def _operands(form: Form, body: Body, step: Step) -> tuple[str, str, str | None] | Rejected:
    """Return the slots of a, of the weight as [n, k], and of the bias."""
    arguments = step.arguments
    if step.op == "aten.linear":
        a, weight, bias = arguments["input"].name, arguments["weight"].name, arguments.get("bias")
    else:
        a = arguments["self" if step.op == "aten.mm" else "mat1"].name
        transposed = body.producers.get(arguments["mat2"].name)
        if transposed is None or transposed[0].op not in {"aten.t", "aten.transpose", "aten.permute"}:
            return Rejected("unsupported", "a weight stored [k, n]")
        weight = transposed[0].arguments["self"].name
        bias = arguments["self"] if step.op == "aten.addmm" else None
        if step.op == "aten.addmm" and (arguments["alpha"], arguments["beta"]) != (1, 1):
            return Rejected("unsupported", "a scaled addmm")
    slots = {p.name for p in form.parameters}
    if a not in slots or weight not in slots or (bias is not None and bias.name not in slots):
        return Rejected("unsupported", "operands that are computed in the form")
    if bias is not None and len(body.values[bias.name].shape) != 1:
        return Rejected("unsupported", "a bias that is not a vector")
    return a, weight, bias.name if bias is not None else None


class RestKernel(msgspec.Struct, frozen=True):
    """The rest of a matmul form as a nest.

    Attributes:
        nest: Over the product and the form's other slots.
        form: The rest as a pointwise form: every slot that the nest or its sizes name, the product among them.
        requires: For other sizes, in terms of the form's own slots.
        names: What the launch calls each of the nest's slots.
        product: What the matmul call must name its result.
    """

    nest: LoopNest
    form: Form
    requires: tuple[Requirement, ...]
    names: dict[str, str]
    product: str


def lower_rest(form: Form, parts: MatmulParts) -> RestKernel | Rejected:
    """Lower what follows the matmul; there must be something."""
    if not parts.rest:
        return Rejected("unsupported", "nothing follows the matmul")
    if parts.before and any(_reads(c) & {r for b in parts.before for r in b.results if r} for c in parts.rest):
        return Rejected("unsupported", "the rest reads a view of an operand")
    found = _lower_over(form, parts, (Parameter(parts.product, parts.type),), parts.rest)
    if isinstance(found, Rejected):
        return found
    over = _written_over(found.nest, parts, form)
    return msgspec.structs.replace(found, names={parts.product: over or parts.product}, product=over or parts.product)


def lower_halves(form: Form, parts: MatmulParts) -> tuple[RestKernel, tuple[str, str]] | Rejected:
    """Lower what follows the matmul as if both halves of its columns were products of their own.

    Returns:
        The rest, and what the matmuls of the first and the second half of the weight's rows must name their results.
    """
    if parts.bias is not None or parts.before or parts.op != "aten.linear":
        return Rejected("unsupported", "a bias, or operands that are not the form's own")
    names = (f"{parts.product}h0", f"{parts.product}h1")
    half = parts.n // 2
    renamed: dict[str, str] = {}
    rest: list[Call] = []
    for call in parts.rest:
        side = _half(call, parts)
        if side is None:
            rest.append(_with_names(call, renamed))
        else:
            renamed[call.results[0] or ""] = names[side]
    if set(renamed.values()) != set(names) or any(parts.product in _reads(call) for call in rest):
        return Rejected("unsupported", "not the two halves of a product")
    type_ = TensorType(parts.type.dtype, (parts.m, half))
    found = _lower_over(form, parts, tuple(Parameter(name, type_) for name in names), tuple(rest))
    return found if isinstance(found, Rejected) else (found, names)


def _half(call: Call, parts: MatmulParts) -> int | None:
    """Return which half of the product's columns a call takes, if it takes one."""
    if call.op != "aten.slice.Tensor" or call.kwargs or call.args[:1] != (Ref(parts.product),):
        return None
    axis, *ends = call.args[1:]
    half = parts.n // 2
    if axis not in {1, -1} or parts.n % 2 or ends not in ([0, half], [half, parts.n]):
        return None
    return 0 if ends[0] == 0 else 1


def _with_names(call: Call, names: Mapping[str, str]) -> Call:
    def walk(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(names.get(arg.name, arg.name))
        return Items(tuple(walk(a) for a in arg.items)) if isinstance(arg, Items) else arg

    kwargs = tuple((name, walk(a)) for name, a in call.kwargs)
    return Call(call.op, tuple(walk(a) for a in call.args), kwargs, call.results)


def _lower_over(
    form: Form, parts: MatmulParts, products: tuple[Parameter, ...], calls: tuple[Call, ...]
) -> RestKernel | Rejected:
    """Lower calls that read products with the rows of `parts.a`, which no launch can name the sizes of."""
    read = {name for call in calls for name in _reads(call)}
    kept = tuple(p for p in form.parameters if p.name in read)
    nest = lower(Form("pointwise", (), (*kept, *products), calls, form.results))
    if isinstance(nest, Rejected):
        return nest
    if nest.inner:
        return Rejected("unsupported", "a reduction after the matmul")
    mapping: dict[str, Dim] = {}
    for product in products:
        columns = product.type.shape[1]
        mapping[f"{product.name}.size0"] = f"{parts.a}.size0"
        mapping[f"{product.name}.size1"] = columns
        mapping[f"{product.name}.stride0"] = columns
        mapping[f"{product.name}.stride1"] = 1
    nest = elide_rounding(nest)
    requires = [r for one in nest.requires if (r := _rename(one, mapping)) is not None]
    requires.append(Within(f"{form.results[0].name}.size0 - {parts.a}.size0", 0, 0))
    whole = Form("pointwise", (), (*form.parameters, *products), calls, form.results)
    return RestKernel(_renamed(nest, mapping), whole, tuple(requires), {}, parts.product)


def _reads(call: Call) -> set[str]:
    found: set[str] = set()
    stack = [*call.args, *(v for _, v in call.kwargs)]
    while stack:
        arg = stack.pop()
        if isinstance(arg, Ref):
            found.add(arg.name)
        elif isinstance(arg, Items):
            stack.extend(arg.items)
    return found


def _rename(requirement: Requirement, mapping: Mapping[str, Dim]) -> Requirement | None:
    if not isinstance(requirement, Within | Multiple):
        return requirement
    expression = rename(requirement.expression, mapping)
    if not symbols(expression):
        return None
    if isinstance(requirement, Within):
        return Within(expression, requirement.low, requirement.high)
    return Multiple(expression, requirement.of)


def _renamed(nest: LoopNest, mapping: Mapping[str, Dim]) -> LoopNest:
    """Replace the product's sizes, which no launch can name."""

    def walk(value: object) -> object:
        if isinstance(value, str):
            return rename(value, mapping) if "." in value else value
        if isinstance(value, tuple):
            return tuple(walk(v) for v in value)
        if isinstance(value, msgspec.Struct) and type(value).__module__ == LoopNest.__module__:
            return type(value)(*(walk(getattr(value, f)) for f in value.__struct_fields__))
        return value

    renamed = walk(nest)
    if not isinstance(renamed, LoopNest):
        raise TypeError("a nest stays a nest")
    return renamed


def _written_over(nest: LoopNest, parts: MatmulParts, form: Form) -> str | None:
    """Return the result that may take the product's memory: same type, every element read where it is written."""
    loads = [n.access for n in nest.nodes if isinstance(n, Load) and n.access.slot == parts.product]
    for store in nest.stores:
        result = next(r for r in form.results if r.name == store.access.slot)
        same = all((a.strides, a.offset) == (store.access.strides, store.access.offset) for a in loads)
        if same and result.type == parts.type and len(nest.stores) == 1:
            return result.name
    return None
