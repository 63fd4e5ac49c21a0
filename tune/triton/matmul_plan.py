"""Kernel plans of matmul forms: what the three families share.

The epilogue is printed from the form's loop nest over the output tile and handed to the kernel as a constexpr function.
"""

from functools import lru_cache
from typing import Final, NamedTuple

from tune_model.extract.task import Task
from tune_model.runtime.expression import Dim, evaluate
from tune_model.runtime.expression import product as times
from tune_model.runtime.kernel import Requirement, Within, Workspace
from tune_model.runtime.program import Form
from tune_model.runtime.replay import slot_sizes
from tune_model.tune.candidate import Config, Rejected
from tune_model.tune.loops.epilogue import Epilogue, lower_epilogue
from tune_model.tune.loops.ir import Axis
from tune_model.tune.loops.rounding import elide_rounding
from tune_model.tune.relayout import TRANSPOSED, Layouts, relaid_form
from tune_model.tune.triton.compile import Options
from tune_model.tune.triton.emit import DTYPES, Operands, Printer, Space
from tune_model.tune.triton.launch import Argument, Constant, KernelPlan, Launch, SizeOf, Slot
from tune_model.tune.triton.module import load_function

__all__ = [
    "ELEMENT_BYTES",
    "Product",
    "asked_ahead",
    "epilogue_function",
    "gemv_plan",
    "matmul_plan",
    "partial_function",
    "read_product",
    "split_k_plan",
    "sum_launch",
    "transposed_weight",
]

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

_PREFETCHED_BYTES: Final = 32768
"""Per program."""

_PREFETCHED_PER_WARP: Final = 2048
"""Where programs need no shared memory, so that a multiprocessor holds as many of them as it has threads for."""

_LONGEST_GRID: Final = 65535
"""Blocks in y and z."""


class Product(NamedTuple):
    """A matmul task in the kernels' terms.

    Attributes:
        form: The task's form, its weight laid out as `layouts` says.
        epilogue: It taken apart.
        layouts: What the kernel demands of the weight.
        m: Rows at the task's own size.
        n: Columns of the result; with two halves the product has twice as many.
        k: Length of the dot products.
        halves: Accumulators: 2 when both halves of the columns meet in one result.
        x_strides: Of the left operand: batch (0 without one), row, k.
        w_strides: Of the right operand: batch (0 without one), column, k.
        precision: Of `tl.dot`: `ieee` or `tf32`; halves do not care.
        invariant: A row's result must not depend on the number of rows, so neither may the kernel.
    """

    form: Form
    epilogue: Epilogue
    layouts: Layouts
    m: int
    n: int
    k: int
    halves: int
    x_strides: tuple[Dim, Dim, Dim]
    w_strides: tuple[Dim, Dim, Dim]
    precision: str
    invariant: bool = False

    @property
    def weight_bytes(self) -> int:
        """Size of the right operand, all batches of it."""
        return self.n * self.halves * self.k * self.batches * ELEMENT_BYTES[self.epilogue.dtype]

    @property
    def batch(self) -> Axis | None:
        """The batch axis."""
        return self.epilogue.batch

    @property
    def batches(self) -> int:
        """Products in one call, at the task's own size."""
        return 1 if self.epilogue.batch is None else self.epilogue.batch.size


@lru_cache(maxsize=64)  # a family that accepts a task is asked for its configurations next, and so is its sibling
def read_product(task: Task, layout: str = "plain") -> Product | Rejected:
    """Read a matmul task, or say why the kernels cannot run it.

    Args:
        task: What to run.
        layout: `transposed` for the task with its weight stored as the transpose.
    """
    if task.form.kind != "matmul":
        return Rejected("unsupported", f"a {task.form.kind}, not a matmul")
    form = task.form
    layouts: Layouts = ()
    if layout == TRANSPOSED:
        weight = transposed_weight(task)
        if isinstance(weight, Rejected):
            return weight
        layouts = ((weight, TRANSPOSED),)
        form = relaid_form(form, layouts)
    epilogue = lower_epilogue(form)
    if isinstance(epilogue, Rejected):
        return epilogue
    if epilogue.dtype not in ELEMENT_BYTES:
        return Rejected("unsupported", f"dtype {epilogue.dtype}; expected one of {sorted(ELEMENT_BYTES)}")
    if epilogue.a.offset != 0 or epilogue.b.offset != 0:
        return Rejected("unsupported", f"operands that start at {epilogue.a.offset} and {epilogue.b.offset}")
    m, n = epilogue.m.size, epilogue.n
    if min(m, n, epilogue.k) < 1:
        return Rejected("unsupported", f"an empty product {m} x {n} x {epilogue.k}")
    *x_batch, x_row, x_step = epilogue.a.strides
    *w_batch, w_step, w_column = epilogue.b.strides
    precision = "tf32" if epilogue.dtype != "float32" or task.rules.allow_tf32 else "ieee"
    return Product(
        form=form,
        epilogue=epilogue,
        layouts=layouts,
        m=m,
        n=n,
        k=epilogue.k,
        halves=len(epilogue.accumulators),
        x_strides=(x_batch[0] if x_batch else 0, x_row, x_step),
        w_strides=(w_batch[0] if w_batch else 0, w_column, w_step),
        precision=precision,
        invariant=task.rules.batch_invariant,
    )


