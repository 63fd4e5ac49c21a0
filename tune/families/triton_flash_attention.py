"""Attention of many queries in one kernel: causal, over a cache, windowed, soft-capped, or under any mask.

Where ATen's backends can do it too they are usually as fast; this is for what they cannot do without writing out a
mask or repeating keys and values. Whatever nobody sees is not read.
"""

from collections.abc import Iterator
from itertools import product
from typing import Final

from tune_model.extract.task import Task
from tune_model.runtime.kernel import Requirement, Within
from tune_model.runtime.program import FormKind, Parameter
from tune_model.tune.attention import AttentionForm, read_attention
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.search.order import thin, with_dependent_launch
from tune_model.tune.target import CudaTarget, Target
from tune_model.tune.triton.attention_arguments import (
    append_launch,
    new_tokens,
    padded,
    size_of,
    stride_argument,
    stride_of,
    within,
)
from tune_model.tune.triton.compile import Options
from tune_model.tune.triton.launch import Argument, Constant, KernelPlan, Launch, SizeOf, Slot, build_kernel

__all__ = ["FAMILY", "TritonFlashAttention"]

_DTYPES: Final = {"bfloat16", "float16", "float32"}
_MASKS: Final = {"bool", *_DTYPES}
_MAX_HEAD_DIM: Final = 256

_Values = dict[str, int | float | str | bool]


