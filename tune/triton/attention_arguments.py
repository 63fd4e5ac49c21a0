"""What launches of attention kernels have in common: sizes and strides of operands, and the append to a cache."""

from tune_model.runtime.kernel import Requirement, Within
from tune_model.runtime.program import Parameter, Ref
from tune_model.tune.attention import AttentionForm
from tune_model.tune.triton.compile import Options
from tune_model.tune.triton.launch import Argument, Constant, Launch, SizeOf, Slot

__all__ = ["append_launch", "new_tokens", "padded", "size_of", "stride_argument", "stride_of", "within"]


def size_of(parameter: Parameter, axis: int) -> int:
    """Return a size of a concrete form's slot.

    Raises:
        TypeError: The form is not concrete.
    """
    size = parameter.type.shape[axis]
    if not isinstance(size, int):
        raise TypeError(f"a task's form must be concrete; {parameter.name} has size {size!r}")
    return size


def stride_of(parameter: Parameter, axis: int) -> int:
    """Return a stride of a concrete form's slot, in elements.

    Raises:
        TypeError: The form is not concrete.
    """
    if parameter.type.strides is not None:
        stride = parameter.type.strides[axis]
        if not isinstance(stride, int):
            raise TypeError(f"a task's form must be concrete; {parameter.name} has stride {stride!r}")
        return stride
    product = 1
    for later in range(axis + 1, len(parameter.type.shape)):
        product *= size_of(parameter, later)
    return product


def stride_argument(parameter: Parameter, axis: int, *, wide: bool = False, promised: bool = True) -> SizeOf:
    """Return a stride as an argument; `promised` says that it stays divisible by 16 if it is so for the task."""
    divisible = promised and stride_of(parameter, axis) % 16 == 0
    return SizeOf(f"{parameter.name}.stride{axis}", divisible, 64 if wide else 32)


def within(parameter: Parameter, axis: int) -> Requirement:
    """Return that a size stays as it is."""
    return Within(f"{parameter.name}.size{axis}", size_of(parameter, axis), size_of(parameter, axis))


def padded(value: int, least: int = 16) -> int:
    """Return the next power of two."""
    return max(least, 1 << max(0, value - 1).bit_length())


def new_tokens(read: AttentionForm) -> tuple[str, str] | None:
    """Return the slots of the appended keys and values; `None` when the form appends nothing."""
    if read.append is None:
        return None
    names = [a.name if isinstance(a, Ref) else "" for a in read.append.args]
    return names[2], names[3]


def append_launch(read: AttentionForm, slots: dict[str, Parameter], *, pdl: bool) -> Launch | None:
    """Return the launch that writes new keys and values into the cache; `None` where the form has no append."""
    if read.append is None:
        return None
    from tune_model.tune.triton.kernels import append as kernels

    names = [a.name if isinstance(a, Ref) else "" for a in read.append.args]
    k_cache, v_cache, k_new, v_new, positions = (slots[name] for name in names)
    head_dim = size_of(k_new, 3)
    arguments: dict[str, Argument] = {
        "k_new": Slot(k_new.name, k_new.type.dtype),
        "v_new": Slot(v_new.name, v_new.type.dtype),
        "k_cache": Slot(k_cache.name, k_cache.type.dtype),
        "v_cache": Slot(v_cache.name, v_cache.type.dtype),
        "positions": Slot(positions.name, positions.type.dtype, aligned=False),
        "tokens": SizeOf(f"{k_new.name}.size2"),
        "positions_stride_b": SizeOf(f"{positions.name}.stride0"),
        "positions_stride_t": SizeOf(f"{positions.name}.stride1"),
        "HEAD_DIM": Constant(head_dim),
        "BLOCK_T": Constant(16),
        "BLOCK_D": Constant(padded(head_dim)),
        "PDL": Constant(pdl),
    }
    letters = (("kn", k_new, "bht"), ("vn", v_new, "bht"), ("kc", k_cache, "bhn"), ("vc", v_cache, "bhn"))
    for prefix, parameter, axes in letters:
        for axis, letter in enumerate(axes):
            arguments[f"{prefix}_stride_{letter}"] = stride_argument(parameter, axis, wide=axis == 0)
    grid = (f"cdiv({k_new.name}.size2, 16)", f"{k_new.name}.size1", f"{k_new.name}.size0")
    return Launch(kernels.append, arguments, grid, Options(4, 1, programmatic=pdl))