@lru_cache(maxsize=64)
def transposed_weight(task: Task) -> str | Rejected:
    """Return the slot of the weight that could be stored as its transpose, or why none could."""
    product = read_product(task)
    if isinstance(product, Rejected):
        return product
    slot = product.epilogue.b.slot
    parameter = next((p for p in task.form.parameters if p.name == slot), None)
    if parameter is None or parameter.role != "weight":
        return Rejected("unsupported", "a right operand that is no weight")
    if len(parameter.type.shape) != 2 or parameter.type.strides is not None:
        return Rejected("unsupported", "a weight that is no plain matrix")
    return slot


def epilogue_function(product: Product, *, returns: bool = False) -> tuple[Argument, Argument]:
    """Print the pointwise rest over a tile; returns the operands' tuple and the function.

    Args:
        product: Whose rest.
        returns: The function returns the only result's tile instead of storing it.
    """
    operands = Operands(product.form)
    nest = elide_rounding(product.epilogue.nest)
    inside = ("rows < m_size", f"columns < {product.n}")
    if product.batch is None:
        space = Space(("rows", "columns"), (0, 1), inside)
    else:
        space = Space(("batch", "rows", "columns"), (0, 1, 2), (None, *inside))
    names = {a.slot: f"acc{place}" for place, a in enumerate(product.epilogue.accumulators)}
    printer = Printer(nest, space, operands, names)
    lines = [printer.statement(n) for n in range(len(nest.nodes))]
    if returns:
        (store,) = nest.stores
        lines.append(f"return {printer.names[store.value]}.to({DTYPES[operands.dtype(store.access.slot)]})")
    else:
        lines += [printer.store(s) for s in nest.stores]
    text = "@triton.jit\ndef epilogue(acc0, acc1, batch, rows, columns, m_size, operands):\n"
    function = load_function(text + "".join(f"    {line}\n" for line in lines), "epilogue")
    return operands.arguments(), Constant(function)


def partial_function(product: Product) -> Argument:
    """Print the function that stores a part of the product for the second pass: of a batch and a range of K."""
    total = product.n * product.halves
    lines = [
        "@triton.jit",
        "def partial(acc0, acc1, part, rows, columns, m_size, operands):",
        f"    inside = (rows < m_size) & (columns < {product.n})",
        "    row = tl.cast(part, tl.int64) * m_size + rows",
        f"    pointers = operands[0] + row * {total} + columns",
        "    tl.store(pointers, acc0, mask=inside)",
    ]
    if product.halves == 2:
        lines.append(f"    tl.store(pointers + {product.n}, acc1, mask=inside)")
    return Constant(load_function("\n".join(lines) + "\n", "partial"))


def _stride(product: Product, stride: Dim) -> Argument:
    """Compile a known stride in; one that calls may change stays an argument."""
    if isinstance(stride, int):
        return Constant(stride)
    return SizeOf(stride, divisible=evaluate(stride, slot_sizes(product.form)) % 16 == 0)


def _is_wide(product: Product) -> bool:
    """Say whether offsets along k or the columns may exceed 32 bits; rows always have 64."""
    x_step, (_, *w_strides) = product.x_strides[2], product.w_strides
    if not all(isinstance(s, int) for s in (x_step, *w_strides)):
        return True
    sizes = (product.n * product.halves, product.k)
    spans = (evaluate(x_step, {}) * product.k, sum(n * evaluate(s, {}) for n, s in zip(sizes, w_strides, strict=True)))
    return max(spans) >= 1 << 31