class TritonFlashAttention:
    """See the module."""

    name = "triton_flash_attention"
    version = 2
    kinds: frozenset[FormKind] = frozenset({"attention"})

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept contiguous head dims and masks of four dims; one query per row over a cache is another family's."""
        if not isinstance(target, CudaTarget):
            return Rejected("unsupported", "a CUDA kernel")
        if task.form.kind != "attention":
            return Rejected("unsupported", f"a {task.form.kind}, not attention")
        read = read_attention(task.form)
        return read if isinstance(read, Rejected) else _refusal(read)

    def start(self, task: Task, target: Target) -> Config:
        """Return a tile of 128 queries, fewer where there are fewer."""
        return next(self.configurations(task, target, Effort.QUICK))

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield tiles near what suits the number of queries and the head dim first."""
        read = read_attention(task.form)
        if isinstance(read, Rejected) or not isinstance(target, CudaTarget):
            return
        queries, wide = size_of(read.q, 2), read.q.type.dtype == "float32"
        head_dim = padded(size_of(read.q, 3))
        wanted_m = min(128, padded(queries))
        wanted_n = 64 if head_dim >= 128 or wide else 128
        spaces: list[Config] = []
        for block_m, block_n, warps, stages in product((16, 32, 64, 128), (32, 64, 128), (1, 2, 4, 8), (2, 3, 4)):
            # A warp takes 16 queries at least; Hopper's instructions want groups of four warps over 64.
            if block_m // 16 < warps and (block_m, warps) != (64, 8):
                continue
            if warps == 1 and block_m > 16:
                continue
            if block_m > max(16, 2 * queries) or block_m * head_dim > 64 * warps * 256:
                continue
            spaces.append((("block_m", block_m), ("block_n", block_n), ("num_warps", warps), ("num_stages", stages)))

        def cost(config: Config) -> float:
            values = {name: int(value) for name, value in config}
            return (
                abs(values["block_m"].bit_length() - wanted_m.bit_length())
                + abs(values["block_n"].bit_length() - wanted_n.bit_length())
                + 0.6 * abs(values["num_warps"].bit_length() - max(1, wanted_m // 16).bit_length())
                + 0.4 * abs(values["num_stages"] - 2)
            )

        ordered = sorted(spaces, key=cost)
        yield from thin(with_dependent_launch(ordered, offered=target.arch >= 90), effort)

    def plan(self, task: Task, config: Config) -> KernelPlan | Rejected:
        """State launches and requirements without compiling."""
        read = read_attention(task.form)
        if isinstance(read, Rejected):
            return read
        refusal = _refusal(read)
        return refusal or _plan(read, {p.name: p for p in task.form.parameters}, dict(config))

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """Compile the attention and, where the form has one, the append to the cache."""
        return build_kernel(self.plan(task, config), target)


def _refusal(read: AttentionForm) -> Rejected | None:
    head_dim, value_dim = size_of(read.q, 3), size_of(read.v, 3)
    if read.op == "cached" and size_of(read.q, 2) == 1:
        return Rejected("unsupported", "one query per row over a cache; expected several")
    if max(head_dim, value_dim) > _MAX_HEAD_DIM:
        return Rejected("unsupported", f"head dims {head_dim} and {value_dim}; expected at most {_MAX_HEAD_DIM}")
    dtypes = {read.q.type.dtype, read.k.type.dtype, read.v.type.dtype}
    if len(dtypes) != 1 or not dtypes <= _DTYPES:
        return Rejected("unsupported", f"dtypes {sorted(dtypes)}; expected one of {sorted(_DTYPES)}")
    if size_of(read.q, 1) % size_of(read.k, 1):
        return Rejected("unsupported", f"{size_of(read.q, 1)} heads over {size_of(read.k, 1)} key/value heads")
    for parameter in (read.q, read.k, read.v, read.out):
        if stride_of(parameter, 3) != 1:
            return Rejected("unsupported", f"{parameter.name} has stride {stride_of(parameter, 3)} along the head dim")
    if read.mask is not None and (len(read.mask.type.shape) != 4 or read.mask.type.dtype not in _MASKS):
        return Rejected("unsupported", f"a {read.mask.type.dtype} mask of {len(read.mask.type.shape)} dims; expected 4")
    return None


def _mask_kind(read: AttentionForm) -> str:
    if read.mask is None:
        return "none"
    if read.mask.type.dtype != "bool":
        return "bias"
    same_for_all = size_of(read.mask, 2) == 1 or stride_of(read.mask, 2) == 0
    return "row" if same_for_all else "bool"


def _plan(read: AttentionForm, slots: dict[str, Parameter], config: _Values) -> KernelPlan:
    from tune_model.tune.triton.kernels import flash_attention

    heads, head_dim, value_dim = size_of(read.q, 1), size_of(read.q, 3), size_of(read.v, 3)
    dtype, pdl, block_m = read.q.type.dtype, bool(config["pdl"]), int(config["block_m"])
    kind = _mask_kind(read)
    arguments: dict[str, Argument] = {
        "q": Slot(read.q.name, dtype),
        "k": Slot(read.k.name, dtype),
        "v": Slot(read.v.name, dtype),
        "out": Slot(read.out.name, read.out.type.dtype),
        "sinks": Slot((read.sinks or read.out).name, (read.sinks or read.out).type.dtype, aligned=False),
        "queries": SizeOf(f"{read.q.name}.size2"),
        "keys": SizeOf(f"{read.k.name}.size2"),
        "GROUP": Constant(heads // size_of(read.k, 1)),
        "HEAD_DIM": Constant(head_dim),
        "VALUE_DIM": Constant(value_dim),
        "SCALE": Constant(head_dim**-0.5 if read.scale is None else float(read.scale)),
        "WINDOW": Constant(read.window or 0),
        "SOFTCAP": Constant(float(read.softcap or 0.0)),
        "LAST": Constant("positions" if read.positions is not None else "index" if read.is_causal else "all"),
        "MASK": Constant(kind),
        "SINKS": Constant(read.sinks is not None),
        "BLOCK_M": Constant(block_m),
        "BLOCK_N": Constant(int(config["block_n"])),
        "BLOCK_D": Constant(padded(head_dim)),
        "BLOCK_V": Constant(padded(value_dim)),
        "PRECISION": Constant("ieee" if dtype == "float32" else "tf32"),
        "PDL": Constant(pdl),
    }
    for prefix, parameter, axes in (
        ("q", read.q, "bhm"),
        ("k", read.k, "bhn"),
        ("v", read.v, "bhn"),
        ("out", read.out, "bhm"),
    ):
        for axis, letter in enumerate(axes):
            arguments[f"{prefix}_stride_{letter}"] = stride_argument(parameter, axis, wide=axis == 0)
    _add_mask(arguments, read)
    if read.positions is None:
        arguments |= {"positions": arguments["q"], "positions_stride_b": Constant(0), "positions_stride_m": Constant(0)}
    else:
        arguments |= {
            "positions": Slot(read.positions.name, read.positions.type.dtype, aligned=False),
            "positions_stride_b": SizeOf(f"{read.positions.name}.stride0"),
            "positions_stride_m": SizeOf(f"{read.positions.name}.stride1"),
        }
    options = Options(int(config["num_warps"]), int(config["num_stages"]), programmatic=pdl)
    grid = (f"cdiv({read.q.name}.size2, {block_m})", heads, f"{read.q.name}.size0")
    append = append_launch(read, slots, pdl=pdl)
    attend = Launch(flash_attention.attend, arguments, grid, options)
    return KernelPlan((attend,) if append is None else (append, attend), (), (), _requirements(read))


def _add_mask(arguments: dict[str, Argument], read: AttentionForm) -> None:
    """Add the mask's pointer and strides; a dim of size 1 is read again and again."""
    mask = read.mask
    arguments["mask"] = arguments["q"] if mask is None else Slot(mask.name, mask.type.dtype, aligned=False)
    for axis, letter in enumerate("bhmn"):
        broadcast = mask is None or size_of(mask, axis) == 1
        stride: Argument = Constant(0)
        if mask is not None and not broadcast:
            stride = stride_argument(mask, axis, wide=axis == 0, promised=False)
        arguments[f"mask_stride_{letter}"] = stride


def _requirements(read: AttentionForm) -> tuple[Requirement, ...]:
    fixed = [within(p, axis) for p, axis in ((read.q, 1), (read.q, 3), (read.k, 1), (read.v, 3))]
    names = [read.q.name, read.k.name, read.v.name, read.out.name, *(new_tokens(read) or ())]
    fixed += [Within(f"{name}.stride3", 1, 1) for name in names]
    if read.sinks is not None:
        fixed.append(Within(f"{read.sinks.name}.stride0", 1, 1))
    if read.mask is not None:
        for axis in range(4):
            if size_of(read.mask, axis) == 1:
                fixed.append(within(read.mask, axis))
            else:
                fixed.append(Within(f"{read.mask.name}.size{axis}", 2, 2**31 - 1))
        if _mask_kind(read) == "row" and size_of(read.mask, 2) != 1:
            fixed.append(Within(f"{read.mask.name}.stride2", 0, 0))
    return tuple(fixed)


FAMILY = TritonFlashAttention()
