"""The matmul by one of cuBLASLt's algorithms, chosen by the stopwatch instead of the library's heuristic.

What follows the matmul is one generated Triton kernel; a bias goes into the library call. The weight may be stored
transposed: the library has other kernels for that. An algorithm means the same kernel in one version of the library
only, so a stored choice is not legal with another.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from typing import Final

import msgspec

from tune_model.extract.task import Task
from tune_model.runtime.expression import evaluate
from tune_model.runtime.kernel import (
    Aligned,
    Kernel,
    LibraryAlgorithm,
    LibraryMatmul,
    Requirement,
    Within,
    Workspace,
)
from tune_model.runtime.launch.cublaslt import ALIGNMENT, Problem
from tune_model.runtime.program import FormKind
from tune_model.runtime.replay import slot_sizes
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.families.triton_epilogue import REST_SHAPES, rest_launch
from tune_model.tune.library_algorithms import LibraryChoice, library_version, proposals, variations
from tune_model.tune.loops.rest import MatmulParts, RestKernel, lower_rest, take_apart
from tune_model.tune.relayout import TRANSPOSED
from tune_model.tune.search.order import LIMITS, thin
from tune_model.tune.target import CudaTarget, Target
from tune_model.tune.triton.launch import KernelPlan, build_kernel

__all__ = ["FAMILY", "CublasLtMatmul"]

_DTYPES: Final = ("bfloat16", "float16", "float32")
_PLAIN: Final = "plain"
_LARGEST_INDEX: Final = 2**31 - 8192
_FIELDS: Final = tuple(field.name for field in msgspec.structs.fields(LibraryAlgorithm))


class _Parts(msgspec.Struct, frozen=True):
    """A task as one library product and a rest.

    Attributes:
        parts: The form taken apart.
        rest: What follows, if anything does.
        problem: The product at the task's sizes, with the weight as the form stores it.
        relayable: The weight is the model's own matrix, so it may be stored in another way.
    """

    parts: MatmulParts
    rest: RestKernel | None
    problem: Problem
    relayable: bool


class CublasLtMatmul:
    """See the module."""

    name = "cublaslt"
    version = 1
    kinds: frozenset[FormKind] = frozenset({"matmul"})

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept a linear layer that the library has an algorithm for; the library is asked on the GPU itself."""
        if not isinstance(target, CudaTarget):
            return Rejected("unsupported", "a CUDA library")
        found = _read(task)
        if isinstance(found, Rejected):
            return found
        if library_version(target) is None:
            return Rejected("unsupported", "cuBLASLt lists its algorithms on the GPU itself, which is not here")
        if not proposals(found.problem):
            return Rejected("unsupported", f"cuBLASLt has no algorithm for {found.problem}")
        return None

    def start(self, task: Task, target: Target) -> Config:
        """Return the algorithm that the library itself would take."""
        return next(self.configurations(task, target, Effort.QUICK))

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield the library's proposals in its own order, for the weight as it is and transposed in turn."""
        found = _read(task)
        if isinstance(found, Rejected) or not isinstance(target, CudaTarget):
            return
        version = library_version(target)
        if version is None:
            return
        share = _share(found.problem)
        most = max(1, round(LIMITS[effort] * share))
        lists = [_configs(found.problem, _PLAIN, version, effort, most)]
        if found.relayable:
            lists.append(_configs(_transposed(found.problem), TRANSPOSED, version, effort, most))
        in_turn = (config for pair in zip_longest(*lists) for config in pair if config is not None)
        yield from thin(in_turn, effort, share)

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """State the call and compile what follows it."""
        found = _read(task)
        if isinstance(found, Rejected) or not isinstance(target, CudaTarget):
            return found if isinstance(found, Rejected) else Rejected("unsupported", "a CUDA library")
        values = dict(config)
        parts, rest = found.parts, found.rest
        plain = values["layout"] == _PLAIN
        problem = found.problem if plain else _transposed(found.problem)
        workspaces: list[Workspace] = []
        result = task.form.results[0].name
        names = {parts.product: result}
        if rest is not None:
            names = rest.names
            kept = any(p.name == parts.product for p in task.form.results)
            if rest.product == parts.product and not kept:  # nothing may be written over: scratch memory
                names = {parts.product: "ws0"}
                size = f"{parts.a}.size0*{parts.n}"
                workspaces.append(Workspace("ws0", parts.type.dtype, size))
        bytes_ = int(values["workspace_bytes"])
        if bytes_:
            workspaces.append(Workspace("ws1", "uint8", bytes_))
        step = LibraryMatmul(
            a=parts.a,
            b=parts.weight,
            result=names[parts.product],
            m=f"{parts.a}.size0",
            n=parts.n,
            k=parts.k,
            a_stride=f"{parts.a}.stride0",
            b_stride=problem.b_stride,
            dtype=parts.type.dtype,  # type: ignore[arg-type]  # one of _DTYPES
            algorithm=LibraryAlgorithm(**{name: int(values[name]) for name in _FIELDS}),
            version=int(values["version"]),
            b_by_columns=problem.b_by_columns,
            tf32=problem.tf32,
            bias=parts.bias,
            workspace="ws1" if bytes_ else None,
            workspace_bytes=bytes_,
        )
        layouts = () if plain else ((parts.weight, TRANSPOSED),)
        demands = _demands(found, result)
        if rest is None:
            return Built(Kernel((*parts.before, step), tuple(workspaces), layouts, demands), {})
        launch = rest_launch(rest, names, *REST_SHAPES[0])
        limit = Within(launch.grid[0], 0, _LARGEST_INDEX)
        requires = (*demands, *rest.requires, limit)
        plan = KernelPlan((*parts.before, step, launch), tuple(workspaces), layouts, requires)
        return build_kernel(plan, target)


