"""Front end for saved `torch.export` programs (`.pt2`)."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from tune_model.extract.checking.grid import check_grid, check_names
from tune_model.extract.request import ExportedSource, ModelInput, Request
from tune_model.extract.tracing.front_end import SourceError, Trace, TraceError
from tune_model.extract.tracing.graph import fix_single_sizes, import_functional
from tune_model.extract.tracing.import_arguments import dtype_name
from tune_model.extract.tracing.import_graph import Interface, NamedInput
from tune_model.extract.tracing.outputs import named_values
from tune_model.runtime.expression import Dim

__all__ = ["ExportedModule", "SavedDtypeError", "load_exported", "settle_exported", "trace_exported"]

_log = logging.getLogger(__name__)


class SavedDtypeError(SourceError):
    """A request asks for another dtype than a saved program has."""


class _Dtypes(NamedTuple):
    """What a saved program computes in.

    Attributes:
        floating: Floating-point dtypes of its weights, the one with most elements first; without any, of its inputs.
        inputs: Of every input, by name.
    """

    floating: tuple[str, ...]
    inputs: dict[str, str]


def settle_exported(request: Request) -> Request:
    """Fill in the dtypes that a request leaves to the saved program: its own and those of its inputs.

    Raises:
        SourceError: The file is missing or damaged, or the inputs do not fit it.
        SavedDtypeError: The request asks for another dtype, which a saved program cannot be given.
    """
    source = request.source
    if not isinstance(source, ExportedSource):
        return request
    if not Path(source.path).is_file():
        raise _not_there(source.path)
    found = _dtypes(source.path, Path(source.path).stat().st_mtime_ns)
    if request.dtype and found.floating and request.dtype not in found.floating:
        raise SavedDtypeError(
            f"is {request.dtype}; expected {found.floating[0]}, which {source.path} was saved in and keeps (leave dtype"
            " out, or save the program in another)"
        )
    order = dict(zip(_matched(found.inputs, request.inputs, source.path), found.inputs.values(), strict=False))
    return msgspec.structs.replace(
        request,
        dtype=request.dtype or next(iter(found.floating), "float32"),
        inputs=tuple(i if i.dtype else msgspec.structs.replace(i, dtype=order[i]) for i in request.inputs),
    )


@lru_cache(maxsize=16)
def _dtypes(path: str, _changed: int) -> _Dtypes:
    exported = load_exported(path)
    inputs = _input_values(exported)
    elements: Counter[str] = Counter()
    for tensor in exported.state_dict.values():
        elements[dtype_name(tensor)] += tensor.numel() if tensor.is_floating_point() else 0
    if not +elements:
        elements.update(dtype_name(value) for value in inputs.values() if value.is_floating_point())
    floating = tuple(name for name, count in elements.most_common() if count)
    return _Dtypes(floating, {name: dtype_name(value) for name, value in inputs.items()})


def trace_exported(request: Request) -> tuple[Trace, ...]:
    """Import a saved program, once per phase.

    Args:
        request: With an `ExportedSource`. `inputs` names the program's dynamic dims; without any it may be empty.

    Raises:
        SourceError: The file is missing or damaged, or the inputs do not fit it.
        TraceError: The graph cannot be imported, or not for the sizes the grid asks for.
    """
    source = request.source
    if not isinstance(source, ExportedSource):
        raise TypeError(f"trace_exported got a {type(source).__name__}")
    if request.task == "causal-lm":
        raise TraceError("causal-lm needs a transformers model, whose attention can be recognised; use task: forward")
    exported = load_exported(source.path)
    inputs = _inputs(exported, request.inputs, source.path)
    check_names(inputs, request.phases, source.path)
    traces = []
    for phase in request.phases:

        def attempt(fixed: Mapping[str, int], name: str = phase.name) -> Trace:
            settled = tuple(
                i._replace(dims=tuple(fixed.get(d, d) if isinstance(d, str) else d for d in i.dims)) for i in inputs
            )
            return import_functional(exported, Interface(name, settled, _outputs(exported), _weights(exported), {}))

        trace = fix_single_sizes(f"{source.path}, {phase.name}", request.phases, attempt)
        check_grid(trace.program, phase, source.path)
        notes = ("imported from a saved torch.export program", *trace.notes)
        traces.append(trace._replace(notes=tuple(f"{phase.name}: {n}" for n in notes)))
    return tuple(traces)


def load_exported(path: str) -> ExportedProgram:
    """Read a `.pt2` file.

    Raises:
        SourceError: It is missing or damaged.
    """
    if not Path(path).is_file():
        raise _not_there(path)
    log = logging.getLogger("torch.export")
    before, log.disabled = log.disabled, True  # it writes a traceback for each way of reading that it tries
    try:
        return torch.export.load(path)
    except Exception as error:  # zip, json and pickle errors, by damage
        text = " ".join(str(error).split())[:300]
        raise SourceError(
            f"{path} could not be read as a torch.export program: {type(error).__name__}: {text}. It may be damaged or"
            " saved by another torch version; save it again"
        ) from error
    finally:
        log.disabled = before


def _not_there(path: str) -> SourceError:
    return SourceError(f"{path} is not a file; expected a program saved with torch.export.save")


class ExportedModule(torch.nn.Module):
    """A saved program that is called with its input tensors in order, however nested its arguments were.

    Parameters and buffers have the names they were saved with.
    """

    def __init__(self, exported: ExportedProgram) -> None:
        super().__init__()
        graph = exported.module()
        self._parameters, self._buffers, self._modules = graph._parameters, graph._buffers, graph._modules
        object.__setattr__(self, "_graph", graph)  # no child: its own children are ours already
        self._arguments = [s.arg for s in exported.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
        self._structure = exported.call_spec.in_spec

    def forward(self, *tensors: torch.Tensor) -> object:
        """Run the program; arguments that were saved as constants are filled in."""
        given = iter(tensors)
        leaves = [a.value if isinstance(a, ConstantArgument) else next(given) for a in self._arguments]
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        returned: object = self._graph(*args, **kwargs)  # type: ignore[operator]
        return returned


def _inputs(exported: ExportedProgram, given: tuple[ModelInput, ...], path: str) -> tuple[NamedInput, ...]:
    """Name the program's inputs: as the request does, else as it does itself if all its sizes are fixed."""
    values = _input_values(exported)
    if not given:
        dynamic = [n for n, v in values.items() if any(isinstance(s, torch.SymInt) for s in v.shape)]
        if dynamic:
            raise SourceError(
                f"{path} has dynamic sizes in {', '.join(dynamic)}; list all inputs under inputs: and name those sizes"
            )
        return tuple(NamedInput(n, tuple(int(s) for s in v.shape)) for n, v in values.items())
    ordered = _matched(values, given, path)
    for input_, value in zip(ordered, values.values(), strict=True):
        dtype = dtype_name(value)
        if len(input_.shape) != value.dim() or (input_.dtype or dtype) != dtype:
            raise SourceError(
                f"input {input_.name!r} is {input_.dtype or dtype} with {len(input_.shape)} dims; {path} takes {dtype}"
                f" with {value.dim()}"
            )
    return tuple(NamedInput(i.name, _dims(i)) for i in ordered)


