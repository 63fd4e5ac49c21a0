"""A `torch.export` graph to a raw `Program`: every step a `Call`, typed values, weights by their checkpoint names.

Dropped on the way: assertions, symbolic-size nodes, and calls that return their first argument unchanged (dropout in
eval mode, casts to the same dtype, full slices, `contiguous` of what is contiguous). `view` sizes are written out and
every cast is spelled `aten.to.dtype`, so that equal models import equally whatever library version traced them.
"""

import operator
from collections.abc import Mapping
from typing import NamedTuple, cast

import sympy
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec, OutputKind
from torch.fx import GraphModule, Node

from tune_model.extract.sizes import SizePrinter, size_expression
from tune_model.extract.tracing.attention_step import ATTENTION
from tune_model.extract.tracing.front_end import GridError, Trace, TraceError
from tune_model.extract.tracing.import_arguments import ArgumentWriter, dtype_name
from tune_model.runtime.expression import Dim
from tune_model.runtime.operators.allowed import OperatorError, resolve
from tune_model.runtime.program import (
    Arg,
    Call,
    Constant,
    Input,
    Items,
    Output,
    Program,
    Ref,
    Step,
    Symbol,
    TensorType,
    TorchName,
    ValueRange,
    Weight,
)

__all__ = [
    "IDENTITIES",
    "UNBOUNDED",
    "Interface",
    "MutationError",
    "NamedInput",
    "SpecialisedError",
    "import_program",
    "references",
]

UNBOUNDED = 2**31 - 1
"""Maximum of a symbol that nothing limits."""


class NamedInput(NamedTuple):
    """An input as the program's caller sees it.

    Attributes:
        name: Public name.
        dims: Integers and symbol names; what the trace found must agree.
        values: For integer inputs: what to fill with when measuring.
    """

    name: str
    dims: tuple[Dim, ...]
    values: ValueRange | None = None


class Interface(NamedTuple):
    """How the traced function's flat inputs, outputs and parameters are called in the program.

    Attributes:
        phase: The program's name.
        inputs: In the order of the traced function's flat inputs.
        outputs: In the order of its flat outputs, tensors only.
        weights: Checkpoint name of each parameter and buffer the graph knows (its dotted name); one for a tied group.
        maximum: Largest legal value of each symbol that has one besides what the trace itself found.
    """

    phase: str
    inputs: tuple[NamedInput, ...]
    outputs: tuple[str, ...]
    weights: Mapping[str, str]
    maximum: Mapping[str, int]


class MutationError(TraceError):
    """The graph writes into a tensor; functionalise it first."""


class SpecialisedError(GridError):
    """A symbol was fixed while tracing.

    Attributes:
        symbol: Its name.
    """

    def __init__(self, message: str, symbol: str) -> None:
        super().__init__(message)
        self.symbol = symbol


_CASTS = frozenset(
    {
        "aten._to_copy.default",
        "aten.to.device",
        "aten.to.dtype",
        "aten.to.dtype_layout",
        "aten.to.other",
        "aten.type_as.default",
    }
)
_VIEW = "aten.view.default"
_ROW_MAJOR = (("memory_format", TorchName("memory_format", "contiguous_format")),)
_VIEWS = frozenset({"aten.view.default", "aten.reshape.default", "aten._unsafe_view.default"})
_LAZY = {"aten._conj.default": "aten.conj_physical.default", "aten._neg_view.default": "aten.neg.default"}
"""Views that leave the work to their readers; a program's values hold what they say."""
_SPELLINGS = {
    "aten.__and__.Scalar": "aten.bitwise_and.Scalar",
    "aten.__and__.Tensor": "aten.bitwise_and.Tensor",
    "aten.__or__.Scalar": "aten.bitwise_or.Scalar",
    "aten.__or__.Tensor": "aten.bitwise_or.Tensor",
    "aten.__xor__.Scalar": "aten.bitwise_xor.Scalar",
    "aten.__xor__.Tensor": "aten.bitwise_xor.Tensor",
    **_LAZY,
    # What transformers calls for expert layers where torch's own is missing or too strict while tracing.
    "transformers.grouped_mm_fallback.default": "aten._grouped_mm.default",
}
_REGIONS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}
"""Higher-order operators that only change a mode around a subgraph, and where their subgraph argument is."""


