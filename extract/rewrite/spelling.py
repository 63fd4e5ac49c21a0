"""One spelling per operation, so that later passes and forms see each only once.

- Views become `aten.view`, `aten.permute`, `aten.expand` and `aten.slice`, sizes written out, dims not negative. A
  reshape that copies becomes `aten.clone` (to row-major order) and a view; `select`, `split`, `chunk`, `unbind` become
  slices and views.
- What changes nothing disappears: dropout in eval mode, casts to the same dtype, whole slices, copies of what is
  already row-major, assertions, steps nobody reads.
- Casts are `aten.to.dtype`; arithmetic with a number is the `.Scalar` overload; arguments equal to their defaults are
  left out; `dtype=` of reductions is a cast before them.
"""

from collections.abc import Callable

from tune_model.extract.algebra import polynomial, same, same_all
from tune_model.extract.layout import (
    arg_dim,
    dim_arg,
    is_row_major,
    make_type,
    size_args,
    view,
    view_strides,
)
from tune_model.extract.rewrite import schema
from tune_model.extract.rewrite.graph import Graph
from tune_model.runtime.expression import Dim, symbols
from tune_model.runtime.program import Arg, Call, Items, Program, Ref, TensorType, TorchName

__all__ = ["CONTIGUOUS", "spell"]

CONTIGUOUS = (("memory_format", TorchName("memory_format", "contiguous_format")),)
"""Keywords of an `aten.clone` to row-major order."""

_IDENTITIES = frozenset({"alias", "detach", "lift_fresh", "lift_fresh_copy", "positive", "resolve_conj", "resolve_neg"})
_RESHAPES = frozenset(
    {
        "view",
        "reshape",
        "_unsafe_view",
        "view_as",
        "reshape_as",
        "flatten",
        "unflatten",
        "squeeze",
        "unsqueeze",
        "ravel",
    }
)
_PERMUTES = frozenset({"transpose", "t", "permute", "swapaxes", "swapdims", "movedim", "numpy_T", "mT", "matrix_H"})
_CASTS = frozenset({"to", "_to_copy", "type_as", "_cast"})
_NUMERIC = frozenset({"add", "sub", "mul", "div"})


def spell(program: Program) -> Program:
    """Return the program in the one spelling."""
    graph = Graph(program)
    for index, step in enumerate(graph.steps):
        if step.op.startswith("aten."):
            _Speller(graph, index, step).run()
    return graph.finish()