def _matched(names: Sequence[str] | Mapping[str, object], given: tuple[ModelInput, ...], path: str) -> list[ModelInput]:
    """Put inputs in the program's order: by its own names where all are, else as they are given.

    Raises:
        SourceError: There are more or fewer, or one has the program's name of another.
    """
    if given and len(given) != len(names):
        raise SourceError(f"{path} takes {len(names)} tensors ({', '.join(names)}); the request lists {len(given)}")
    by_name = {i.name: i for i in given}
    if by_name.keys() == set(names):
        return [by_name[name] for name in names]
    for input_, own in zip(given, names, strict=False):
        if input_.name != own and input_.name in names:
            raise SourceError(
                f"input {input_.name!r} is given where {path} takes {own!r}; expected all of its own names"
                f" ({', '.join(names)}), or others in their order"
            )
    return list(given)


def _dims(input_: ModelInput) -> tuple[Dim, ...]:
    return tuple(input_.shape)


def _input_values(exported: ExportedProgram) -> dict[str, torch.Tensor]:
    nodes = {n.name: n for n in exported.graph.nodes if n.op == "placeholder"}
    found: dict[str, torch.Tensor] = {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind is not InputKind.USER_INPUT or isinstance(spec.arg, ConstantArgument):
            continue
        if not isinstance(spec.arg, TensorArgument):
            raise TraceError(f"the program takes {spec.arg.name}, a number; expected tensors and constants only")
        found[spec.arg.name] = nodes[spec.arg.name].meta["val"]
    return found


def _outputs(exported: ExportedProgram) -> tuple[str, ...]:
    """Name the tensors that the program returns; what else it returns (`None`, a number) is left out."""
    specs = [s for s in exported.graph_signature.output_specs if s.kind is OutputKind.USER_OUTPUT]
    structure = pytree.tree_unflatten(list(range(len(specs))), exported.call_spec.out_spec)
    names = {index: name for name, index in named_values(structure) if isinstance(index, int)}
    found = [names.get(i, f"output_{i}") for i, spec in enumerate(specs) if isinstance(spec.arg, TensorArgument)]
    if not found:
        raise TraceError("the program returns no tensors; expected at least one")
    return tuple(found)


def _weights(exported: ExportedProgram) -> dict[str, str]:
    """One name for tensors that share memory."""
    saved: dict[tuple[object, ...], str] = {}
    found: dict[str, str] = {}
    for name, tensor in exported.state_dict.items():
        key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())
        found[name] = saved.setdefault(key, name)
    return found
