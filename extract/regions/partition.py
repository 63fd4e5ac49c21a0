"""Which steps belong to which region so far, and whether one more may join.

Every region runs at one position in the program: after everything it reads, before everything that reads it. Positions
are step numbers, so any set of regions that all have one can be executed in that order and no cycle can arise. Steps
that write a cache keep their order to every other step on that cache.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Literal, NamedTuple

from tune_model.extract.algebra import Polynomial, polynomial
from tune_model.extract.layout import VIEWS, view
from tune_model.extract.regions.axes import Misfit
from tune_model.extract.regions.canonical import canonicalise
from tune_model.extract.regions.naming import Canonical
from tune_model.extract.regions.region import Operand, Region
from tune_model.extract.regions.vocabulary import OpClass, classify
from tune_model.extract.rewrite.graph import MUTATING, READ_BY_CALLER, Graph, map_refs, refs
from tune_model.runtime.expression import product
from tune_model.runtime.program import Arg, Call, FormKind, Items, Program, Ref, TensorType

__all__ = ["Formed", "Partition"]


class _Root(NamedTuple):
    """What a value is a view of."""

    name: str
    offset: Polynomial


class Formed(NamedTuple):
    """A region with its place in the program."""

    members: frozenset[int]
    position: int
    region: Region
    canonical: Canonical


class Partition:
    """The steps of a program and their regions.

    Attributes:
        graph: The rewritten program.
        classes: Operator class of every step.
        formed: Regions so far.
        misfits: Why a step alone is no region, by its number.
    """

    def __init__(self, program: Program) -> None:
        self.graph = Graph(program)
        self.misfits: dict[int, str] = {}
        self.classes = [self._classify(index) for index in range(len(self.graph.steps))]
        self.formed: list[Formed] = []
        self._position: dict[int, int] = {}
        self._roots: dict[str, _Root] = {}
        self._readers: dict[str, list[int]] = {}
        self._known: dict[Hashable, Canonical | Misfit] = {}
        self._inputs = {i.name: i for i in program.inputs}
        for index, step in enumerate(self.graph.steps):
            if step.op in VIEWS:
                continue
            for name in dict.fromkeys(refs(step)):
                for source in self.chain(name):
                    self._readers.setdefault(source, []).append(index)
        for output in program.outputs:
            for source in self.chain(output.value):
                self._readers.setdefault(source, []).append(READ_BY_CALLER)
        self._after, self._before = self._cache_order()

    def _classify(self, index: int) -> OpClass:
        """Return a step's class; one that computes with complex numbers joins nothing, since kernels know none."""
        step = self.graph.steps[index]
        kind = classify(step)
        names = (*refs(step), *(r for r in step.results if r is not None))
        if kind is OpClass.VIEW or not any(self.graph.type(name).dtype.startswith("complex") for name in names):
            return kind
        self.misfits[index] = "computes with complex numbers, which generated kernels do not know"
        return OpClass.OTHER

    # ---------------------------------------------------------------------------------------------------------- values

    def chain(self, name: str) -> list[str]:
        """Return a value and what it is a view of, and so on, down to what some step computed."""
        found = [name]
        while True:
            index = self.graph.producer.get(found[-1])
            if index is None or self.graph.steps[index].op not in VIEWS:
                return found
            found.append(refs(self.graph.steps[index])[0])

    def root(self, name: str) -> str:
        """Return what a value is a view of, after all views."""
        return self._root(name).name

    def _root(self, name: str) -> _Root:
        known = self._roots.get(name)
        if known is None:
            index = self.graph.producer.get(name)
            step = None if index is None else self.graph.steps[index]
            if step is None or step.op not in VIEWS:
                known = _Root(name, polynomial(0))
            else:
                source = refs(step)[0]
                found = view(step, self.graph.type(source))
                if found is None:
                    raise ValueError(f"{step.op} of {source} cannot be a view")
                under = self._root(source)
                known = _Root(under.name, under.offset + found.offset)
            self._roots[name] = known
        return known

    def readers(self, name: str) -> list[int]:
        """Return the steps that read a value, through views too; `READ_BY_CALLER` for the program's caller."""
        return self._readers.get(name, [])

    def elements(self, name: str) -> Polynomial:
        """Return how many elements a value has."""
        return polynomial(product(self.graph.type(name).shape))

    def maker(self, name: str) -> int | None:
        """Return the step that computes a value, under its views; `None` for inputs and weights."""
        return self.graph.producer.get(self.root(name))

    def is_free(self, index: int) -> bool:
        """Say whether a step belongs to no region yet."""
        return index not in self._position

    # -------------------------------------------------------------------------------------------------------- position

    def _cache_order(self) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
        """Return for each step that touches a cache which steps it must follow, and which must follow it."""
        caches = {i.name for i in self._inputs.values() if i.role == "cache"}
        after: dict[int, set[int]] = {}
        written: dict[str, int] = {}
        read: dict[str, list[int]] = {}
        for index, step in enumerate(self.graph.steps):
            touched = {self.root(n) for n in refs(step)} & caches if step.op not in VIEWS else set()
            for cache in touched:
                if cache in written:
                    after.setdefault(index, set()).add(written[cache])
                if step.op in MUTATING:
                    after.setdefault(index, set()).update(read.pop(cache, ()))
                    written[cache] = index
                else:
                    read.setdefault(cache, []).append(index)
        before: dict[int, set[int]] = {}
        for later, earlier in after.items():
            for index in earlier:
                before.setdefault(index, set()).add(later)
        return after, before

    def _at(self, index: int) -> int:
        return self._position.get(index, index)

    def position(self, members: Collection[int]) -> int | None:
        """Return a position for a region of these steps; `None` when it would have to run before and after a step."""
        low, high = -1, len(self.graph.steps)
        for index in members:
            step = self.graph.steps[index]
            for name in refs(step):
                maker = self.maker(name)
                if maker is not None and maker not in members:
                    low = max(low, self._at(maker))
            for result in step.results:
                for reader in self.readers(result) if result is not None else ():
                    if reader != READ_BY_CALLER and reader not in members:
                        high = min(high, self._at(reader))
            low = max([low, *(self._at(i) for i in self._after.get(index, ()) if i not in members)])
            high = min([high, *(self._at(i) for i in self._before.get(index, ()) if i not in members)])
        fitting = [i for i in members if low < i < high]
        return max(fitting, default=None)

    # ---------------------------------------------------------------------------------------------------------- region

    def results(self, members: Collection[int]) -> list[str]:
        """Return the values of these steps that something else reads, in order."""
        made = [r for i in sorted(members) for r in self.graph.steps[i].results if r is not None]
        return [r for r in made if any(reader not in members for reader in self.readers(r))]

    def region(self, kind: FormKind, members: Collection[int]) -> Region:
        """Return the region of these steps: its calls with the views among them, and its operands."""
        return _Builder(self, members).build(kind)

    def try_form(self, kind: FormKind, members: Collection[int]) -> Formed | None:
        """Return these steps as a region if they can be one."""
        position = self.position(members)
        if position is None:
            return None
        try:
            region = self.region(kind, members)
            return Formed(frozenset(members), position, region, self.canonical(region))
        except Misfit as why:
            if len(members) == 1:
                self.misfits[next(iter(members))] = str(why)
            return None

    def canonical(self, region: Region) -> Canonical:
        """Return a region's canonical form; regions that differ in names only are worked out once.

        Raises:
            Misfit: It has none.
        """
        made = {r: self.graph.type(r) for c in region.calls for r in c.results if r is not None}
        key = _anonymous(region, made)
        known = self._known.get(key)
        if known is None:
            try:
                known = canonicalise(region, made)
            except Misfit as why:
                known = why
            self._known[key] = known
        if isinstance(known, Misfit):
            raise known
        return known

    def accept(self, formed: Formed) -> None:
        """Make a region final."""
        self.formed.append(formed)
        for index in formed.members:
            self._position[index] = formed.position

    def operand(self, name: str, value: str) -> Operand:
        """Describe what a region reads: `value` of the program, called `name` in its calls."""
        root = self._root(value)
        given = next(v for v in reversed(self.chain(value)) if self._root(v).offset == root.offset)
        source = self._inputs.get(root.name)
        role: Literal["activation", "weight", "cache"] = "activation"
        if source is not None and source.role == "cache":
            role = "cache"
        elif root.name in self.graph.weights:
            role = "weight"
        return Operand(name, given, self.graph.type(value), role, None if source is None else source.values)

    def same_memory(self, a: str, b: str) -> bool:
        """Say whether two values are the same view of the same memory."""
        mine, other = self._root(a), self._root(b)
        return mine == other and self.graph.type(a) == self.graph.type(b)


