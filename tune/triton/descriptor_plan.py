"""Kernel plans of matmul forms whose tiles are fetched through tensor descriptors, and which forms allow that."""

from tune_model.runtime.expression import Dim, evaluate
from tune_model.runtime.kernel import Multiple, Requirement, Workspace
from tune_model.runtime.replay import slot_sizes
from tune_model.tune.candidate import Config, Rejected
from tune_model.tune.loops.ir import Store
from tune_model.tune.target import CudaTarget
from tune_model.tune.triton.compile import Options
from tune_model.tune.triton.launch import Argument, Constant, KernelPlan, Launch, SizeOf, Slot
from tune_model.tune.triton.matmul_plan import (
    ELEMENT_BYTES,
    Product,
    asked_ahead,
    epilogue_function,
    partial_function,
    sum_launch,
)

__all__ = ["FIRST_ARCH", "descriptor_plan", "is_described", "refusal", "stores_through_descriptor"]

FIRST_ARCH = 90
"""Of NVIDIA's, with a copy engine for tensor descriptors."""

_ALIGNMENT = 16
"""Bytes, of addresses and of the distance between rows (CUDA driver API, cuTensorMapEncodeTiled)."""


def refusal(product: Product) -> Rejected | None:
    """Say why the operands cannot be described: contiguous along one axis, rows a multiple of 16 bytes apart."""
    if product.batch is not None:
        return Rejected("unsupported", "a batched matmul")
    if product.precision == "ieee":
        return Rejected("unsupported", "float32 without tf32 does not run on tensor cores")
    _, x_row, x_step = product.x_strides
    _, *w_strides = product.w_strides
    if x_step != 1:
        return Rejected("unsupported", f"a left operand with stride {x_step} along k")
    if 1 not in w_strides or not all(isinstance(s, int) for s in w_strides):
        return Rejected("unsupported", f"a right operand with strides {tuple(w_strides)}")
    sizes = slot_sizes(product.form)
    element = ELEMENT_BYTES[product.epilogue.dtype]
    for name, stride in (("left", x_row), ("right", _leading(product))):
        size = evaluate(stride, sizes) * element
        if size % _ALIGNMENT:
            return Rejected("unsupported", f"rows of the {name} operand are {size} bytes apart; multiples of 16 only")
    if product.halves == 2 and product.w_strides[2] != 1 and product.n * element % _ALIGNMENT:
        return Rejected("unsupported", f"a second half that begins {product.n * element} bytes into a row")
    if product.precision == "tf32" and element == 4 and product.w_strides[2] != 1:
        return Rejected("unsupported", "a tf32 operand that is not contiguous along k")
    return None


def is_described(product: Product, target: CudaTarget) -> bool:
    """Say whether tiles of this product may be fetched through descriptors."""
    return target.arch >= FIRST_ARCH and refusal(product) is None


def stores_through_descriptor(product: Product) -> bool:
    """Say whether the only result is a plain matrix whose rows are a multiple of 16 bytes apart."""
    if len(product.form.results) != 1 or len(product.epilogue.nest.stores) != 1:
        return False
    (store,) = product.epilogue.nest.stores
    (result,) = product.form.results
    element = ELEMENT_BYTES.get(result.type.dtype)
    row = _result_row(store)
    return element is not None and row is not None and row * element % _ALIGNMENT == 0


def descriptor_plan(product: Product, config: Config) -> KernelPlan:
    """Plan one launch, or with split-K two; serves any number of rows.

    Args:
        product: Without a `refusal`.
        config: From `descriptor_space`.
    """
    values = dict(config)
    splits, pdl = int(values["split_k"]), bool(values["pdl"])
    rows = product.epilogue.m.extent
    demands = (*product.epilogue.nest.requires, *_strides(product))
    partials = Workspace("ws0", "float32", f"({rows})*{splits * product.n * product.halves}")
    if values["last_adds"]:
        operands, epilogue = epilogue_function(product)
        launch = _launch(product, config, operands, epilogue)
        counters = Workspace(
            "ws1", "int32", _tiles(product, int(values["block_m"]), int(values["block_n"])), counters=True
        )
        return KernelPlan((launch,), (partials, counters), product.layouts, demands)
    if splits == 1:
        operands, epilogue = epilogue_function(product, returns=bool(values["store"]))
        launch = _launch(product, config, operands, epilogue)
        return KernelPlan((launch,), (), product.layouts, demands)
    first = _launch(product, config, (Slot("ws0", "float32"),), partial_function(product))
    return KernelPlan((first, sum_launch(product, splits, pdl=pdl)), (partials,), product.layouts, demands)


