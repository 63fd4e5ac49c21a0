"""A program under edit: who makes and who reads each value, and edits that take effect together.

Passes look at the program as it was when the graph was built, register replacements, and call `finish`.
"""

from collections import Counter
from collections.abc import Callable

import msgspec

from tune_model.runtime.program import Arg, Call, Items, Output, Program, Ref, TensorType, Weight

__all__ = ["Graph", "map_refs", "refs"]

READ_BY_CALLER = -1
"""Stands for the program's caller among the readers of an output."""

MUTATING = frozenset({"tune_model.append_kv"})


def refs(call: Call) -> list[str]:
    """Return the values a call reads, in order, with repetitions."""
    found: list[str] = []
    _collect(call.args, found)
    if call.kwargs:
        _collect(tuple(v for _, v in call.kwargs), found)
    return found


def _collect(args: tuple[Arg, ...], found: list[str]) -> None:
    for arg in args:
        if isinstance(arg, Ref):
            found.append(arg.name)
        elif isinstance(arg, Items):
            _collect(arg.items, found)


def map_refs(call: Call, rename: Callable[[str], str]) -> Call:
    """Return the call with other values as arguments."""

    def walk(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(rename(arg.name))
        return Items(tuple(walk(a) for a in arg.items)) if isinstance(arg, Items) else arg

    return Call(call.op, tuple(walk(a) for a in call.args), tuple((k, walk(a)) for k, a in call.kwargs), call.results)


class Graph:
    """A raw program (calls only) with its indexes.

    Attributes:
        program: As it was.
        steps: Its calls.
        producer: Which step makes a value.
        readers: Which steps read a value, in order, once each; `READ_BY_CALLER` for outputs.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.steps: list[Call] = [s for s in program.steps if isinstance(s, Call)]
        if len(self.steps) != len(program.steps):
            raise ValueError("rewrites work on raw programs, before regions are formed")
        self.producer: dict[str, int] = {}
        self.readers: dict[str, list[int]] = {}
        for index, step in enumerate(self.steps):
            for name in dict.fromkeys(refs(step)):
                self.readers.setdefault(name, []).append(index)
            for result in step.results:
                if result is not None:
                    self.producer[result] = index
        for output in program.outputs:
            self.readers.setdefault(output.value, []).append(READ_BY_CALLER)
        self._types: dict[str, TensorType] = {
            **{i.name: i.type for i in program.inputs},
            **{w.name: w.type for w in program.weights},
            **{c.name: c.type for c in program.constants},
            **program.values,
        }
        self.weights: dict[str, Weight] = {w.name: w for w in program.weights}
        self._instead: dict[str, str] = {}
        self._before: dict[int, list[Call]] = {}
        self._changed: dict[int, Call] = {}
        self._counts: Counter[str] = Counter()
        self._touched = False

    # -------------------------------------------------------------------------------------------------------- reading

    def type(self, name: str) -> TensorType:
        """Return a value's type."""
        return self._types[name]

    def made_by(self, arg: Arg, *ops: str) -> Call | None:
        """Return the call that makes a value if it is one of `ops`; `None` otherwise."""
        if not isinstance(arg, Ref):
            return None
        index = self.producer.get(arg.name)
        if index is None or self.steps[index].op not in ops:
            return None
        return self.steps[index]

    def read_once(self, name: str) -> bool:
        """Say whether one step, and not the caller, reads a value."""
        readers = self.readers.get(name, [])
        return len(readers) == 1 and readers[0] != READ_BY_CALLER

    # -------------------------------------------------------------------------------------------------------- editing

    def add(self, index: int, step: Call, type_: TensorType, like: str) -> str:
        """Insert a call before step `index`; returns the one value it makes, named after `like`."""
        self._touched = True
        name = self._fresh(like)
        self._before.setdefault(index, []).append(Call(step.op, step.args, step.kwargs, (name,)))
        self._types[name] = type_
        return name

    def change(self, index: int, call: Call) -> None:
        """Put another call in a step's place; it makes the same values."""
        self._touched = True
        self._changed[index] = call

    def add_weight(self, weight: Weight) -> None:
        """Add a value from the checkpoint."""
        self._touched = True
        self.weights[weight.name] = weight
        self._types[weight.name] = weight.type

    def retype(self, name: str, type_: TensorType) -> None:
        """Give a value another type."""
        self._touched = self._touched or self._types[name] != type_
        self._types[name] = type_

    def replace(self, old: str, new: str) -> None:
        """Let everything that reads `old` read `new`."""
        self._touched = True
        self._instead[old] = new

    def resolve(self, name: str) -> str:
        """Return what is read in place of `name`, as registered so far."""
        while name in self._instead:
            name = self._instead[name]
        return name

    def _fresh(self, like: str) -> str:
        while True:
            self._counts[like] += 1
            name = f"{like}.{self._counts[like]}"
            if name not in self._types:
                return name

    def _redirected(self, call: Call) -> Call:
        return map_refs(call, self.resolve) if any(n in self._instead for n in refs(call)) else call

    def finish(self) -> Program:
        """Return the edited program without the steps, weights and constants that nothing reads any more."""
        if not self._touched:
            return self.program
        edited: list[Call] = []
        for index, step in enumerate(self.steps):
            edited.extend(self._before.get(index, ()))
            edited.append(self._changed.get(index, step))
        edited.extend(self._before.get(len(self.steps), ()))
        outputs = tuple(Output(o.name, self.resolve(o.value)) for o in self.program.outputs)
        kept, wanted = _live([self._redirected(c) for c in edited], {o.value for o in outputs})
        made = {r for c in kept for r in c.results if r is not None}
        return msgspec.structs.replace(
            self.program,
            weights=tuple(w for w in self.weights.values() if w.name in wanted),
            constants=tuple(c for c in self.program.constants if c.name in wanted),
            steps=tuple(kept),
            values={name: type_ for name, type_ in self._types.items() if name in made},
            outputs=outputs,
        )


def _live(steps: list[Call], wanted: set[str]) -> tuple[list[Call], set[str]]:
    """Keep what makes a wanted value or writes in place; also return every value that is read."""
    kept: list[Call] = []
    for step in reversed(steps):
        if step.op not in MUTATING and not any(r in wanted for r in step.results):
            continue
        wanted.update(refs(step))
        results = tuple(r if r in wanted else None for r in step.results)
        kept.append(step if results == step.results else Call(step.op, step.args, step.kwargs, results))
    return kept[::-1], wanted
