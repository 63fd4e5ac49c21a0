"""Bind a kernel to a concrete form: sizes, grids and code are settled, only memory is left for the call.

A prepared kernel *emits* its steps over somebody's slot list: a program's plan emits every kernel over its own values;
`bind_kernel` emits one over a list of its own and is what the tuner times.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tune_model.runtime.cpu_library import prepare_cpu_call
from tune_model.runtime.cuda_driver import Geometry, open_driver, prepare_launch
from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.expression import evaluate
from tune_model.runtime.invoke import PreparedStep, ProgramError, Slots, prepare_call, torch_dtype
from tune_model.runtime.kernel import (
    Aligned,
    CpuLaunch,
    CudaLaunch,
    Integer,
    Kernel,
    KernelArgument,
    Null,
    Pointer,
    Scalar,
)
from tune_model.runtime.layout import (
    Layout,
    layout_of,
    prepare_alignment,
    prepare_allocation,
    prepare_conform,
    prepare_reinterpret,
    same,
)
from tune_model.runtime.machine_code import CodeLoader
from tune_model.runtime.program import Arg, Call, Form, Items, Parameter, Ref, bind_call
from tune_model.runtime.replay import slot_sizes

__all__ = ["BoundKernel", "KernelError", "Operand", "PreparedKernel", "bind_kernel", "body_kernel", "prepare_kernel"]


class KernelError(TuneModelError):
    """A kernel's launch facts do not fit its form, or a call does not fit the kernel."""


class Operand(NamedTuple):
    """Where a form's parameter or result lies in a slot list.

    Attributes:
        slot: Index of it.
        layout: Of the tensor there; `None` for a packed weight, which is passed on untouched.
    """

    slot: int
    layout: Layout | None


Emit = Callable[[Callable[[str], int]], PreparedStep]
"""Makes a launch step, given the slot index of each name."""


class PreparedKernel(NamedTuple):
    """A kernel whose sizes are integers and whose code is loaded.

    Attributes:
        form: Concrete.
        steps: An operator call, or what makes a launch step with the names of the slots it touches.
        workspaces: Name, layout and whether to zero.
        aligned: Strictest alignment asked of each slot, in bytes.
        device: Where it runs.
    """

    form: Form
    steps: tuple[Call | tuple[Emit, tuple[str, ...]], ...]
    workspaces: tuple[tuple[str, Layout, bool], ...]
    aligned: Mapping[str, int]
    device: torch.device


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
) -> tuple[Emit, tuple[str, ...]]:
    grid = (evaluate(launch.grid[0], sizes), evaluate(launch.grid[1], sizes), evaluate(launch.grid[2], sizes))
    if min(grid) < 0:
        raise KernelError(f"kernel {launch.entry!r} has grid {grid}")
    geometry = Geometry(grid, launch.num_warps, launch.shared_bytes, launch.cluster, launch.programmatic)
    function = loader.cuda(launch, device)
    names = tuple(dict.fromkeys(a.slot for a in launch.arguments if isinstance(a, Pointer)))
    arguments = tuple(names.index(a.slot) if isinstance(a, Pointer) else _constant(a, sizes) for a in launch.arguments)

    def emit(index: Callable[[str], int]) -> PreparedStep:
        return prepare_launch(open_driver(), function, geometry, tuple(index(n) for n in names), arguments)

    return emit, names


def _prepare_cpu(launch: CpuLaunch, sizes: Mapping[str, int], loader: CodeLoader) -> tuple[Emit, tuple[str, ...]]:
    function = loader.cpu(launch)
    values = tuple(evaluate(s, sizes) for s in launch.sizes)

    def emit(index: Callable[[str], int]) -> PreparedStep:
        return prepare_cpu_call(function, values, tuple(index(n) for n in launch.pointers))

    return emit, launch.pointers