def _launch(product: Product, config: Config, operands: Argument, epilogue: Argument) -> Launch:
    from tune_model.tune.triton.kernels import descriptor_matmul

    values = dict(config)
    dtype = product.epilogue.dtype
    block_m, block_n = int(values["block_m"]), int(values["block_n"])
    splits, programs, store = int(values["split_k"]), int(values["programs"]), bool(values["store"])
    rows = product.epilogue.m.extent
    (result, *_), (stored, *_) = product.form.results, product.epilogue.nest.stores
    last_adds = bool(values["last_adds"])
    arguments: dict[str, Argument] = {
        "x": Slot(product.epilogue.a.slot, dtype),
        "w": Slot(product.epilogue.b.slot, dtype),
        "result": Slot(result.name, result.type.dtype, aligned=store),
        "operands": operands,
        "partials": Slot("ws0", "float32") if last_adds else Constant(None),
        "counters": Slot("ws1", "int32") if last_adds else Constant(None),
        "m_size": SizeOf(rows),
        "x_stride": _x_stride(product),
        "w_stride": Constant(_leading(product)),
        "result_stride": Constant(_result_row(stored) if store else 0),
        "N": Constant(product.n),
        "K": Constant(product.k),
        "HALVES": Constant(product.halves),
        "JOINED": Constant(bool(values.get("joined", False))),
        "TRANSPOSED": Constant(product.w_strides[2] != 1),
        "BLOCK_M": Constant(block_m),
        "BLOCK_N": Constant(block_n),
        "BLOCK_K": Constant(int(values["block_k"])),
        "GROUP_M": Constant(int(values["group_m"])),
        "SPLIT_K": Constant(splits),
        "LAST_ADDS": Constant(last_adds),
        "PROGRAMS": Constant(programs),
        "SWAP": Constant(bool(values["swap"])),
        "SUBTILES": Constant(int(values["subtiles"])),
        "STORE": Constant(store),
        "PRECISION": Constant(product.precision),
        "PDL": Constant(bool(values["pdl"])),
        "AHEAD": Constant(asked_ahead(product, config)),
        "EPILOGUE": epilogue,
    }
    options = Options(int(values["num_warps"]), int(values["num_stages"]), programmatic=bool(values["pdl"]))
    tiles = _tiles(product, block_m, block_n, splits)
    grid: Dim = f"min({programs}, {tiles})" if programs else tiles
    return Launch(descriptor_matmul.descriptor_matmul, arguments, (grid, 1, 1), options)


def _tiles(product: Product, block_m: int, block_n: int, splits: int = 1) -> str:
    return f"cdiv({product.epilogue.m.extent}, {block_m})*{-(-product.n // block_n) * splits}"


def _leading(product: Product) -> int:
    """Return the distance of the right operand's rows as they are stored."""
    _, column, step = product.w_strides
    stride = column if step == 1 else step
    if not isinstance(stride, int):
        raise TypeError(f"a right operand with stride {stride!r} has no description")
    return stride


def _x_stride(product: Product) -> Argument:
    stride = product.x_strides[1]
    if isinstance(stride, int):
        return Constant(stride)
    return SizeOf(stride, divisible=evaluate(stride, slot_sizes(product.form)) % 16 == 0)


def _strides(product: Product) -> tuple[Requirement, ...]:
    stride = product.x_strides[1]
    if isinstance(stride, int):
        return ()
    return (Multiple(stride, _ALIGNMENT // ELEMENT_BYTES[product.epilogue.dtype]),)


def _result_row(store: Store) -> int | None:
    """Return the distance of a result's rows, if its columns are contiguous and both are known."""
    row, column = store.access.strides[-2:]
    plain = isinstance(row, int) and column == 1 and store.access.offset == 0 and len(store.access.strides) == 2
    return row if plain and isinstance(row, int) else None
