"""Kernel plans of matmul forms: what the three families share.

The epilogue is printed from the form's loop nest over the output tile and handed to the kernel as a constexpr function.
"""

from typing import NamedTuple

from tune_model.extract.task import Task
from tune_model.runtime.expression import Dim, evaluate
from tune_model.runtime.kernel import Requirement, Within, Workspace
from tune_model.runtime.program import Form
from tune_model.runtime.replay import slot_sizes
from tune_model.tune.candidate import Config, Rejected
from tune_model.tune.loops.epilogue import Epilogue, lower_epilogue
from tune_model.tune.loops.rounding import elide_rounding
from tune_model.tune.triton.compile import Options
from tune_model.tune.triton.emit import Operands, Printer, Space
from tune_model.tune.triton.launch import Argument, Constant, KernelPlan, Launch, SizeOf, Slot
from tune_model.tune.triton.module import load_function

__all__ = ["ELEMENT_BYTES", "Product", "gemv_plan", "matmul_plan", "read_product", "split_k_plan"]

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class Product(NamedTuple):
    """A matmul task in the kernels' terms.

    Attributes:
        form: The task's form.
        epilogue: It taken apart.
        m: Rows at the task's own size.
        n: Columns of the result; with two halves the product has twice as many.
        k: Length of the dot products.
        halves: Accumulators: 2 when both halves of the columns meet in one result.
        x_stride: Distance of two rows of the left operand.
        w_strides: Distance of two columns and of two elements of a column of the right operand.
        precision: Of `tl.dot`: `ieee` or `tf32`; halves do not care.
    """

    form: Form
    epilogue: Epilogue
    m: int
    n: int
    k: int
    halves: int
    x_stride: Dim
    w_strides: tuple[int, int]
    precision: str


def read_product(task: Task) -> Product | Rejected:
    """Read a matmul task, or say why the kernels cannot run it."""
    if task.form.kind != "matmul":
        return Rejected("unsupported", f"a {task.form.kind}, not a matmul")
    epilogue = lower_epilogue(task.form)
    if isinstance(epilogue, Rejected):
        return epilogue
    if epilogue.batch is not None:
        return Rejected("unsupported", "a batched matmul")
    if epilogue.dtype not in ELEMENT_BYTES:
        return Rejected("unsupported", f"dtype {epilogue.dtype}; expected one of {sorted(ELEMENT_BYTES)}")
    x_stride, x_step = epilogue.a.strides
    w_step, w_stride = epilogue.b.strides
    if x_step != 1 or epilogue.a.offset != 0:
        return Rejected("unsupported", f"a left operand with stride {x_step} and offset {epilogue.a.offset}")
    if not isinstance(w_step, int) or not isinstance(w_stride, int) or epilogue.b.offset != 0:
        return Rejected("unsupported", f"a right operand with strides {epilogue.b.strides}")
    m, n = epilogue.m.size, epilogue.n
    if min(m, n, epilogue.k) < 1:
        return Rejected("unsupported", f"an empty product {m} x {n} x {epilogue.k}")
    precision = "tf32" if epilogue.dtype != "float32" or task.rules.allow_tf32 else "ieee"
    halves = len(epilogue.accumulators)
    return Product(task.form, epilogue, m, n, epilogue.k, halves, x_stride, (w_stride, w_step), precision)


def _epilogue(product: Product) -> tuple[Argument, Argument]:
    """Print the pointwise rest over a tile; returns the operands' tuple and the function."""
    operands = Operands(product.form)
    nest = elide_rounding(product.epilogue.nest)
    space = Space(("rows", "columns"), (0, 1), ("rows < m_size", f"columns < {product.n}"))
    names = {a.slot: f"acc{place}" for place, a in enumerate(product.epilogue.accumulators)}
    printer = Printer(nest, space, operands, names)
    lines = [printer.statement(n) for n in range(len(nest.nodes))] + [printer.store(s) for s in nest.stores]
    text = "@triton.jit\ndef epilogue(acc0, acc1, rows, columns, m_size, operands):\n"
    function = load_function(text + "".join(f"    {line}\n" for line in lines), "epilogue")
    return operands.arguments(), Constant(function)


