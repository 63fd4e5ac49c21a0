"""Front end for saved `torch.export` programs (`.pt2`)."""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, TensorArgument
from torch.utils import _pytree as pytree

from tune_model.extract.checking.grid import check_grid, check_names
from tune_model.extract.request import ExportedSource, ModelInput, Request
from tune_model.extract.tracing.front_end import SourceError, Trace, TraceError
from tune_model.extract.tracing.graph import fix_single_sizes, import_functional
from tune_model.extract.tracing.import_graph import Interface, NamedInput
from tune_model.extract.tracing.outputs import named_values
from tune_model.runtime.expression import Dim

__all__ = ["ExportedModule", "load_exported", "trace_exported"]

_log = logging.getLogger(__name__)


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
        raise SourceError(f"{path} is not a file; expected a program saved with torch.export.save")
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
    if len(given) != len(values):
        raise SourceError(f"{path} takes {len(values)} tensors ({', '.join(values)}); the request lists {len(given)}")
    names = [i.name for i in given]
    by_name = dict(zip(names, given, strict=True))
    ordered = [by_name[n] for n in values] if set(names) == set(values) else list(given)
    for input_, value in zip(ordered, values.values(), strict=True):
        dtype = str(value.dtype).removeprefix("torch.")
        if len(input_.shape) != value.dim() or input_.dtype != dtype:
            raise SourceError(
                f"input {input_.name!r} is {input_.dtype} with {len(input_.shape)} dims; {path} takes {dtype} with"
                f" {value.dim()}"
            )
    return tuple(NamedInput(i.name, _dims(i)) for i in ordered)


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
    count = len(exported.graph_signature.user_outputs)
    structure = pytree.tree_unflatten(list(range(count)), exported.call_spec.out_spec)
    names = {index: name for name, index in named_values(structure) if isinstance(index, int)}
    return tuple(names.get(i, f"output_{i}") for i in range(count))


def _weights(exported: ExportedProgram) -> dict[str, str]:
    """One name for tensors that share memory."""
    saved: dict[tuple[object, ...], str] = {}
    found: dict[str, str] = {}
    for name, tensor in exported.state_dict.items():
        key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())
        found[name] = saved.setdefault(key, name)
    return found