def _read(task: Task) -> _Parts | Rejected:
    parts = take_apart(task.form)
    if isinstance(parts, Rejected):
        return parts
    if parts.type.dtype not in _DTYPES:
        return Rejected("unsupported", f"a product of {parts.type.dtype}; expected one of {', '.join(_DTYPES)}")
    if 0 in (parts.m, parts.n, parts.k):
        return Rejected("unsupported", f"an empty product {parts.m} x {parts.n} x {parts.k}")
    rest = lower_rest(task.form, parts) if parts.rest else None
    if isinstance(rest, Rejected):
        return rest
    if rest is None and task.form.results[0].name != parts.product:
        return Rejected("unsupported", "the result is a view of the product")
    sizes = slot_sizes(task.form)
    a_stride, a_step = (evaluate(f"{parts.a}.stride{dim}", sizes) for dim in (0, 1))
    w_stride, w_step = (evaluate(f"{parts.weight}.stride{dim}", sizes) for dim in (0, 1))
    if (parts.k > 1 and a_step != 1) or 1 not in (w_stride, w_step):
        return Rejected("unsupported", f"operands with strides ({a_stride}, {a_step}) and ({w_stride}, {w_step})")
    by_columns = w_step == 1
    tf32 = parts.type.dtype == "float32" and task.rules.allow_tf32
    problem = Problem(
        parts.m,
        parts.n,
        parts.k,
        a_stride,
        w_stride if by_columns else w_step,
        parts.n,
        parts.type.dtype,
        False,
        by_columns,
        tf32,
        parts.bias is not None,
    )
    role = next(p.role for p in task.form.parameters if p.name == parts.weight)
    relayable = role == "weight" and (w_stride, w_step) == (parts.k, 1)
    return _Parts(parts, rest, problem, relayable)


def _transposed(problem: Problem) -> Problem:
    return msgspec.structs.replace(problem, b_by_columns=False, b_stride=problem.n)


def _configs(problem: Problem, layout: str, version: int, effort: Effort, at_most: int) -> Iterator[Config]:
    """Yield configurations for one layout, as many as could be of use."""
    choices: Sequence[LibraryChoice] = proposals(problem)
    more = variations(problem, max(0, at_most - len(choices))) if effort is Effort.THOROUGH else ()
    for choice in chain(choices, more):
        numbers = ((name, getattr(choice.algorithm, name)) for name in _FIELDS)
        yield (("layout", layout), *numbers, ("workspace_bytes", choice.workspace_bytes), ("version", version))


def _demands(found: _Parts, result: str) -> tuple[Requirement, ...]:
    """Pin rows and stride: whether an algorithm is legal, and what it needs, was asked for these alone."""
    parts, problem = found.parts, found.problem
    return (
        Within(f"{parts.a}.size0", problem.m, problem.m),
        Within(f"{parts.a}.stride0", problem.a_stride, problem.a_stride),
        *(Aligned(slot, ALIGNMENT) for slot in (parts.a, parts.weight, result)),
    )


def _share(problem: Problem) -> float:
    """Return this family's part of the search: with few rows others are likelier to win."""
    return 0.2 if problem.m <= 4 else 0.4 if problem.m <= 64 else 0.6


FAMILY = CublasLtMatmul()