def prepare_kernel(kernel: Kernel, form: Form, loader: CodeLoader, device: torch.device) -> PreparedKernel:
    """Settle everything about a kernel but memory.

    Args:
        kernel: Legal for the form; `requires` are not checked here.
        form: Concrete.
        loader: Has the kernel's code.
        device: Where it will run.

    Raises:
        KernelError: A launch fact does not fit.
        CodeMissingError: The loader lacks its code.
        DriverError: A cubin does not load.
        LibraryError: A shared library does not load.
    """
    sizes = slot_sizes(form)
    steps: list[Call | tuple[Emit, tuple[str, ...]]] = []
    for step in kernel.steps:
        if isinstance(step, CudaLaunch):
            steps.append(_prepare_cuda(step, sizes, loader, device))
        elif isinstance(step, CpuLaunch):
            steps.append(_prepare_cpu(step, sizes, loader))
        else:
            steps.append(bind_call(step, sizes))
    workspaces = tuple(
        (w.name, Layout(torch_dtype(w.dtype), (evaluate(w.size, sizes),), (1,)), w.zeroed) for w in kernel.workspaces
    )
    aligned: dict[str, int] = {}
    for requirement in kernel.requires:
        if isinstance(requirement, Aligned):
            aligned[requirement.slot] = max(aligned.get(requirement.slot, 1), requirement.size_bytes)
    return PreparedKernel(form, tuple(steps), workspaces, aligned, device)


def _references(args: Sequence[Arg]) -> set[str]:
    names: set[str] = set()
    for arg in args:
        if isinstance(arg, Ref):
            names.add(arg.name)
        elif isinstance(arg, Items):
            names |= _references(arg.items)
    return names


class _Emission:
    """One emission of a kernel: which slot holds each name, as memory and as a tensor of the form's layout."""

    def __init__(
        self, kernel: PreparedKernel, inputs: Sequence[Operand], results: Sequence[Operand], new_slot: Callable[[], int]
    ) -> None:
        form = kernel.form
        self.kernel = kernel
        self.new_slot = new_slot
        self.steps: list[PreparedStep] = []
        self.temporaries: list[int] = []
        self.layouts: dict[str, Layout] = {p.name: layout_of(p.type) for p in (*form.parameters, *form.results)}
        self.operands = dict(zip((p.name for p in form.parameters), inputs, strict=True))
        self.results = dict(zip((p.name for p in form.results), results, strict=True))
        self.memory = {name: operand.slot for name, operand in self.operands.items()}
        self.tensors: dict[str, int] = {}

    def temporary(self) -> int:
        index = self.new_slot()
        self.temporaries.append(index)
        return index

    def align(self, parameters: Sequence[Parameter]) -> None:
        """Copy activations that start at the wrong address; a cache is written in place, so it cannot be."""
        for parameter in parameters:
            size_bytes = self.kernel.aligned.get(parameter.name, 1)
            if size_bytes > 1 and parameter.role == "activation":
                source = self.memory[parameter.name]
                target = self.memory[parameter.name] = self.temporary()
                self.steps.append(prepare_alignment(source, target, size_bytes))

    def address(self, name: str) -> int:
        """Return the slot whose tensor starts at a name's memory, allocating a result on first use."""
        if name not in self.memory:
            operand = self.results.get(name)
            if operand is None or operand.layout is None:
                raise KernelError(f"a kernel launches on {name!r}, which is no slot of its form")
            self.steps.append(prepare_allocation(operand.slot, operand.layout, self.kernel.device))
            self.memory[name] = operand.slot
        return self.memory[name]

    def tensor(self, name: str) -> int:
        """Return the slot that holds a name in the form's layout."""
        if name not in self.tensors:
            if name not in self.memory:
                raise ProgramError(f"value {name!r} is used before it is made")
            operand = self.operands.get(name) or self.results.get(name)
            layout = self.layouts.get(name)
            if operand is None or operand.layout is None or layout is None or _equal(operand.layout, layout):
                self.tensors[name] = self.memory[name]
            else:
                self.tensors[name] = self.temporary()
                self.steps.append(prepare_reinterpret(self.memory[name], self.tensors[name], layout))
        return self.tensors[name]

    def call(self, call: Call) -> None:
        names = _references([*call.args, *(a for _, a in call.kwargs)])
        slots = {name: self.tensor(name) for name in names}
        made = [name for name in call.results if name is not None]
        for name in made:
            operand = self.results.get(name)
            direct = operand is not None and operand.layout is not None and _equal(operand.layout, self.layouts[name])
            slots[name] = operand.slot if operand is not None and direct else self.temporary()
        self.steps.append(prepare_call(call, slots, self.kernel.device))
        for name in made:
            self.tensors[name] = self.memory[name] = slots[name]
            if name in self.results:
                self.steps.append(prepare_conform(slots[name], self.layouts[name]))

    def finish(self) -> None:
        """Bring results that an operator made into their own slots and layouts."""
        for name, operand in self.results.items():
            made = self.memory.get(name)
            if made is None:
                raise KernelError(f"a kernel leaves its form's result {name!r} unmade")
            if made != operand.slot and operand.layout is not None:
                self.steps.append(prepare_reinterpret(made, operand.slot, operand.layout))