def _shared(product: Product) -> dict[str, Argument]:
    """Return the arguments that gemv and matmul both take."""
    dtype = product.epilogue.dtype
    names = ("x_stride_b", "x_stride_m", "x_stride_k", "w_stride_b", "w_stride_n", "w_stride_k")
    strides = (*product.x_strides, *product.w_strides)
    return {
        "x": Slot(product.epilogue.a.slot, dtype),
        "w": Slot(product.epilogue.b.slot, dtype),
        "m_size": SizeOf(product.epilogue.m.extent),
        **{name: _stride(product, stride) for name, stride in zip(names, strides, strict=True)},
        "N": Constant(product.n),
        "K": Constant(product.k),
        "HALVES": Constant(product.halves),
        "WIDE": Constant(_is_wide(product)),
    }


def asked_ahead(product: Product, config: Config, most_bytes: int = _PREFETCHED_BYTES) -> int:
    """Return how many elements of k of its weights a program asks for before it waits for its predecessor.

    All programs together ask for a few megabytes: what memory delivers while one kernel ends and the next begins.
    Pieces must begin and end at multiples of 16 bytes and lie inside the weight; where they cannot, none is asked for.

    Args:
        product: Whose weights.
        config: Of the kernel.
        most_bytes: For one program, where that is less than for any.
    """
    values = dict(config)
    element = ELEMENT_BYTES[product.epilogue.dtype]
    batch, column, step = product.w_strides
    if not values["prefetch"] or not isinstance(column, int) or not isinstance(step, int) or 1 not in {column, step}:
        return 0
    if not isinstance(batch, int) or batch * element % 16:
        return 0
    block_n, block_k, splits = int(values["block_n"]), int(values["block_k"]), int(values.get("split_k", 1))
    steps = -(-product.k // block_k)
    span = -(-steps // splits) * block_k
    shortest = product.k - (splits - 1) * span
    most = min(shortest, min(most_bytes, _PREFETCHED_BYTES) // (block_n * product.halves * element))
    if step == 1:
        whole = most * element // 16 * 16 // element
        return max(0, whole) if column * element % 16 == 0 else 0
    pieces = (block_n * element, step * element, product.n * element if product.halves == 2 else 0)
    if any(size % 16 for size in pieces):
        return 0
    # The last tile's pieces may end in the next row, so the last row is not asked for.
    most = most if product.n % block_n == 0 else min(most, shortest - 1)
    return 1 << (most.bit_length() - 1) if most > 0 else 0


def _demands(product: Product, *limits: Requirement) -> tuple[Requirement, ...]:
    batch: tuple[Requirement, ...] = ()
    if product.batch is not None:
        batch = (Within(product.batch.extent, 0, _LONGEST_GRID),)
    return (*product.epilogue.nest.requires, *batch, *limits)


def _batches(product: Product) -> Dim:
    return 1 if product.batch is None else product.batch.extent


def gemv_plan(product: Product, config: Config) -> KernelPlan:
    """Plan one launch of `gemv`, for at most as many rows as the task's own count rounded up to a power of two."""
    from tune_model.tune.triton.kernels import gemv

    values = dict(config)
    operands, epilogue = epilogue_function(product)
    block_m, block_n = 1 << (product.m - 1).bit_length(), int(values["block_n"])
    arguments = _shared(product) | {
        "operands": operands,
        "BLOCK_M": Constant(block_m),
        "BLOCK_N": Constant(block_n),
        "BLOCK_K": Constant(int(values["block_k"])),
        "STAGES": Constant(int(values["stages"])),
        "UNROLL": Constant(int(values["unroll"])),
        "EVICTION": Constant("evict_first"),
        "PDL": Constant(bool(values["pdl"])),
        "AHEAD": Constant(asked_ahead(product, config, _PREFETCHED_PER_WARP * int(values["num_warps"]))),
        "EPILOGUE": epilogue,
    }
    rows = product.epilogue.m.extent
    grid: Dim = f"min({rows}, 1)*{-(-product.n // block_n)}"
    options = Options(int(values["num_warps"]), 1, programmatic=bool(values["pdl"]))
    launch = Launch(gemv.gemv, arguments, (grid, _batches(product), 1), options)
    return KernelPlan((launch,), layouts=product.layouts, requires=_demands(product, Within(rows, 0, block_m)))


def matmul_plan(product: Product, config: Config) -> KernelPlan:
    """Plan one launch of `matmul`; serves any number of rows."""
    operands, epilogue = epilogue_function(product)
    launch = _matmul(product, config, operands, epilogue)
    return KernelPlan((launch,), layouts=product.layouts, requires=_demands(product))


def split_k_plan(product: Product, config: Config) -> KernelPlan:
    """Plan partial products over ranges of K and their sum with the epilogue, in a fixed order.

    The sum is made by each tile's last program, or by a second launch.
    """
    splits, pdl = int(dict(config)["split_k"]), bool(dict(config)["pdl"])
    parts = times((_batches(product), product.epilogue.m.extent, splits * product.n * product.halves))
    workspace = Workspace("ws0", "float32", parts)
    if dict(config)["last_adds"]:
        operands, epilogue = epilogue_function(product)
        launch = _matmul(product, config, operands, epilogue)
        counters = Workspace("ws1", "int32", times((launch.grid[0], _batches(product))), counters=True)
        return KernelPlan((launch,), (workspace, counters), product.layouts, _demands(product))
    first = _matmul(product, config, (Slot("ws0", "float32"),), partial_function(product))
    second = sum_launch(product, splits, pdl=pdl)
    return KernelPlan((first, second), (workspace,), product.layouts, _demands(product))


def sum_launch(product: Product, splits: int, *, pdl: bool) -> Launch:
    """Plan the second pass of a split-K: the sum of the partial products in `ws0`, with the epilogue."""
    from tune_model.tune.triton.kernels import matmul

    rows = product.epilogue.m.extent
    operands, epilogue = epilogue_function(product)
    block_m = min(16, 1 << (product.m - 1).bit_length())
    block_n = max(32, min(512, 2048 // block_m, 1 << (product.n - 1).bit_length()))
    arguments: dict[str, Argument] = {
        "partials": Slot("ws0", "float32"),
        "operands": operands,
        "m_size": SizeOf(rows),
        "N": Constant(product.n),
        "HALVES": Constant(product.halves),
        "SPLIT_K": Constant(splits),
        "BLOCK_M": Constant(block_m),
        "BLOCK_N": Constant(block_n),
        "PDL": Constant(pdl),
        "EPILOGUE": epilogue,
    }
    grid: tuple[Dim, Dim, Dim] = (f"cdiv({rows}, {block_m})", -(-product.n // block_n), _batches(product))
    return Launch(matmul.sum_partials, arguments, grid, Options(4, 1, programmatic=pdl))


def _matmul(product: Product, config: Config, operands: tuple[Argument, ...] | Argument, epilogue: Argument) -> Launch:
    from tune_model.tune.triton.kernels import matmul

    values = dict(config)
    block_m, block_n = int(values["block_m"]), int(values["block_n"])
    splits = int(values.get("split_k", 1))
    rows = product.epilogue.m.extent
    last_adds = bool(values.get("last_adds", False))
    arguments = _shared(product) | {
        "operands": operands,
        "partials": Slot("ws0", "float32") if last_adds else Constant(None),
        "counters": Slot("ws1", "int32") if last_adds else Constant(None),
        "BLOCK_M": Constant(block_m),
        "BLOCK_N": Constant(block_n),
        "BLOCK_K": Constant(int(values["block_k"])),
        "GROUP_M": Constant(int(values["group_m"])),
        "SPLIT_K": Constant(splits),
        "LAST_ADDS": Constant(last_adds),
        "SWAP": Constant(bool(values["swap"])),
        # Masked rows cost no traffic; past one tile they are rare and the loop is better off without masks.
        "WRAP_ROWS": Constant(product.m > block_m and not product.invariant),
        "EVICTION": Constant("evict_first" if product.m <= block_m and not product.invariant else ""),
        "PRECISION": Constant(product.precision),
        "PDL": Constant(bool(values["pdl"])),
        "AHEAD": Constant(asked_ahead(product, config)),
        "EPILOGUE": epilogue,
    }
    options = Options(int(values["num_warps"]), int(values["num_stages"]), programmatic=bool(values["pdl"]))
    tiles = f"cdiv({rows}, {block_m})*{-(-product.n // block_n)}"
    return Launch(matmul.matmul, arguments, (tiles, splits, _batches(product)), options)
