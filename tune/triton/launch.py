"""One statement of a kernel's arguments, from which its specialisation, launch facts and requirements all follow.

A compiled kernel takes its non-constexpr arguments in order, tuples flattened, and after them always two pointers: to
global scratch memory, in which it makes tensor descriptors (null where it makes none), and one for profiling, null.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from tune_model.runtime.expression import Dim, product
from tune_model.runtime.kernel import (
    Aligned,
    CudaLaunch,
    Integer,
    KernelArgument,
    KernelStep,
    Multiple,
    Null,
    Pointer,
    Requirement,
    Workspace,
)
from tune_model.runtime.kernel import Kernel as RuntimeKernel
from tune_model.tune.candidate import Built, Rejected
from tune_model.tune.target import CudaTarget, Target
from tune_model.tune.triton.compile import Binary, Options, Source, compile_kernel

__all__ = ["Argument", "Constant", "KernelPlan", "Launch", "SizeOf", "Slot", "build_kernel", "specialise"]

_ALIGNMENT = 16
_POINTERS = {
    "bool": "*i1",
    "uint8": "*u8",
    "int8": "*i8",
    "int16": "*i16",
    "int32": "*i32",
    "int64": "*i64",
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "float32": "*fp32",
    "float64": "*fp64",
}


class Slot(NamedTuple):
    """A pointer argument.

    Attributes:
        name: Slot or workspace.
        dtype: Torch's name of its elements' type.
        aligned: Promise 16 bytes to the compiler and demand them of every call.
    """

    name: str
    dtype: str
    aligned: bool = True


class SizeOf(NamedTuple):
    """An integer argument that stays one at run time.

    Attributes:
        expression: Over slot layouts: `a0.stride0`.
        divisible: Promise divisibility by 16 to the compiler and demand it of every call.
        bits: 32 or 64.
    """

    expression: Dim
    divisible: bool = False
    bits: int = 32


class Constant(NamedTuple):
    """A constexpr: an integer, a bool, a string, a Triton dtype or another `@triton.jit` function."""

    value: Any


Argument = Slot | SizeOf | Constant | tuple["Argument", ...]


class Launch(NamedTuple):
    """One launch of one kernel.

    Attributes:
        function: The `@triton.jit` function.
        arguments: By name, one for every parameter of `function`.
        grid: Blocks in x, y, z.
        options: For the compiler.
    """

    function: Any
    arguments: Mapping[str, Argument]
    grid: tuple[Dim, Dim, Dim]
    options: Options


class KernelPlan(NamedTuple):
    """A kernel before it is compiled.

    Attributes:
        launches: In order; steps that are ready (ATen calls) pass through.
        workspaces: Scratch slots that launches name.
        layouts: Weight layouts that the kernel demands.
        requires: What must hold besides alignment and divisibility, which follow from the arguments.
    """

    launches: tuple[Launch | KernelStep, ...]
    workspaces: tuple[Workspace, ...] = ()
    layouts: tuple[tuple[str, str], ...] = ()
    requires: tuple[Requirement, ...] = ()


class _Collected:
    """What walking the arguments gathers."""

    def __init__(self) -> None:
        self.constants: dict[tuple[int, ...], Any] = {}
        self.attributes: dict[tuple[int, ...], list[list[Any]]] = {}
        self.parameters: list[KernelArgument] = []
        self.requires: dict[Requirement, None] = {}

    def walk(self, argument: Argument, path: tuple[int, ...]) -> Any:
        """Return the argument's type in a signature and note everything that follows from it."""
        match argument:
            case Slot(name, dtype, aligned):
                self.parameters.append(Pointer(name))
                if aligned:
                    self.attributes[path] = [["tt.divisibility", _ALIGNMENT]]
                    self.requires[Aligned(name, _ALIGNMENT)] = None
                return _POINTERS[dtype]
            case SizeOf(expression, divisible, bits):
                self.parameters.append(Integer(expression, 64 if bits == 64 else 32))
                if divisible:
                    self.attributes[path] = [["tt.divisibility", _ALIGNMENT]]
                    self.requires[Multiple(expression, _ALIGNMENT)] = None
                return f"i{bits}"
            case Constant(value):
                self.constants[path] = value
                return "constexpr"
            case _:
                return tuple(self.walk(item, (*path, i)) for i, item in enumerate(argument))


def _collect(launch: Launch) -> tuple[Source, _Collected]:
    names = list(launch.function.arg_names)
    if set(names) != set(launch.arguments):
        difference = sorted(set(names) ^ set(launch.arguments))
        raise TypeError(f"{launch.function.__name__}: arguments do not match its parameters: {difference}")
    collected = _Collected()
    signature = {name: collected.walk(launch.arguments[name], (i,)) for i, name in enumerate(names)}
    return Source(launch.function, signature, collected.constants, collected.attributes), collected


def specialise(launch: Launch) -> Source:
    """Return a launch's kernel as the compiler wants it."""
    return _collect(launch)[0]


def build_kernel(plan: KernelPlan | Rejected, target: Target) -> Built | Rejected:
    """Compile every launch and state the whole kernel; what was rejected before stays so."""
    if isinstance(plan, Rejected):
        return plan
    if not isinstance(target, CudaTarget):
        return Rejected("unsupported", "a CUDA kernel")
    steps: list[KernelStep] = []
    code: dict[str, bytes] = {}
    demands: dict[Requirement, None] = dict.fromkeys(plan.requires)
    binaries: list[Binary] = []
    workspaces = list(plan.workspaces)
    scratch = {workspace.name for workspace in plan.workspaces}
    for launch in plan.launches:
        if not isinstance(launch, Launch):
            steps.append(launch)
            continue
        source, collected = _collect(launch)
        binary = compile_kernel(source, launch.options, target)
        if isinstance(binary, Rejected):
            return binary
        digest = hashlib.sha256(binary.cubin).hexdigest()
        code[digest] = binary.cubin
        binaries.append(binary)
        descriptors: KernelArgument = Null()
        if binary.scratch_bytes:
            workspace = Workspace(f"ws{len(workspaces)}", "uint8", product((*launch.grid, binary.scratch_bytes)))
            workspaces.append(workspace)
            descriptors = Pointer(workspace.name)
        demands.update((r, None) for r in collected.requires if not (isinstance(r, Aligned) and r.slot in scratch))
        steps.append(
            CudaLaunch(
                digest,
                binary.entry,
                launch.grid,
                binary.num_warps,
                binary.shared_bytes,
                (*collected.parameters, descriptors, Null()),
                programmatic=launch.options.programmatic,
            )
        )
    return Built(
        RuntimeKernel(tuple(steps), tuple(workspaces), plan.layouts, tuple(demands)),
        code,
        max((b.registers for b in binaries), default=0),
        max((b.spill_bytes for b in binaries), default=0),
        sum(b.seconds for b in binaries),
    )