class _Speller:
    """Respells one step."""

    def __init__(self, graph: Graph, index: int, step: Call) -> None:
        self.graph = graph
        self.index = index
        self.step = step
        self.name = step.op.split(".")[1]
        self.overload = step.op.split(".")[2] if step.op.count(".") > 1 else "default"

    @property
    def result(self) -> str:
        name = self.step.results[0]
        return name if name is not None else "unread"

    @property
    def source(self) -> str:
        arg = self.step.args[0]
        if not isinstance(arg, Ref):
            raise TypeError(f"{self.step.op} without a tensor first")
        return self.graph.resolve(arg.name)

    def run(self) -> None:
        first = self.step.args[0] if self.step.args else None
        handler = _HANDLERS.get(self.name)
        if handler is not None and self.step.results and (isinstance(first, Ref) or self.name in {"cat", "stack"}):
            handler(self)
        elif schema.is_known(self.step.op):
            self.graph.change(self.index, schema.call(self.step.op, schema.arguments(self.step), self.step.results))

    # ---------------------------------------------------------------------------------------------------------- tools

    def argument(self, name: str) -> Arg:
        return schema.arguments(self.step)[name]

    def type(self, name: str) -> TensorType:
        return self.graph.type(name)

    def become(self, value: str) -> None:
        """The step's result is `value`."""
        self.graph.replace(self.result, value)

    def emit(self, op: str, args: tuple[Arg, ...], type_: TensorType, kwargs: tuple[tuple[str, Arg], ...] = ()) -> str:
        return self.graph.add(self.index, Call(op, args, kwargs), type_, self.result)

    def view(self, op: str, source: str, *args: Arg) -> str:
        """Emit a view, or nothing when it changes nothing."""
        step = Call(op, (Ref(source), *args))
        before = self.type(source)
        found = view(step, before)
        if found is None:
            raise ValueError(f"{op} of {source} cannot be a view")
        if found.type.dtype == before.dtype and same_all(found.type.shape, before.shape):
            return source
        return self.emit(op, step.args, found.type)

    def reshaped(self, source: str, shape: tuple[Dim, ...]) -> str:
        if view_strides(self.type(source), shape) is None:
            source = self.copied(source)
        return self.view("aten.view.default", source, size_args(tuple(polynomial(s).dim for s in shape)))

    def copied(self, source: str) -> str:
        type_ = self.type(source)
        if is_row_major(type_):
            return source
        return self.emit("aten.clone.default", (Ref(source),), make_type(type_.dtype, type_.shape), CONTIGUOUS)

    def cast(self, source: str, dtype: str) -> str:
        type_ = self.type(source)
        if type_.dtype == dtype:
            return source
        return self.emit(
            "aten.to.dtype", (Ref(source), TorchName("dtype", dtype)), TensorType(dtype, type_.shape, type_.strides)
        )

    def axis(self, arg: Arg) -> int:
        dim = int(arg_dim(arg))
        rank = len(self.type(self.source).shape)
        return dim + rank if dim < 0 else dim

    def respell(self, op: str, /, **changes: Arg) -> None:
        """Emit the same step as `op` with some arguments replaced, under the same result names."""
        given = {**schema.arguments(self.step), **changes}
        self.graph.change(self.index, schema.call(op, given, self.step.results))

    # ---------------------------------------------------------------------------------------------------------- views

    def identity(self) -> None:
        self.become(self.source)

    def reshape(self) -> None:
        self.become(self.reshaped(self.source, self.type(self.result).shape))

    def permute(self) -> None:
        if self.name == "matrix_H" and self.type(self.source).dtype.startswith("complex"):
            return  # not a view alone
        rank = len(self.type(self.source).shape)
        order = list(range(rank))
        if self.name == "permute":
            order = [self.axis(a) for a in _items(self.argument("dims"))]
        elif self.name == "movedim":
            self._movedim(order)
        elif self.name in {"transpose", "swapaxes", "swapdims"}:
            a, b = (self.axis(arg) for arg in self.step.args[1:3])
            order[a], order[b] = order[b], order[a]
        elif self.name == "mT":
            order[-1], order[-2] = order[-2], order[-1]
        else:
            order.reverse()
        if order == list(range(rank)):
            self.become(self.source)
        else:
            self.become(
                self.emit("aten.permute.default", (Ref(self.source), Items(tuple(order))), self._permuted(order))
            )

    def _permuted(self, order: list[int]) -> TensorType:
        found = view(Call("aten.permute.default", (Ref(""), Items(tuple(order)))), self.type(self.source))
        if found is None:
            raise ValueError("a permutation is always a view")
        return found.type

    def _movedim(self, order: list[int]) -> None:
        first, second = self.step.args[1:3]
        sources = [self.axis(a) for a in (first.items if isinstance(first, Items) else (first,))]
        targets = [self.axis(a) for a in (second.items if isinstance(second, Items) else (second,))]
        rest = [d for d in order if d not in sources]
        for target, source in sorted(zip(targets, sources, strict=True)):
            rest.insert(target, source)
        order[:] = rest

    def expand(self) -> None:
        self.become(self.view("aten.expand.default", self.source, size_args(self.type(self.result).shape)))

    def repeat(self) -> None:
        """`repeat`: every dim cut in front, expanded and joined again; dims of size 1 are only expanded."""
        shape, target = self.type(self.source).shape, self.type(self.result).shape
        shape = (*[1] * (len(target) - len(shape)), *shape)
        cut: list[Dim] = []
        wide: list[Dim] = []
        for size, wanted in zip(shape, target, strict=True):
            times = polynomial(wanted).over(polynomial(size))
            if times is None:
                self.respell(self.step.op)
                return
            if size != 1 and times.constant != 1:
                cut.append(1)
                wide.append(times.dim)
            cut.append(size)
            wide.append(wanted if size == 1 else size)
        expanded = self.view("aten.expand.default", self.reshaped(self.source, tuple(cut)), size_args(tuple(wide)))
        self.become(self.reshaped(expanded, target))

    def repeat_interleave(self) -> None:
        """Repeat every element in place: one more dim after it, expanded and joined."""
        given = schema.arguments(self.step)
        if self.overload != "self_int" or given["dim"] is None:
            self.respell(self.step.op)
            return
        dim, times = self.axis(given["dim"]), arg_dim(given["repeats"])
        shape = self.type(self.source).shape
        cut = self.reshaped(self.source, (*shape[: dim + 1], 1, *shape[dim + 1 :]))
        wide = (*shape[: dim + 1], times, *shape[dim + 1 :])
        expanded = self.view("aten.expand.default", cut, size_args(wide))
        self.become(self.reshaped(expanded, self.type(self.result).shape))

    def sliced(self, source: str, dim: int, start: Dim, end: Dim, step: int = 1) -> str:
        size = self.type(source).shape[dim]
        if start == 0 and step == 1 and same(end, size):
            return source
        extra: tuple[Arg, ...] = (step,) if step != 1 else ()
        return self.view("aten.slice.Tensor", source, dim, dim_arg(start), dim_arg(end), *extra)

    def slice(self) -> None:
        dim = self.axis(self.argument("dim"))
        size = self.type(self.source).shape[dim]
        start, step = self.argument("start"), int(arg_dim(self.argument("step")))
        begin = _clamped(0 if start is None else arg_dim(start), size)
        count = self.type(self.result).shape[dim]
        if step == 1:
            end = (polynomial(begin) + polynomial(count)).dim
        else:
            given = self.argument("end")
            end = size if given is None else _clamped(arg_dim(given), size)
        self.become(self.sliced(self.source, dim, begin, end, step))

    def select(self) -> None:
        dim = self.axis(self.argument("dim"))
        at = _clamped(arg_dim(self.argument("index")), self.type(self.source).shape[dim])
        one = self.sliced(self.source, dim, at, (polynomial(at) + polynomial(1)).dim)
        self.become(self.reshaped(one, self.type(self.result).shape))

    def narrow(self) -> None:
        dim = self.axis(self.argument("dim"))
        start = _clamped(arg_dim(self.argument("start")), self.type(self.source).shape[dim])
        end = (polynomial(start) + polynomial(self.type(self.result).shape[dim])).dim
        self.become(self.sliced(self.source, dim, start, end))

    def split(self) -> None:
        """Also chunk and unbind: consecutive slices, each of its result's size."""
        dim = self.axis(self.argument("dim"))
        start: Dim = 0
        for i, result in enumerate(self.step.results):
            size: Dim = 1
            if self.name != "unbind":
                size = self._piece(i, dim) if result is None else self.type(result).shape[dim]
            end = polynomial(start) + polynomial(size)
            if result is not None:
                one = self.sliced(self.source, dim, start, end.dim)
                self.graph.replace(result, self.reshaped(one, self.type(result).shape))
            start = end.dim

    def _piece(self, index: int, dim: int) -> Dim:
        """Return the size of a piece that nobody reads, which so has no type. The last one's does not matter."""
        given = schema.arguments(self.step)
        sizes = given.get("split_sizes", given.get("split_size"))
        if isinstance(sizes, Items):
            return arg_dim(sizes.items[index])
        if sizes is not None:
            return arg_dim(sizes)
        return polynomial(f"cdiv({self.type(self.source).shape[dim]}, {arg_dim(given['chunks'])})").dim

    # --------------------------------------------------------------------------------------------- copies, casts, math

    def copy(self) -> None:
        """`contiguous` and `clone`: a copy only where the order in memory changes."""
        if is_row_major(self.type(self.result)):
            self.become(self.copied(self.source))
        elif self.type(self.result) == self.type(self.source):
            self.become(self.source)
        else:
            self.respell(self.step.op)

    def to(self) -> None:
        dtype = self.type(self.result).dtype
        if self.type(self.source).dtype == dtype:
            self.copy()
        else:
            self.graph.change(
                self.index, Call("aten.to.dtype", (Ref(self.source), TorchName("dtype", dtype)), (), self.step.results)
            )

    def dropout(self) -> None:
        if self.argument("train") in {False, None} or self.argument("p") == 0.0:
            self.become(self.source)

    def arithmetic(self) -> None:
        other = self.argument("other")
        if isinstance(other, Ref):
            if schema.arguments(self.step).get("rounding_mode") is None:
                self.respell(self.step.op)
            return
        op = f"aten.{self.name}.Scalar"
        given = schema.arguments(self.step)
        if self.name in {"add", "sub"} and given.get("alpha", 1) != 1:
            return
        if given.get("rounding_mode") is None:
            given.pop("rounding_mode", None)
            self.graph.change(self.index, schema.call(op, given, self.step.results))

    def layer_norm(self) -> None:
        self.respell(self.step.op, cudnn_enable=True)  # read by nothing

    def embedding(self) -> None:
        """What padding and gradients are told is read by nothing."""
        self.graph.change(self.index, Call("aten.embedding.default", self.step.args[:2], (), self.step.results))

    def square(self) -> None:
        self.graph.change(self.index, Call("aten.pow.Tensor_Scalar", (Ref(self.source), 2), (), self.step.results))

    def softmax(self) -> None:
        kind = "log_softmax" if "log" in self.name else "softmax"
        source = self.cast(self.source, self.type(self.result).dtype)
        dim = self.axis(self.argument("dim"))
        self.graph.change(self.index, Call(f"aten.{kind}.int", (Ref(source), dim), (), self.step.results))

    def reduction(self) -> None:
        """Dims not negative and always a list where the schema has one; `dtype=` is a cast before."""
        given = schema.arguments(self.step)
        changes: dict[str, Arg] = {}
        dims = given.get("dim", ())
        if isinstance(dims, Items) or (dims is None and self.name not in {"argmax", "argmin"}):
            changes["dim"] = self._listed(dims)
        elif dims is None:
            pass  # of the flattened tensor
        elif not isinstance(dims, tuple):
            changes["dim"] = self.axis(dims)
        if given.get("dtype") is not None:
            changes["self"] = Ref(self.cast(self.source, self.type(self.result).dtype))
            changes["dtype"] = None
        if self.name in {"var", "std"}:
            self._variance({**given, **changes})
        else:
            self.respell(self.step.op, **changes)

    def _variance(self, given: dict[str, Arg]) -> None:
        """The overload that says its correction; 1 is the default."""
        correction = given.get("correction", None if given.get("unbiased", True) else 0)
        kept: dict[str, Arg] = {name: given[name] for name in ("self", "dim", "keepdim") if name in given}
        kept["correction"] = None if correction == 1 else correction
        self.graph.change(self.index, schema.call(f"aten.{self.name}.correction", kept, self.step.results))

    def truth(self) -> None:
        """`any` and `all`: over a list of dims."""
        given = schema.arguments(self.step)
        dims = self._listed(given.get("dim"))
        kept: dict[str, Arg] = {"self": given["self"], "dim": dims, "keepdim": given.get("keepdim", False)}
        self.graph.change(self.index, schema.call(f"aten.{self.name}.dims", kept, self.step.results))

    def extreme(self) -> None:
        """`max` and `min`: over all elements, of two tensors, or values and their places as two steps."""
        given = schema.arguments(self.step)
        values = f"aten.a{self.name}.default"
        if self.overload == "other":
            self.graph.change(self.index, Call(f"aten.{self.name}imum.default", self.step.args, (), self.step.results))
        elif self.overload == "default":
            self.graph.change(self.index, Call(values, self.step.args, (), self.step.results))
        elif self.overload == "dim":
            dim, keep = self.axis(given["dim"]), given["keepdim"]
            places = f"aten.arg{self.name}.default"
            for op, over, result in ((values, Items((dim,)), 0), (places, dim, 1)):
                name = self.step.results[result]
                if name is not None:
                    arguments: dict[str, Arg] = {"self": Ref(self.source), "dim": over, "keepdim": keep}
                    type_ = self.type(name)
                    call = schema.call(op, arguments, ())
                    made = self.graph.add(self.index, call, make_type(type_.dtype, type_.shape), name)
                    self.graph.replace(name, made)

    def norm(self) -> None:
        """Vector norms: one operator; the order first, dims as a list."""
        given = schema.arguments(self.step)
        order = given.get("ord", given.get("p"))
        source = self.source
        if given.get("dtype") is not None:
            source = self.cast(source, self.type(self.result).dtype)
        kept: dict[str, Arg] = {
            "self": Ref(source),
            "ord": 2 if order is None else order,
            "dim": self._listed(given.get("dim")),
            "keepdim": given.get("keepdim", False),
            "dtype": None,
        }
        self.graph.change(self.index, schema.call("aten.linalg_vector_norm.default", kept, self.step.results))

    def _listed(self, dims: Arg) -> Items:
        """Return dims as a list, not negative, in order; none given are all."""
        given = dims.items if isinstance(dims, Items) else () if dims is None else (dims,)
        return Items(tuple(sorted(self.axis(a) for a in given) or range(len(self.type(self.source).shape))))

    def all_elements(self) -> None:
        """`sum.default`, `mean.default`: over a list of all dims."""
        op = {"mean": "aten.mean.dim", "sum": "aten.sum.dim_IntList"}[self.name]
        rank = len(self.type(self.source).shape)
        source = self.cast(self.source, self.type(self.result).dtype)
        self.graph.change(self.index, Call(op, (Ref(source), Items(tuple(range(rank)))), (), self.step.results))

    def summed(self) -> None:
        self.all_elements() if self.overload == "default" else self.reduction()

    def concatenation(self) -> None:
        self.respell(self.step.op, dim=self._joined_dim())

    def stack(self) -> None:
        """Views with one more dim, concatenated."""
        dim = self._joined_dim()
        pieces: list[Arg] = []
        for piece in _items(self.step.args[0]):
            name = self.graph.resolve(piece.name) if isinstance(piece, Ref) else ""
            shape = self.type(name).shape
            pieces.append(Ref(self.reshaped(name, (*shape[:dim], 1, *shape[dim:]))))
        self.graph.change(self.index, Call("aten.cat.default", (Items(tuple(pieces)), dim), (), self.step.results))

    def _joined_dim(self) -> int:
        dim = self.argument("dim")
        dim = dim if isinstance(dim, int) else 0
        return dim + len(self.type(self.result).shape) if dim < 0 else dim