def _anonymous(region: Region, made: Mapping[str, TensorType]) -> Hashable:
    """Return everything of a region but its names."""
    number = {name: i for i, name in enumerate((*(o.name for o in region.operands), *made))}

    def encode(args: Iterable[Arg]) -> tuple[Hashable, ...]:
        return tuple(
            ("value", number[a.name])
            if isinstance(a, Ref)
            else ("list", encode(a.items))
            if isinstance(a, Items)
            else (type(a), a)
            for a in args
        )

    calls = tuple(
        (
            c.op,
            encode(c.args),
            tuple(k for k, _ in c.kwargs),
            encode(v for _, v in c.kwargs),
            tuple(number[r] for r in c.results if r),
        )
        for c in region.calls
    )
    operands = tuple((o.type, o.role, o.values) for o in region.operands)
    return region.kind, calls, operands, tuple(made.values()), tuple(number[r] for r in region.results)


class _Builder:
    """Collects a region's calls and operands."""

    def __init__(self, partition: Partition, members: Collection[int]) -> None:
        self.partition = partition
        self.graph = partition.graph
        self.members = sorted(members)
        self.made = {r for i in self.members for r in self.graph.steps[i].results if r is not None}
        self.whole = {n for i in self.members for n in refs(self.graph.steps[i]) if self._is_outside(n)}
        self.calls: list[Call] = []
        self.operands: dict[str, Operand] = {}
        self.viewed: set[str] = set()

    def _is_outside(self, name: str) -> bool:
        return self.partition.root(name) not in self.made

    def build(self, kind: FormKind) -> Region:
        for index in self.members:
            step = self.graph.steps[index]
            if self.partition.classes[index] is OpClass.MATMUL:
                # A matmul's operands are its own, even if the epilogue reads the same value over other loops.
                renamed = {n: f"{n}@{i}" for i, n in enumerate(dict.fromkeys(refs(step)))}
                for value, name in renamed.items():
                    self.operands[name] = self.partition.operand(name, value)
                self.calls.append(map_refs(step, renamed.__getitem__))
            else:
                self.calls.append(map_refs(step, self._read))
        return Region(
            kind, tuple(self.calls), tuple(self.operands.values()), tuple(self.partition.results(self.members))
        )

    def _read(self, name: str) -> str:
        """Return what a call of the region names a value that the program calls `name`."""
        if name in self.made:
            return name
        chain = self.partition.chain(name)
        if not self._is_outside(name):
            start = next(i for i, v in enumerate(chain) if v in self.made)
            self._add_views(chain[:start])
            return name
        whole = self._whole_of(chain)
        if whole:
            self._add_views(chain[:whole], chain[whole])
            return name
        return self._operand(name)

    def _whole_of(self, chain: list[str]) -> int:
        """Return where in a chain of views lies a value that the region also reads whole; 0 if nowhere.

        Only slices count: any other view of the same memory is as good an operand.
        """
        cuts = (i for i, v in enumerate(chain) if self.graph.made_by(Ref(v), "aten.slice.Tensor") is not None)
        cut = next(cuts, len(chain))
        return next((i for i in range(cut + 1, len(chain)) if chain[i] in self.whole), 0)

    def _operand(self, name: str) -> str:
        for known, operand in self.operands.items():
            if "@" not in known and self.partition.same_memory(operand.name, name):
                return known
        self.operands[name] = self.partition.operand(name, name)
        return name

    def _add_views(self, chain: list[str], start: str | None = None) -> None:
        """Add the views that lead to `chain[0]`, from `start` if that is an operand."""
        source = None if start is None else self._operand(start)
        for name in reversed(chain):
            step = self.graph.steps[self.graph.producer[name]]
            if name not in self.viewed:
                self.viewed.add(name)
                self.calls.append(map_refs(step, lambda n, s=source: s if s is not None else n))  # type: ignore[misc]
            source = None
