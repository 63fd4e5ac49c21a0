"""Bind a kernel to a concrete form: sizes, grids and code are settled, only memory is left for the call.

A prepared kernel *emits* its steps over somebody's slot list: a program's plan emits every kernel over its own values;
`bind_kernel` emits one over a list of its own and is what the tuner times.
"""

import struct
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tune_model.runtime.execution.emission import (
    KernelError,
    Operand,
    PreparedKernel,
    PreparedLaunch,
    PreparedWorkspace,
    emit,
)
from tune_model.runtime.execution.invoke import PreparedStep, Slots, torch_dtype
from tune_model.runtime.execution.layout import Layout, layout_of
from tune_model.runtime.expression import evaluate
from tune_model.runtime.kernel import (
    Aligned,
    CpuLaunch,
    CudaLaunch,
    Integer,
    Kernel,
    KernelArgument,
    LibraryMatmul,
    Null,
    Pointer,
    Scalar,
)
from tune_model.runtime.launch.counters import LentCounters
from tune_model.runtime.launch.cpu_library import prepare_cpu_call
from tune_model.runtime.launch.cublaslt import Places, Problem, open_cublaslt
from tune_model.runtime.launch.cuda_driver import Geometry, open_driver, prepare_launch
from tune_model.runtime.launch.machine_code import CodeLoader, device_index
from tune_model.runtime.program import Call, Form, bind_call
from tune_model.runtime.replay import slot_sizes

__all__ = ["BoundKernel", "bind_kernel", "body_kernel", "prepare_kernel"]


def body_kernel(form: Form) -> Kernel:
    """Return the form's own ATen sequence as a kernel."""
    return Kernel(form.body)


def _constant(argument: KernelArgument, sizes: Mapping[str, int]) -> bytes:
    match argument:
        case Integer(expression, bits):
            value = evaluate(expression, sizes)
            if not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
                raise KernelError(f"kernel argument {expression} is {value}; it has {bits} bits")
            return struct.pack("<i" if bits == 32 else "<q", value)
        case Scalar(value):
            return struct.pack("<f", value)
        case Null():
            return bytes(8)
        case Pointer():
            raise AssertionError("pointers are not constants")


def _prepare_cuda(
    launch: CudaLaunch, sizes: Mapping[str, int], loader: CodeLoader, device: torch.device
) -> PreparedLaunch:
    grid = (evaluate(launch.grid[0], sizes), evaluate(launch.grid[1], sizes), evaluate(launch.grid[2], sizes))
    if min(grid) < 0:
        raise KernelError(f"kernel {launch.entry!r} has grid {grid}")
    geometry = Geometry(grid, launch.num_warps, launch.shared_bytes, launch.cluster, launch.programmatic)
    function = loader.cuda(launch, device)
    names = tuple(dict.fromkeys(a.slot for a in launch.arguments if isinstance(a, Pointer)))
    arguments = tuple(names.index(a.slot) if isinstance(a, Pointer) else _constant(a, sizes) for a in launch.arguments)

    def emit_step(index: Callable[[str], int]) -> PreparedStep:
        return prepare_launch(open_driver(), function, geometry, tuple(index(n) for n in names), arguments)

    return PreparedLaunch(names, emit_step)


def _prepare_cpu(launch: CpuLaunch, sizes: Mapping[str, int], loader: CodeLoader) -> PreparedLaunch:
    function = loader.cpu(launch)
    values = tuple(evaluate(s, sizes) for s in launch.sizes)

    def emit_step(index: Callable[[str], int]) -> PreparedStep:
        return prepare_cpu_call(function, values, tuple(index(n) for n in launch.pointers))

    return PreparedLaunch(launch.pointers, emit_step)


def _prepare_library(step: LibraryMatmul, sizes: Mapping[str, int], device: torch.device) -> PreparedLaunch:
    m, n, k = (evaluate(size, sizes) for size in (step.m, step.n, step.k))
    a_stride, b_stride = evaluate(step.a_stride, sizes), evaluate(step.b_stride, sizes)
    problem = Problem(
        m, n, k, a_stride, b_stride, n, step.dtype, False, step.b_by_columns, step.tf32, step.bias is not None
    )
    library = open_cublaslt(device_index(device))
    needed = library.workspace_bytes(problem, step.algorithm)  # it is checked here, before anything is captured
    if needed > step.workspace_bytes:
        raise KernelError(f"{step.algorithm} needs a workspace of {needed} bytes; it has {step.workspace_bytes}")
    given = (step.a, step.b, step.result, step.bias, step.workspace)

    def emit_step(index: Callable[[str], int]) -> PreparedStep:
        bias = None if step.bias is None else index(step.bias)
        workspace = None if step.workspace is None else index(step.workspace)
        places = Places(index(step.a), index(step.b), index(step.result), bias, workspace)
        return library.prepare(problem, step.algorithm, step.workspace_bytes, places)

    return PreparedLaunch(tuple(name for name in given if name is not None), emit_step)