def _items(arg: Arg) -> tuple[Arg, ...]:
    if not isinstance(arg, Items):
        raise TypeError(f"expected a list, got {arg!r}")
    return arg.items


def _clamped(at: Dim, size: Dim) -> Dim:
    """Resolve a slice bound that counts from the end or lies behind it."""
    if isinstance(at, int):
        if at < 0:
            return (polynomial(size) + polynomial(at)).dim
        if isinstance(size, int):
            return min(at, size)
        return size if at >= 2**62 else at
    return polynomial(at).dim if symbols(at) else at


_HANDLERS: dict[str, Callable[[_Speller], None]] = {
    **dict.fromkeys(_IDENTITIES, _Speller.identity),
    **dict.fromkeys(_RESHAPES, _Speller.reshape),
    **dict.fromkeys(_PERMUTES, _Speller.permute),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _Speller.expand),
    **dict.fromkeys(("contiguous", "clone"), _Speller.copy),
    **dict.fromkeys(_CASTS, _Speller.to),
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout"), _Speller.dropout),
    **dict.fromkeys(_NUMERIC, _Speller.arithmetic),
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax"), _Speller.softmax),
    **dict.fromkeys(("amax", "amin", "var", "std", "argmax", "argmin", "prod", "logsumexp"), _Speller.reduction),
    **dict.fromkeys(("any", "all"), _Speller.truth),
    **dict.fromkeys(("max", "min"), _Speller.extreme),
    **dict.fromkeys(("linalg_vector_norm", "norm"), _Speller.norm),
    **dict.fromkeys(("sum", "mean"), _Speller.summed),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind"), _Speller.split),
    "cat": _Speller.concatenation,
    "stack": _Speller.stack,
    "slice": _Speller.slice,
    "select": _Speller.select,
    "narrow": _Speller.narrow,
    "repeat": _Speller.repeat,
    "repeat_interleave": _Speller.repeat_interleave,
    "square": _Speller.square,
    "embedding": _Speller.embedding,
    "layer_norm": _Speller.layer_norm,
}