def import_program(exported: ExportedProgram, interface: Interface) -> Trace:
    """Import a graph.

    Raises:
        TraceError: A declared symbol turned out to be fixed, a size depends on data, or an operator or argument cannot
            be stored in a program.
        MutationError: The graph is not functional.
    """
    return _Importer(exported, interface).run()


def _op_name(target: torch._ops.OpOverload) -> str:
    return str(target)


def _is_user_tensor(spec: InputSpec) -> bool:
    return spec.kind is InputKind.USER_INPUT and not isinstance(spec.arg, ConstantArgument)


class _Importer:
    """State of one import."""

    def __init__(self, exported: ExportedProgram, interface: Interface) -> None:
        self.exported = exported
        self.interface = interface
        self.values: dict[str, TensorType] = {}
        self.names: dict[Node, str | tuple[str, ...]] = {}
        self.types: dict[Node, TensorType] = {}
        self.taken: set[str] = set()
        self.checked = {ATTENTION}
        self.steps: list[Call] = []
        self.weights: dict[str, Weight] = {}
        self.constants: dict[str, Constant] = {}
        self.tensors: dict[str, torch.Tensor] = {}

    def run(self) -> Trace:
        inputs, user_nodes = self._bind_symbols()
        self.taken |= {i.name for i in self.interface.inputs}
        self._bind_placeholders()
        for node, given in zip(user_nodes, self.interface.inputs, strict=True):
            self.names[node] = given.name
        outputs = self._graph(self.exported.graph_module, top=True)
        program = Program(
            name=self.interface.phase,
            symbols=self.symbols,
            inputs=inputs,
            weights=(),
            constants=(),
            forms={},
            steps=tuple(self.steps),
            values=self.values,
            outputs=tuple(Output(n, v) for n, v in zip(self.interface.outputs, outputs, strict=True)),
        )
        return self._without_unread(program)

    # ------------------------------------------------------------------------------------------------------- inputs

    def _bind_symbols(self) -> tuple[tuple[Input, ...], list[Node]]:
        """Name the tracer's symbols after the declared ones."""
        signature = self.exported.graph_signature
        by_name = {n.name: n for n in self.exported.graph.nodes if n.op == "placeholder"}
        nodes = [by_name[s.arg.name] for s in signature.input_specs if _is_user_tensor(s)]
        if len(nodes) != len(self.interface.inputs):
            names = [i.name for i in self.interface.inputs]
            raise TraceError(f"the traced graph has {len(nodes)} inputs; expected {len(names)}: {', '.join(names)}")
        bound: dict[sympy.Symbol, str] = {}
        where: dict[str, tuple[str, int]] = {}
        for node, given in zip(nodes, self.interface.inputs, strict=True):
            for axis, (size, declared) in enumerate(zip(node.meta["val"].shape, given.dims, strict=True)):
                self._bind_dim(size_expression(size), declared, given.name, axis, bound)
                if isinstance(declared, str):
                    where.setdefault(declared, (given.name, axis))
        self.write = ArgumentWriter(SizePrinter(bound), self.names)
        self.symbols = tuple(self._symbol(name, *place, bound) for name, place in where.items())
        inputs = tuple(
            Input(given.name, self.write.type(node.meta["val"]), values=given.values)
            for node, given in zip(nodes, self.interface.inputs, strict=True)
        )
        return inputs, nodes

    @staticmethod
    def _bind_dim(size: sympy.Expr, declared: Dim, name: str, axis: int, bound: dict[sympy.Symbol, str]) -> None:
        if size.is_Integer:
            if declared != int(size):
                message = (
                    f"input {name!r}, dim {axis}: {declared} became the constant {int(size)} while tracing, so the"
                    " program would be wrong for other values. Give it one value in every phase's grid"
                )
                raise SpecialisedError(message, str(declared))
            return
        if isinstance(declared, int):
            raise TraceError(f"input {name!r}, dim {axis}: expected the constant {declared}, traced as {size}")
        if not size.is_Symbol:
            message = (
                f"input {name!r}, dim {axis}: {declared} is only valid as {size}; expected any size. Give it one value"
                " in every phase's grid"
            )
            raise SpecialisedError(message, declared)
        if bound.setdefault(size, declared) != declared:
            raise TraceError(
                f"input {name!r}, dim {axis}: the model needs {declared} to equal {bound[size]}; give both one symbol"
            )

    def _symbol(self, name: str, input_: str, axis: int, bound: Mapping[sympy.Symbol, str]) -> Symbol:
        """Bounds: what guards found, except that export's own lower bound of 2 says nothing about 1."""
        low, high = 1, self.interface.maximum.get(name, UNBOUNDED)
        for symbol, bound_name in bound.items():
            limits = self.exported.range_constraints.get(symbol)
            if bound_name != name or limits is None:
                continue
            if limits.lower.is_Integer and int(limits.lower) > 2:
                low = max(low, int(limits.lower))
            if limits.upper.is_Integer:
                high = min(high, int(limits.upper))
        return Symbol(name, low, high, input_, axis)

    def _bind_placeholders(self) -> None:
        by_name = {n.name: n for n in self.exported.graph.nodes if n.op == "placeholder"}
        constants: list[tuple[Node, str]] = []
        for spec in self.exported.graph_signature.input_specs:
            if spec.kind is InputKind.USER_INPUT:
                continue
            node, name = by_name[spec.arg.name], str(spec.target)
            if spec.kind is InputKind.PARAMETER or (spec.kind is InputKind.BUFFER and spec.persistent):
                self._bind_weight(node, self.interface.weights.get(name, name))
            elif spec.kind in {InputKind.BUFFER, InputKind.CONSTANT_TENSOR}:
                constants.append((node, name))
            else:
                raise TraceError(f"the graph takes {name!r}, a {spec.kind.name.lower()}; expected tensors only")
        for node, name in constants:  # weights keep their names, whatever constants are called
            self._bind_constant(node, name)

    def _bind_weight(self, node: Node, checkpoint: str) -> None:
        known = {w.sources[0]: w.name for w in self.weights.values()}
        name = known.get(checkpoint) or self._unique(checkpoint)
        self.names[node] = name
        self.weights.setdefault(name, Weight(name, self.write.type(node.meta["val"]), (checkpoint,)))

    def _bind_constant(self, node: Node, target: str) -> None:
        value = self.exported.constants.get(target)
        if not isinstance(value, torch.Tensor) or isinstance(value, torch._subclasses.FakeTensor) or value.is_meta:
            raise TraceError(
                f"the constant tensor {target!r} has no values, since the model was built without memory; expected"
                " constants that are made in the constructor or in forward from numbers. Register it as a buffer"
            )
        name = self._unique(self.interface.weights.get(target, target))
        self.names[node] = name
        self.constants[name] = Constant(name, self.write.type(node.meta["val"]), name)
        self.tensors[name] = value.detach().resolve_conj().resolve_neg().contiguous()

    # -------------------------------------------------------------------------------------------------------- graph

    def _graph(self, module: GraphModule, *, top: bool) -> list[str]:
        """Import a graph's steps; return the values it returns."""
        outputs: list[str] = []
        for node in module.graph.nodes:
            if node.op == "call_function":
                self._call(node, module)
            elif node.op == "output":
                outputs = self._outputs(node) if top else [self.write.value(n) for n in node.args[0]]
            elif node.op not in {"placeholder", "get_attr"}:
                raise TraceError(f"the graph has a {node.op} node ({node.target}); expected operator calls only")
        return outputs

    def _outputs(self, node: Node) -> list[str]:
        specs = self.exported.graph_signature.output_specs
        changed = [s.target for s in specs if s.kind is not OutputKind.USER_OUTPUT]
        if changed:
            raise TraceError(f"the model changes {', '.join(map(str, changed))} when it runs; expected a pure forward")
        returned = cast("tuple[object, ...]", node.args[0])
        tensors = (n for n in returned if isinstance(n, Node) and isinstance(n.meta.get("val"), torch.Tensor))
        return [self.write.value(n) for n in tensors]  # what else is returned, callers have no use for

    def _call(self, node: Node, module: GraphModule) -> None:
        target = node.target
        if target is operator.getitem:
            self._getitem(node)
            return
        if isinstance(target, torch._ops.HigherOrderOperator):
            self._inline(node, module)
            return
        if not self._makes_tensors(node):
            return
        if not isinstance(target, torch._ops.OpOverload):
            raise TraceError(f"the graph calls {target}, which is not an operator")
        if self._is_identity(node):
            self.names[node] = self.names[node.args[0]]  # type: ignore[index]
            return
        if target._schema.is_mutable:
            raise MutationError(f"{target} writes into its argument")
        op = _op_name(target)
        if op in _LAZY:
            dense = torch.empty_like(node.meta["val"])
            self.names[node] = self._declare(node.name, self.write.type(dense))
            self._append(node, self._operator(op), (self.write.value(node),))
            return
        self._emit(node, self._operator(op))

    def _operator(self, op: str) -> str:
        """Return the name to store, once it is clear that the runtime executes it."""
        op = _SPELLINGS.get(op, op)
        if op not in self.checked:
            try:
                resolve(op)
            except OperatorError as error:
                raise TraceError(f"the model runs something that programs cannot: {error}") from error
            self.checked.add(op)
        return op

    @staticmethod
    def _makes_tensors(node: Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, torch.Tensor) or (
            isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value)
        )

    def _getitem(self, node: Node) -> None:
        if isinstance(node.meta.get("val"), torch.Tensor):
            source, index = node.args
            self.names[node] = self.names[source][index]  # type: ignore[index]

    def _inline(self, node: Node, module: GraphModule) -> None:
        """Splice the body of a region that only sets a mode in place of its call."""
        name = node.target._name  # type: ignore[union-attr]
        if name not in _REGIONS:
            raise TraceError(f"the graph calls the higher-order operator {name}; expected plain operators")
        at = _REGIONS[name]
        if name == "wrap_with_autocast" and node.args[2]:
            raise TraceError("the model turns autocast on in its forward; expected explicit casts")
        body = getattr(module, str(node.args[at].target))  # type: ignore[union-attr]
        holders = [n for n in body.graph.nodes if n.op == "placeholder"]
        for holder, given in zip(holders, node.args[at + 1 :], strict=True):
            if given in self.names:
                self.names[holder] = self.names[given]  # type: ignore[index]
        self.names[node] = tuple(self._graph(body, top=False))

    def _is_identity(self, node: Node) -> bool:
        """Say whether a call returns its first argument as is: same elements, dtype and layout.

        The graph is functional and writes only into caches, so a copy of the same layout is as good as its source.
        """
        source = node.args[0] if node.args else None
        if not isinstance(source, Node) or self.names.get(source) is None:
            return False
        before, after = source.meta.get("val"), node.meta["val"]
        if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
            return False
        op = _op_name(node.target)  # type: ignore[arg-type]
        if op not in IDENTITIES or before.dtype != after.dtype or before.dim() != after.dim():
            return False
        if op == "aten.dropout.default":
            return bool(node.args[2] is False or node.args[1] == 0.0)
        return self.write.layout(before) == self.write.layout(after)

    def _emit(self, node: Node, op: str) -> None:
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            results = tuple(self._declare(f"{node.name}.{i}", self.write.type(v)) for i, v in enumerate(value))
            self.names[node] = results
            self._append(node, op, results)
            return
        name = self.names[node] = self._declare(node.name, self.write.type(value))
        source = node.args[0] if node.args else None
        if not isinstance(source, Node) or not isinstance(source.meta.get("val"), torch.Tensor):
            self._append(node, op, (name,))
            return
        before = source.meta["val"]
        if op in _CASTS and before.dtype != value.dtype and self.write.layout(before) == self.write.layout(value):
            dtype = TorchName("dtype", dtype_name(value))
            self.steps.append(Call("aten.to.dtype", (Ref(self.write.value(source)), dtype), (), (name,)))
        elif op in _VIEWS:
            self.steps.append(Call(_VIEW, (Ref(self._viewable(source, value)), self.write.shape(value)), (), (name,)))
        else:
            self._append(node, op, (name,))

    def _append(self, node: Node, op: str, results: tuple[str, ...]) -> None:
        given = list(node.args)
        if op == "aten.slice.Tensor" and len(given) > 2 and given[2] is None:
            given[2] = 0
        args = tuple(self.write.argument(a) for a in given)
        keywords = tuple((k, self.write.argument(a)) for k, a in sorted(node.kwargs.items()))
        self.steps.append(Call(op, args, keywords, results))

    def _viewable(self, source: Node, reshaped: torch.Tensor) -> str:
        """Name a value that `view` can reshape: the source, or a row-major copy where the tracer had to copy.

        The copy is a step of its own, since a reshape that copies at most sizes may be a view at others (batch 1).
        """
        before, name = source.meta["val"], self.write.value(source)
        if before.untyped_storage()._cdata == reshaped.untyped_storage()._cdata:
            return name
        type_ = self.write.type(before)
        copy = self._declare(f"{source.name}_copy", TensorType(type_.dtype, type_.shape))
        self.steps.append(Call("aten.clone.default", (Ref(name),), _ROW_MAJOR, (copy,)))
        return copy

    def _declare(self, name: str, type_: TensorType) -> str:
        name = self._unique(name)
        self.values[name] = type_
        return name

    def _unique(self, name: str) -> str:
        found, count = name, 0
        while found in self.taken:
            count += 1
            found = f"{name}_{count}"
        self.taken.add(found)
        return found

    # ----------------------------------------------------------------------------------------------------- clean-up

    def _without_unread(self, program: Program) -> Trace:
        """Drop steps nobody reads, then the weights and constants that only those read."""
        wanted = {o.value for o in program.outputs}
        kept: list[Step] = []
        for step in reversed(self.steps):
            if not wanted.intersection(r for r in step.results if r is not None):
                continue
            wanted |= set(references(step))
            kept.append(Call(step.op, step.args, step.kwargs, tuple(r if r in wanted else None for r in step.results)))
        made = {r for s in kept if isinstance(s, Call) for r in s.results if r is not None}
        program = Program(
            name=program.name,
            symbols=program.symbols,
            inputs=program.inputs,
            weights=tuple(w for w in self.weights.values() if w.name in wanted),
            constants=tuple(c for c in self.constants.values() if c.name in wanted),
            forms={},
            steps=tuple(reversed(kept)),
            values={name: type_ for name, type_ in program.values.items() if name in made},
            outputs=program.outputs,
        )
        return Trace(program, {c.key: self.tensors[c.key] for c in program.constants})


IDENTITIES = _CASTS | _VIEWS | frozenset(
    {
        "aten.alias.default",
        "aten.clone.default",
        "aten.contiguous.default",
        "aten.detach.default",
        "aten.detach_.default",
        "aten.dropout.default",
        "aten.expand.default",
        "aten.lift_fresh.default",
        "aten.lift_fresh_copy.default",
        "aten.slice.Tensor",
        "aten.view_as.default",
    }
)  # fmt: skip


def references(call: Call) -> list[str]:
    """Return the values a call reads, in order, with repetitions."""
    found: list[str] = []
    pending: list[Arg] = [*call.args, *(a for _, a in call.kwargs)]
    while pending:
        arg = pending.pop(0)
        if isinstance(arg, Ref):
            found.append(arg.name)
        elif isinstance(arg, Items):
            pending[:0] = arg.items
    return found