def prepare_kernel(
    kernel: Kernel, form: Form, loader: CodeLoader, device: torch.device, lent: LentCounters
) -> PreparedKernel:
    """Settle everything about a kernel but memory.

    Args:
        kernel: Legal for the form; `requires` are not checked here.
        form: Concrete.
        loader: Has the kernel's code.
        device: Where it will run.
        lent: Keeps its counters in captures that others make.

    Raises:
        KernelError: A launch fact does not fit.
        CodeMissingError: The loader lacks its code.
        DriverError: A cubin does not load.
        LibraryError: A shared library does not load.
        CublasLtError: The library does not know an algorithm.
    """
    sizes = slot_sizes(form)
    steps: list[Call | PreparedLaunch] = []
    for step in kernel.steps:
        if isinstance(step, CudaLaunch):
            steps.append(_prepare_cuda(step, sizes, loader, device))
        elif isinstance(step, CpuLaunch):
            steps.append(_prepare_cpu(step, sizes, loader))
        elif isinstance(step, LibraryMatmul):
            steps.append(_prepare_library(step, sizes, device))
        else:
            steps.append(bind_call(step, sizes))
    workspaces = tuple(
        PreparedWorkspace(w.name, Layout(torch_dtype(w.dtype), (evaluate(w.size, sizes),), (1,)), w.zeroed, w.counters)
        for w in kernel.workspaces
    )
    aligned: dict[str, int] = {}
    for requirement in kernel.requires:
        if isinstance(requirement, Aligned):
            aligned[requirement.slot] = max(aligned.get(requirement.slot, 1), requirement.size_bytes)
    return PreparedKernel(form, tuple(steps), workspaces, aligned, device, lent)


class BoundKernel:
    """A kernel ready to be called on tensors in its form's layout; safe to call from several threads.

    Args:
        kernel: Prepared.
        packed: Parameters that are passed in a library's own layout.
    """

    def __init__(self, kernel: PreparedKernel, packed: frozenset[str] = frozenset()) -> None:
        self._size = 0
        form = kernel.form
        self._inputs = len(form.parameters)
        layouts = {p.name: None if p.name in packed else layout_of(p.type) for p in form.parameters}
        slots = [self._new_slot() for _ in layouts]
        self._given = [self._new_slot() for _ in form.results]

        def emit_into(given: Sequence[int | None]) -> tuple[list[PreparedStep], list[int]]:
            inputs = [Operand(layout, slot) for layout, slot in zip(layouts.values(), slots, strict=True)]
            results = [Operand(layout_of(p.type), slot) for p, slot in zip(form.results, given, strict=True)]
            steps = [step.run for step in emit(kernel, inputs, results, self._new_slot)]
            return steps, [operand.slot for operand in results]

        self._steps, self._outputs = emit_into([None] * len(form.results))
        self._steps_given, self._outputs_given = emit_into(self._given)

    def _new_slot(self) -> int:
        self._size += 1
        return self._size - 1

    def __call__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Run the kernel.

        Args:
            inputs: One per parameter, laid out as the form says.
            outputs: Written by launches where given; results that an ATen call makes are new tensors all the same.

        Returns:
            One tensor per result.
        """
        slots: Slots = [None] * self._size
        slots[: self._inputs] = inputs
        steps, made = self._steps, self._outputs
        if outputs is not None:
            for slot, output in zip(self._given, outputs, strict=True):
                slots[slot] = output
            steps, made = self._steps_given, self._outputs_given
        for step in steps:
            step(slots)
        return [slots[slot] for slot in made]


def bind_kernel(
    kernel: Kernel, form: Form, code: Mapping[str, bytes] | CodeLoader, device: torch.device
) -> BoundKernel:
    """Bind a kernel to a concrete form, for calls on tensors of exactly its types.

    Args:
        kernel: Legal for the form.
        form: Concrete.
        code: Machine code by SHA-256, or what loads it.
        device: Where it will run; for CUDA, a device that torch has used.

    Returns:
        A kernel that must outlive the graphs in which it is captured.

    Raises:
        KernelError: A launch fact does not fit the form.
        CodeMissingError: The kernel's code is not there.
        DriverError: A cubin does not load.
        LibraryError: A shared library does not load.
    """
    loader = code if isinstance(code, CodeLoader) else CodeLoader(code)
    packed = frozenset(slot for slot, layout in kernel.layouts if layout != "transposed")
    return BoundKernel(prepare_kernel(kernel, form, loader, device, LentCounters()), packed)
