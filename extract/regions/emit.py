"""A region's calls over its loops: every tensor has one dim per loop, so that no view remains but slices.

A value that does not run over a loop has size 1 there; leading 1s are left out, as broadcasting allows. Names are still
the program's and sizes are still over its symbols; `naming` makes both canonical.
"""

from collections.abc import Mapping, Sequence

from tune_model.extract.algebra import Polynomial, polynomial
from tune_model.extract.layout import make_type, size_args
from tune_model.extract.regions.axes import Axes, Misfit, reduced_dims, tensor_refs
from tune_model.extract.regions.loops import Loops, Track, places_of
from tune_model.extract.regions.vocabulary import OpClass, classify
from tune_model.extract.rewrite import schema
from tune_model.extract.rewrite.graph import map_refs
from tune_model.extract.rewrite.spelling import CONTIGUOUS
from tune_model.runtime.expression import Dim
from tune_model.runtime.program import Arg, Call, Items, Ref, TensorType

__all__ = ["Emitter"]

ONE = polynomial(1)


class Emitter:
    """Writes the calls of one region over its loops.

    Attributes:
        calls: What was emitted.
        types: Type of each operand and result over the loops.
    """

    def __init__(self, axes: Axes, loops: Loops, types: Mapping[str, TensorType]) -> None:
        self._axes = axes
        self._loops = loops
        self._program_types = types
        self._name: dict[str, str] = {}
        self._runs: dict[str, frozenset[int]] = {}
        self._matmuls = 0
        self.calls: list[Call] = []
        self.types: dict[str, TensorType] = {}

    # ---------------------------------------------------------------------------------------------------------- shapes

    def _first(self, runs: frozenset[int], rank: int) -> int:
        """Return the first loop that a tensor has a dim for; tensors with dims keep at least one.

        A tensor without dims takes no part in type promotion, so none may become one.
        """
        count = self._loops.count
        return min(min(runs, default=count), count if rank == 0 else max(count - 1, 0))

    def _shape(self, name: str, runs: frozenset[int]) -> tuple[list[Dim], list[Track | None]]:
        tracks = self._loops.tracks(name)
        kept = tracks[self._first(runs, len(self._program_types[name].shape)) :]
        return [1 if t is None else t.size.dim for t in kept], kept

    def operand(self, name: str) -> None:
        """Declare a tensor that the region reads."""
        runs = frozenset(i for i, t in enumerate(self._loops.tracks(name)) if t is not None)
        type_ = self._program_types[name]
        shape, tracks = self._shape(name, runs)
        if not shape and type_.shape:
            shape, tracks = [1], [None]
        self.types[name] = make_type(type_.dtype, tuple(shape), _filled(tracks))
        self._name[name] = name
        self._runs[name] = runs

    # ----------------------------------------------------------------------------------------------------------- calls

    def add(self, call: Call) -> None:
        """Emit one call of the region."""
        result = call.results[0] or ""
        match classify(call):
            case OpClass.VIEW if call.op == "aten.slice.Tensor":
                self._slice(call, result)
            case OpClass.VIEW | OpClass.COPY:
                source = tensor_refs(call.args[:1])[0]
                self._name[result], self._runs[result] = self._name[source], self._runs[source]
            case OpClass.POINTWISE:
                runs = [self._runs[n] for n in tensor_refs((*call.args, *(v for _, v in call.kwargs)))]
                self._put(map_refs(call, self._name.__getitem__), result, frozenset().union(*runs))
            case OpClass.JOIN:
                self._join(call, result)
            case OpClass.LOOKUP:
                self._lookup(call, result)
            case OpClass.REDUCE:
                self._reduce(call, result)
            case OpClass.NORMALISE:
                self._normalise(call, result)
            case OpClass.MATMUL:
                self._matmul(call, result)
            case _:
                raise Misfit(f"{call.op} has no loops")

    def _put(self, call: Call, result: str, runs: frozenset[int]) -> None:
        self.calls.append(Call(call.op, call.args, call.kwargs, (result,)))
        self._name[result] = result
        self._runs[result] = runs

    def _at(self, axes: list[int]) -> int:
        """Return the loop of a dim's one axis."""
        at = self._loops.index(axes[0]) if len(axes) == 1 else None
        if at is None:
            raise Misfit("a dim that is no loop")
        return at

    def _back(self, at: int) -> int:
        """Return a loop's dim, counted from the end."""
        return at - self._loops.count

    def _slice(self, call: Call, result: str) -> None:
        source = tensor_refs(call.args[:1])[0]
        dim = call.args[1]
        at = self._at(self._axes.dims(source)[dim if isinstance(dim, int) else 0])
        runs = self._runs[source]
        if at not in runs:
            self._name[result], self._runs[result] = self._name[source], runs
            return
        narrowed = runs if self._loops.tracks(result)[at] is not None else runs - {at}
        self._put(Call(call.op, (Ref(self._name[source]), self._back(at), *call.args[2:])), result, narrowed)
        if narrowed != runs and at == min(runs):
            raise Misfit("a slice of one element along the outermost loop")

    def _join(self, call: Call, result: str) -> None:
        names = tensor_refs(call.args[:1])
        dim = call.args[1] if len(call.args) > 1 else 0
        dim = dim if isinstance(dim, int) else 0
        at = self._at(self._axes.dims(result)[dim])
        others = frozenset().union(*(self._runs[n] for n in names)) - {at}
        pieces: list[Arg] = []
        for name in names:
            wants = self._loops.tracks(name)[at]
            runs = self._runs[name]
            if (
                runs - {at} != others
                or (wants is not None and at not in runs)
                or min(others | {at}) != min(runs, default=self._loops.count)
            ):
                pieces.append(Ref(self._widened(name, others | ({at} if wants is not None else frozenset()), at)))
            else:
                pieces.append(Ref(self._name[name]))
        self._put(Call("aten.cat.default", (Items(tuple(pieces)), self._back(at))), result, others | {at})

    def _widened(self, name: str, runs: frozenset[int], at: int) -> str:
        """Emit an expand over `runs`; the dim of loop `at` is there in any case."""
        sizes: list[Dim] = []
        for i, track in enumerate(self._all_tracks()):
            if i >= min(runs | {at}):
                mine = self._loops.tracks(name)[at] if i == at else track
                sizes.append(mine.size.dim if i in runs and mine is not None else 1)
        wide = f"{name}.wide"
        self._put(Call("aten.expand.default", (Ref(self._name[name]), size_args(tuple(sizes)))), wide, runs)
        return wide

    def _all_tracks(self) -> list[Track | None]:
        """Return the full size of every loop."""
        found: list[Track | None] = [None] * self._loops.count
        for name in self._axes.values:
            for i, track in enumerate(self._loops.tracks(name)):
                known = found[i]
                if track is not None and (known is None or _larger(track.size, known.size)):
                    found[i] = track
        return found

    def _lookup(self, call: Call, result: str) -> None:
        """Declare a table as it is, and numbers over all loops but the last, which are the table's columns."""
        table, numbers = tensor_refs(call.args[:2])
        last = self._loops.count - 1
        if self._runs[table] != frozenset({last}) or last in self._runs[numbers]:
            raise Misfit("a lookup whose columns are not the last loop")
        runs = self._runs[numbers]
        tracks = self._loops.tracks(numbers)[min(runs, default=last) : last]
        shape = tuple(1 if t is None else t.size.dim for t in tracks)
        self.types[numbers] = make_type(self._program_types[numbers].dtype, shape, _filled(tracks))
        self.types[table] = self._program_types[table]
        self._put(Call(call.op, (Ref(table), Ref(numbers))), result, runs | {last})

    def _reduce(self, call: Call, result: str) -> None:
        source = tensor_refs(call.args[:1])[0]
        over = self._loops.reduced
        dims = self._axes.dims(source)
        chosen = reduced_dims(call, len(dims))
        own = {self._loops.index(a) for at in ((chosen,) if isinstance(chosen, int) else chosen) for a in dims[at]}
        if own != set(over):
            raise Misfit("reductions over different loops")
        if not set(over) <= self._runs[source]:
            raise Misfit("a reduction over a broadcast loop")
        runs = self._runs[source] - set(over)
        keep = bool(runs) or len(self._program_types[result].shape) > 0
        if len(over) > 1 and keep and self._loops.count == len(over):
            raise Misfit("all loops reduced, and dims of size 1 kept")
        given = schema.arguments(call)
        given["self"] = Ref(self._name[source])
        given["dim"] = -1 if isinstance(chosen, int) else Items(tuple(range(-len(over), 0)))
        given["keepdim"] = keep
        self._put(schema.call(call.op, given, (result,)), result, runs)

    def _normalise(self, call: Call, result: str) -> None:
        source = tensor_refs(call.args[:1])[0]
        last = self._loops.count - 1
        runs = self._runs[source]
        if self._loops.reduced != (last,):
            raise Misfit("reductions over different loops")
        if last not in runs:
            raise Misfit("a normalisation over a broadcast loop")
        given = list(map_refs(call, self._name.__getitem__).args)
        if "softmax" in call.op:
            given[1] = -1
        for vector in tensor_refs(call.args[2:]):
            if self._runs[vector] != frozenset({last}):
                raise Misfit("a norm's weight that is not one vector")
        self._put(Call(call.op, tuple(given), call.kwargs), result, runs)

    # ---------------------------------------------------------------------------------------------------------- matmul

    def _matmul(self, call: Call, result: str) -> None:
        self._matmuls += 1
        left, right, *bias = tensor_refs(call.args)
        columns = self._loops.count - 1
        runs = frozenset(i for i, t in enumerate(self._loops.tracks(result)) if t is not None)
        if call.op == "aten.linear.default":
            self._factor(left, [*range(columns)])
            self._factor(right, [columns])
            self._put(Call(call.op, tuple(Ref(n) for n in (left, right, *bias))), result, runs)
            return
        rows = columns - 1
        batch = [*range(rows)]
        self._factor(left, [*batch, rows])
        self._factor(right, [*batch, columns], sum_first=True)
        op = {0: "aten.mm.default", 1: "aten.bmm.default"}.get(len(batch), "aten.matmul.default")
        if len(batch) == 1 and not all(0 in self._runs[n] for n in (left, right)):
            op = "aten.matmul.default"
        self._put(Call(op, (Ref(left), Ref(right))), result, runs)

    def _factor(self, name: str, over: list[int], *, sum_first: bool = False) -> None:
        """Declare an operand of a matmul: its loops, and its summed dim last (or before the columns)."""
        tracks = self._loops.tracks(name)
        dims: list[Track | None] = [tracks[i] for i in over]
        summed = self._summed(name)
        dims.insert(len(dims) - 1 if sum_first else len(dims), summed)
        shape = tuple(1 if t is None else t.size.dim for t in dims)
        self.types[name] = make_type(self._program_types[name].dtype, shape, _filled(dims))

    def _summed(self, name: str) -> Track:
        for axis, stride in places_of(self._axes, self._program_types, name):
            if self._loops.index(axis) is None:
                return Track(self._axes.size(axis), stride)
        raise Misfit("a matmul over one element")

    # --------------------------------------------------------------------------------------------------------- results

    def result(self, name: str, taken: frozenset[str]) -> str:
        """Declare a result, a row-major tensor over its loops; returns the emitted value that holds it.

        Args:
            name: Value of the program.
            taken: Emitted values that cannot be it: operands and other results.

        Raises:
            Misfit: The program wants it in another order in memory.
        """
        tracks = self._loops.tracks(name)
        run = ONE
        for track in reversed(tracks):
            if track is not None:
                if track.stride != run:
                    raise Misfit("a result in another order than the loops")
                run *= track.size
        runs = frozenset(i for i, t in enumerate(tracks) if t is not None)
        type_ = self._program_types[name]
        shape, _ = self._shape(name, runs)
        if self._matmuls:
            shape = [*[1] * (self._loops.count - len(shape)), *shape]
        elif not shape and type_.shape:
            shape = [1]
        made = self._name[name]
        if self._runs[made] != runs:
            wide = f"{name}.full"
            self._put(Call("aten.expand.default", (Ref(made), size_args(tuple(shape)))), wide, runs)
            made = wide
        if made.endswith(".full") or made in taken:
            copy = f"{name}.copy"
            self._put(Call("aten.clone.default", (Ref(made),), CONTIGUOUS), copy, runs)
            made = copy
        self.types[made] = make_type(type_.dtype, tuple(shape))
        return made


def _larger(a: Polynomial, b: Polynomial) -> bool:
    x, y = a.constant, b.constant
    return x is None or (y is not None and x > y)


def _filled(tracks: Sequence[Track | None]) -> tuple[Dim, ...]:
    """Return strides; a dim of size 1 gets the one that continues what follows it."""
    strides: list[Dim] = []
    run = ONE
    for track in reversed(tracks):
        if track is not None:
            run = track.stride
        strides.append(run.dim)
        if track is not None:
            run *= track.size
    return tuple(reversed(strides))