def _partial(product: Product) -> Argument:
    """Print the function that stores a split's part of the product for the second pass."""
    total = product.n * product.halves
    lines = [
        "@triton.jit",
        "def partial(acc0, acc1, rows, columns, m_size, operands):",
        f"    inside = (rows < m_size) & (columns < {product.n})",
        "    row = tl.program_id(1).to(tl.int64) * m_size + rows",
        f"    pointers = operands[0] + row * {total} + columns",
        "    tl.store(pointers, acc0, mask=inside)",
    ]
    if product.halves == 2:
        lines.append(f"    tl.store(pointers + {product.n}, acc1, mask=inside)")
    return Constant(load_function("\n".join(lines) + "\n", "partial"))


def _shared(product: Product) -> dict[str, Argument]:
    """Return the arguments that gemv and matmul both take."""
    dtype = product.epilogue.dtype
    stride = evaluate(product.x_stride, slot_sizes(product.form))
    return {
        "x": Slot(product.epilogue.a.slot, dtype),
        "w": Slot(product.epilogue.b.slot, dtype),
        "m_size": SizeOf(product.epilogue.m.extent),
        "x_stride_m": SizeOf(product.x_stride, divisible=stride % 16 == 0),
        "N": Constant(product.n),
        "K": Constant(product.k),
        "W_STRIDE_N": Constant(product.w_strides[0]),
        "W_STRIDE_K": Constant(product.w_strides[1]),
        "HALVES": Constant(product.halves),
    }


def gemv_plan(product: Product, config: Config) -> KernelPlan:
    """Plan one launch of `gemv`, for at most as many rows as the task's own count rounded up to a power of two."""
    from tune_model.tune.triton.kernels import gemv

    values = dict(config)
    operands, epilogue = _epilogue(product)
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
        "EPILOGUE": epilogue,
    }
    rows = product.epilogue.m.extent
    options = Options(int(values["num_warps"]), 1, programmatic=bool(values["pdl"]))
    launch = Launch(gemv.gemv, arguments, (-(-product.n // block_n), f"min({rows}, 1)", 1), options)
    limit: Requirement = Within(rows, 0, block_m)
    return KernelPlan((launch,), requires=(*product.epilogue.nest.requires, limit))


def matmul_plan(product: Product, config: Config) -> KernelPlan:
    """Plan one launch of `matmul`; serves any number of rows."""
    operands, epilogue = _epilogue(product)
    launch = _matmul(product, config, operands, epilogue)
    return KernelPlan((launch,), requires=product.epilogue.nest.requires)


def split_k_plan(product: Product, config: Config) -> KernelPlan:
    """Plan two launches: partial products over ranges of K, then their sum with the epilogue, in a fixed order."""
    from tune_model.tune.triton.kernels import matmul

    splits, pdl = int(dict(config)["split_k"]), bool(dict(config)["pdl"])
    rows = product.epilogue.m.extent
    first = _matmul(product, config, (Slot("ws0", "float32"),), _partial(product))
    operands, epilogue = _epilogue(product)
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
    grid: tuple[Dim, Dim, Dim] = (f"cdiv({rows}, {block_m})", -(-product.n // block_n), 1)
    second = Launch(matmul.sum_partials, arguments, grid, Options(4, 1, programmatic=pdl))
    workspace = Workspace("ws0", "float32", f"({rows})*{splits * product.n * product.halves}")
    return KernelPlan((first, second), (workspace,), requires=product.epilogue.nest.requires)


def _matmul(product: Product, config: Config, operands: tuple[Argument, ...] | Argument, epilogue: Argument) -> Launch:
    from tune_model.tune.triton.kernels import matmul

    values = dict(config)
    block_m, block_n = int(values["block_m"]), int(values["block_n"])
    splits = int(values.get("split_k", 1))
    rows = product.epilogue.m.extent
    arguments = _shared(product) | {
        "operands": operands,
        "BLOCK_M": Constant(block_m),
        "BLOCK_N": Constant(block_n),
        "BLOCK_K": Constant(int(values["block_k"])),
        "GROUP_M": Constant(int(values["group_m"])),
        "SPLIT_K": Constant(splits),
        "SWAP": Constant(bool(values["swap"])),
        # Masked rows cost no traffic; past one tile they are rare and the loop is better off without masks.
        "WRAP_ROWS": Constant(product.m > block_m),
        "EVICTION": Constant("evict_first" if product.m <= block_m else ""),
        "PRECISION": Constant(product.precision),
        "PDL": Constant(bool(values["pdl"])),
        "EPILOGUE": epilogue,
    }
    options = Options(int(values["num_warps"]), int(values["num_stages"]), programmatic=bool(values["pdl"]))
    tiles = f"cdiv({rows}, {block_m})*{-(-product.n // block_n)}"
    return Launch(matmul.matmul, arguments, (tiles, splits, 1), options)