def _equal(a: Layout, b: Layout) -> bool:
    return a.shape == b.shape and same(a.shape, a.strides, b.strides)


def emit(
    kernel: PreparedKernel,
    inputs: Sequence[Operand],
    results: Sequence[Operand],
    new_slot: Callable[[], int],
    *,
    allocated: bool = False,
) -> tuple[list[PreparedStep], list[int]]:
    """Make the steps that run a kernel over a slot list.

    Args:
        kernel: What to run.
        inputs: One per parameter of its form.
        results: One per result.
        new_slot: Extends the slot list by one.
        allocated: The results' slots hold memory for launches to write to.

    Returns:
        The steps in order, and the slots that hold nothing of use after the last one.
    """
    emission = _Emission(kernel, inputs, results, new_slot)
    if allocated:
        emission.memory.update((name, operand.slot) for name, operand in emission.results.items())
    emission.align(kernel.form.parameters)
    for name, layout, zeroed in kernel.workspaces:
        index = emission.memory[name] = emission.temporary()
        emission.steps.append(prepare_allocation(index, layout, kernel.device, zeroed=zeroed))
    for step in kernel.steps:
        if isinstance(step, Call):
            emission.call(step)
        else:
            make, names = step
            for name in names:
                emission.address(name)
            emission.steps.append(make(emission.address))
    emission.finish()
    return emission.steps, emission.temporaries


class BoundKernel:
    """A kernel ready to be called on tensors in its form's layout; safe to call from several threads.

    Args:
        kernel: Prepared.
        packed: Parameters that are passed in a library's own layout.
    """

    def __init__(self, kernel: PreparedKernel, packed: frozenset[str] = frozenset()) -> None:
        form = kernel.form
        self._inputs = len(form.parameters)
        self._results = len(form.results)
        self._size = self._inputs + self._results
        operands = [
            Operand(i, None if p.name in packed else layout_of(p.type))
            for i, p in enumerate((*form.parameters, *form.results))
        ]
        inputs, results = operands[: self._inputs], operands[self._inputs :]
        self._steps, _ = emit(kernel, inputs, results, self._new_slot)
        self._steps_allocated, _ = emit(kernel, inputs, results, self._new_slot, allocated=True)

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
        steps = self._steps
        if outputs is not None:
            slots[self._inputs : self._inputs + self._results] = outputs
            steps = self._steps_allocated
        for step in steps:
            step(slots)
        return slots[self._inputs : self._inputs + self._results]


def bind_kernel(
    kernel: Kernel, form: Form, code: Mapping[str, bytes] | CodeLoader, device: torch.device
) -> BoundKernel:
    """Bind a kernel to a concrete form, for calls on tensors of exactly its types.

    Args:
        kernel: Legal for the form.
        form: Concrete.
        code: Machine code by SHA-256, or what loads it.
        device: Where it will run; for CUDA, a device that torch has used.

    Raises:
        KernelError: A launch fact does not fit the form.
        CodeMissingError: The kernel's code is not there.
        DriverError: A cubin does not load.
        LibraryError: A shared library does not load.
    """
    loader = code if isinstance(code, CodeLoader) else CodeLoader(code)
    packed = frozenset(slot for slot, layout in kernel.layouts if layout != "transposed")
    return BoundKernel(prepare_kernel(kernel, form, loader, device), packed)
