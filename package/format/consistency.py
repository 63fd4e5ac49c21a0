"""Whether the parts of an artifact fit together: names defined before use, sizes over known symbols, kernels present.

Decoding has shown that every field has its type; this shows that a program can be executed without looking anything up
in vain. Which operators may be called is the runtime's to say (`runtime.operators`), when it binds a program.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Final

import msgspec

from tune_model.package.format.tensors import DTYPES, Listed
from tune_model.package.format.wire import ArtifactError
from tune_model.runtime.expression import Dim, ExpressionError, symbols
from tune_model.runtime.kernel import Aligned, CpuLaunch, CudaLaunch, Integer, Kernel, LibraryMatmul, Pointer
from tune_model.runtime.program import (
    Apply,
    Arg,
    Call,
    Form,
    Items,
    Parameter,
    Program,
    Ref,
    Size,
    TensorType,
    TorchName,
    ValueRange,
    fingerprint,
)
from tune_model.runtime.replay import Replay

__all__ = ["SizeTexts", "check_constants", "check_program", "check_replay"]

NESTING_AT_MOST: Final = 8
SIZE_AT_MOST: Final = 1 << 48
RANK_AT_MOST: Final = 32
PARAMETERS_AT_MOST: Final = 256
TEXT_AT_MOST: Final = 1 << 18
"""Characters of all different size expressions of an artifact or bundle: reading one takes a microsecond."""

_TORCH_NAMES: Final[dict[str, Collection[str]]] = {
    "dtype": DTYPES,
    "layout": {"strided"},
    "memory_format": {"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"},
    "device": {"device"},
}


class SizeTexts:
    """The size expressions read so far of one artifact or bundle: many places share few of them."""

    def __init__(self) -> None:
        self._known: dict[str, frozenset[str]] = {}
        self._characters = 0

    def symbols(self, text: str) -> frozenset[str]:
        """Return the names an expression uses.

        Raises:
            ExpressionError: It is none, or all together are too much to read.
        """
        found = self._known.get(text)
        if found is None:
            self._characters += len(text)
            if self._characters > TEXT_AT_MOST:
                raise ExpressionError(f"one of more than {TEXT_AT_MOST} characters of them in all")
            found = self._known[text] = symbols(text)
        return found


class _Scope:
    """What is defined so far in one body.

    Args:
        file: For error messages.
        names: Symbols that expressions may use.
        texts: Expressions read so far.
    """

    def __init__(self, file: str, names: Iterable[str], texts: SizeTexts) -> None:
        self.file = file
        self.names = frozenset(names)
        self.texts = texts
        self.defined: set[str] = set()

    def inside(self) -> "_Scope":
        """Return a scope of its own that knows what this one knows."""
        scope = _Scope(self.file, (), self.texts)
        scope.names = self.names
        scope.defined = set(self.defined)
        return scope

    def fail(self, field: str, expected: str, found: object) -> ArtifactError:
        return ArtifactError(self.file, field, expected, str(found))

    def define(self, name: str, field: str) -> None:
        if name in self.defined:
            raise self.fail(field, "a name that is new", repr(name))
        self.defined.add(name)

    def use(self, name: str, field: str) -> None:
        if name not in self.defined:
            raise self.fail(field, "a name defined before", repr(name))

    def dim(self, dim: Dim, field: str) -> None:
        """Check a size; expressions are parsed by our own grammar and only ever walked."""
        if isinstance(dim, int):
            if isinstance(dim, bool) or abs(dim) > SIZE_AT_MOST:
                raise self.fail(field, f"a size of at most {SIZE_AT_MOST}", dim)
            return
        try:
            unknown = self.texts.symbols(dim) - self.names
        except ExpressionError as error:
            raise self.fail(field, "a size expression", f"not: {error}") from error
        if unknown:
            raise self.fail(field, f"an expression over {sorted(self.names)[:12]}", dim)

    def type(self, type_: TensorType, field: str) -> None:
        if type_.dtype not in DTYPES:
            raise self.fail(f"{field}.dtype", "a dtype of torch", repr(type_.dtype))
        if len(type_.shape) > RANK_AT_MOST:
            raise self.fail(f"{field}.shape", f"at most {RANK_AT_MOST} dims", len(type_.shape))
        if type_.strides is not None and len(type_.strides) != len(type_.shape):
            raise self.fail(f"{field}.strides", f"{len(type_.shape)} strides", len(type_.strides))
        for dim in (*type_.shape, *(type_.strides or ())):
            self.dim(dim, field)
        negative = [dim for dim in type_.shape if isinstance(dim, int) and dim < 0]
        if negative:
            raise self.fail(f"{field}.shape", "sizes that are not negative", negative[0])

    def known_type(self, type_: TensorType, field: str) -> None:
        """Check the type of a tensor that is stored: its sizes are numbers."""
        self.type(type_, field)
        symbolic = [dim for dim in type_.shape if not isinstance(dim, int)]
        if symbolic:
            raise self.fail(f"{field}.shape", "sizes that are numbers", repr(symbolic[0]))

    def range(self, values: ValueRange | None, field: str) -> None:
        if values is not None:
            self.dim(values.low, f"{field}.low")
            self.dim(values.high, f"{field}.high")

    def arg(self, arg: Arg, field: str, depth: int = NESTING_AT_MOST) -> None:
        match arg:
            case Ref(name):
                self.use(name, field)
            case Size(expression):
                self.dim(expression, field)
            case Items(items):
                if depth == 0:
                    raise self.fail(field, f"a list nested at most {NESTING_AT_MOST} deep", "nested deeper")
                for index, item in enumerate(items):
                    self.arg(item, f"{field}[{index}]", depth - 1)
            case TorchName(kind, name):
                if name not in _TORCH_NAMES[kind]:
                    raise self.fail(field, f"a {kind} of torch", repr(name))

    def call(self, call: Call, field: str) -> None:
        for index, arg in enumerate(call.args):
            self.arg(arg, f"{field}.args[{index}]")
        for name, arg in call.kwargs:
            self.arg(arg, f"{field}.kwargs.{name}")
        for result in call.results:
            if result is not None:
                self.define(result, f"{field}.results")

    def parameters(self, parameters: tuple[Parameter, ...], field: str) -> None:
        if len(parameters) > PARAMETERS_AT_MOST:
            raise self.fail(field, f"at most {PARAMETERS_AT_MOST}", len(parameters))
        for parameter in parameters:
            self.define(parameter.name, field)
            self.type(parameter.type, f"{field}.{parameter.name}")
            self.range(parameter.values, f"{field}.{parameter.name}.values")


def check_program(program: Program, file: str, texts: SizeTexts | None = None) -> None:
    """Check one program.

    Args:
        program: As decoded.
        file: For error messages.
        texts: Size expressions read so far, of everything that is opened together.

    Raises:
        ArtifactError: It refers to something that is not there, or a form is not what its fingerprint says.
    """
    scope = _Scope(file, (symbol.name for symbol in program.symbols), texts or SizeTexts())
    _check_symbols(program, scope)
    for input_ in program.inputs:
        scope.define(input_.name, "$.inputs")
        scope.type(input_.type, f"$.inputs.{input_.name}")
        scope.range(input_.values, f"$.inputs.{input_.name}.values")
    for weight in program.weights:
        scope.define(weight.name, "$.weights")
        scope.known_type(weight.type, f"$.weights.{weight.name}")
    for constant in program.constants:
        scope.define(constant.name, "$.constants")
        scope.known_type(constant.type, f"$.constants.{constant.name}")
    for key, form in program.forms.items():
        _check_form(key, form, scope)
    for name, type_ in program.values.items():
        scope.type(type_, f"$.values.{name}")
    for index, step in enumerate(program.steps):
        if isinstance(step, Apply):
            _check_apply(step, program, scope, f"$.steps[{index}]")
        else:
            scope.call(step, f"$.steps[{index}]")
    for output in program.outputs:
        scope.use(output.value, f"$.outputs.{output.name}")


def _check_symbols(program: Program, scope: _Scope) -> None:
    ranks = {input_.name: len(input_.type.shape) for input_ in program.inputs}
    if len(scope.names) != len(program.symbols):
        raise scope.fail("$.symbols", "names given once", "one given twice")
    for symbol in program.symbols:
        field = f"$.symbols.{symbol.name}"
        if not 0 <= symbol.minimum <= symbol.maximum <= SIZE_AT_MOST:
            raise scope.fail(field, "0 <= minimum <= maximum", f"{symbol.minimum} to {symbol.maximum}")
        if symbol.input is not None and not 0 <= symbol.axis < ranks.get(symbol.input, 0):
            raise scope.fail(field, "bound to a dim of an input", f"dim {symbol.axis} of {symbol.input!r}")


def _check_form(key: str, form: Form, outer: _Scope) -> None:
    field = f"$.forms.{key}"
    if key != fingerprint(form):
        raise outer.fail(field, f"filed under its fingerprint {fingerprint(form)}", repr(key))
    if max(len(form.dims), len(form.results)) > PARAMETERS_AT_MOST:
        seen = f"{len(form.dims)} dims and {len(form.results)} results"
        raise outer.fail(field, f"with at most {PARAMETERS_AT_MOST} of each", seen)
    scope = _Scope(outer.file, form.dims, outer.texts)
    scope.parameters(form.parameters, f"{field}.parameters")
    for index, call in enumerate(form.body):
        scope.call(call, f"{field}.body[{index}]")
    for result in form.results:
        scope.use(result.name, f"{field}.results")
        scope.type(result.type, f"{field}.results.{result.name}")


def _check_apply(step: Apply, program: Program, scope: _Scope, field: str) -> None:
    form = program.forms.get(step.form)
    if form is None:
        raise scope.fail(f"{field}.form", "a form of this program", repr(step.form))
    counts = (len(step.inputs), len(step.outputs), len(step.dims))
    expected = (len(form.parameters), len(form.results), len(form.dims))
    if counts != expected:
        raise scope.fail(field, f"applied to {expected} inputs, outputs and dims", counts)
    for name in step.inputs:
        scope.use(name, f"{field}.inputs")
    for name in step.outputs:
        scope.define(name, f"{field}.outputs")
        if name not in program.values:
            raise scope.fail(f"{field}.outputs", "a value with a type", repr(name))
    for dim in step.dims:
        scope.dim(dim, f"{field}.dims")


def check_replay(
    replay: Replay,
    programs: Mapping[str, Program],
    code: Collection[str],
    file: str,
    texts: SizeTexts | None = None,
) -> None:
    """Check the replay table against the programs and the code that is present.

    Args:
        replay: As decoded.
        programs: Checked, by phase.
        code: Hashes of the machine code at hand.
        file: For error messages.
        texts: Size expressions read so far, of everything that is opened together.

    Raises:
        ArtifactError: An entry is for no form of the programs, or its kernel refers to something that is not there.
    """
    texts = texts or SizeTexts()
    forms = {key: form for program in programs.values() for key, form in program.forms.items()}
    for key, entries in replay.forms.items():
        form = forms.get(key)
        if form is None:
            raise ArtifactError(file, "$.forms", "forms of the programs", repr(key))
        if len({entry.dims for entry in entries}) != len(entries):
            raise ArtifactError(file, f"$.forms.{key}", "one entry per point", "two for one")
        scope = _slots(form, file, f"$.forms.{key}", texts)
        for index, entry in enumerate(entries):
            field = f"$.forms.{key}[{index}]"
            if len(entry.dims) != len(form.dims) or not all(0 <= dim <= SIZE_AT_MOST for dim in entry.dims):
                raise ArtifactError(file, f"{field}.dims", f"{len(form.dims)} sizes", str(entry.dims))
            _check_kernel(entry.kernel, scope.inside(), code, f"{field}.kernel")


def _slots(form: Form, file: str, field: str, texts: SizeTexts) -> _Scope:
    """Return what every kernel of a form may name: its slots, their sizes and strides."""
    taken = {parameter.name for parameter in form.parameters}
    slots = [*form.parameters, *(result for result in form.results if result.name not in taken)]
    names = [
        f"{slot.name}.{what}{axis}"
        for slot in slots
        for axis in range(len(slot.type.shape))
        for what in ("size", "stride")
    ]
    scope = _Scope(file, names, texts)
    for slot in slots:
        scope.define(slot.name, field)
    return scope


def _check_kernel(kernel: Kernel, scope: _Scope, code: Collection[str], field: str) -> None:
    for workspace in kernel.workspaces:
        scope.define(workspace.name, f"{field}.workspaces")
        scope.type(TensorType(workspace.dtype, (workspace.size,)), f"{field}.workspaces.{workspace.name}")
    for slot, _ in kernel.layouts:
        scope.use(slot, f"{field}.layouts")
    for requirement in kernel.requires:
        if isinstance(requirement, Aligned):
            scope.use(requirement.slot, f"{field}.requires")
            positive = requirement.size_bytes
        else:
            scope.dim(requirement.expression, f"{field}.requires")
            positive = getattr(requirement, "of", 1)
        if positive < 1:
            raise scope.fail(f"{field}.requires", "a positive divisor", positive)
    results: set[str] = set()
    for index, step in enumerate(kernel.steps):
        at = f"{field}.steps[{index}]"
        if isinstance(step, Call):
            # A call may give a slot of the form's results its value, so results need not be new.
            results.update(name for name in step.results if name is not None)
            scope.call(Call(step.op, step.args, step.kwargs), at)
            scope.defined |= results
        elif isinstance(step, LibraryMatmul):
            _check_product(step, scope, at)
        else:
            _check_launch(step, scope, code, at)


def _check_product(step: LibraryMatmul, scope: _Scope, field: str) -> None:
    for slot in (step.a, step.b, step.result, step.bias, step.workspace):
        if slot is not None:
            scope.use(slot, field)
    for dim in (step.m, step.n, step.k, step.a_stride, step.b_stride):
        scope.dim(dim, field)
    numbers = msgspec.structs.astuple(step.algorithm)
    if not all(0 <= number < 1 << 31 for number in numbers) or not 0 <= step.workspace_bytes <= 1 << 30:
        raise scope.fail(field, "an algorithm of small numbers and a workspace of at most 1 GiB", repr(step))


def _check_launch(launch: CudaLaunch | CpuLaunch, scope: _Scope, code: Collection[str], field: str) -> None:
    if launch.code not in code:
        raise scope.fail(f"{field}.code", "a kernel of this artifact", repr(launch.code))
    if isinstance(launch, CpuLaunch):
        for slot in launch.pointers:
            scope.use(slot, f"{field}.pointers")
        for dim in launch.sizes:
            scope.dim(dim, f"{field}.sizes")
        return
    for dim in launch.grid:
        scope.dim(dim, f"{field}.grid")
    if not (1 <= launch.num_warps <= 32 and 0 <= launch.shared_bytes <= 1 << 20 and all(c > 0 for c in launch.cluster)):
        facts = f"{launch.num_warps} warps, {launch.shared_bytes} bytes, cluster {launch.cluster}"
        raise scope.fail(field, "1 to 32 warps, at most 1 MiB of shared memory, a positive cluster", facts)
    for argument in launch.arguments:
        if isinstance(argument, Pointer):
            scope.use(argument.slot, f"{field}.arguments")
        elif isinstance(argument, Integer):
            scope.dim(argument.expression, f"{field}.arguments")


def check_constants(programs: Mapping[str, Program], stored: Mapping[str, Listed], file: str) -> None:
    """Check that the constants are those the programs read, with the types they are declared with.

    Raises:
        ArtifactError: One is missing, has another type, or is read by no program.
    """
    read: set[str] = set()
    for program in programs.values():
        for constant in program.constants:
            read.add(constant.key)
            tensor = stored.get(constant.key)
            if tensor is None:
                raise ArtifactError(file, f"constant {constant.key!r}", f"present (program {program.name})", "missing")
            declared, actual = (constant.type.dtype, constant.type.shape), (tensor.dtype, tensor.shape)
            if declared != actual:
                raise ArtifactError(file, f"constant {constant.key!r}", str(declared), str(actual))
    if unread := sorted(stored.keys() - read):
        raise ArtifactError(file, f"constant {unread[0]!r}", "read by a program", "read by none")
