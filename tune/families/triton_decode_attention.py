"""Attention of one new token per row over a cache: splits of the keys, the cache append fused in, the splits joined.

Head counts and the head dim are compiled in; batch, strides and cache length stay arguments, and each row's length is
read on the device, so one kernel serves every position and every cache.
"""

import math
from collections.abc import Iterator
from itertools import product
from typing import Final

from tune_model.extract.task import Task
from tune_model.runtime.kernel import Requirement, Within, Workspace
from tune_model.runtime.program import Form, FormKind, Ref
from tune_model.tune.attention import AttentionForm, read_attention
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.search.order import LIMITS, thin, with_prefetch
from tune_model.tune.target import CudaTarget, Target
from tune_model.tune.triton.attention_arguments import new_tokens, padded, size_of, stride_of
from tune_model.tune.triton.compile import Options
from tune_model.tune.triton.head_source import HeadFunctions, head_functions
from tune_model.tune.triton.launch import Argument, Constant, KernelPlan, Launch, SizeOf, Slot, build_kernel
from tune_model.tune.triton.module import load_function

__all__ = ["FAMILY", "TritonDecodeAttention"]

_DTYPES = {"bfloat16", "float16", "float32"}
_MAX_HEAD_DIM = 256
_SPLITS: Final = (1, 2, 4, 8, 16, 32, 64, 128)

_RESERVED_BYTES: Final = 8192
"""Of shared memory, beside the blocks that are fetched ahead."""

_UNEVEN: Final = 4
"""Times as many splits where rows differ in length: else the device waits for the programs of the longest."""

_MANY_SPLITS: Final = 8
_JOINED_COLUMNS: Final = 32
"""Of a head with many splits, joined by one program of a warp or two: its loads all wait at the same time."""

_Values = dict[str, int | float | str | bool]


class TritonDecodeAttention:
    """See the module."""

    name = "triton_decode_attention"
    version = 7
    kinds: frozenset[FormKind] = frozenset({"attention"})

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept cached attention with one query per row and contiguous head dims."""
        if not isinstance(target, CudaTarget):
            return Rejected("unsupported", "a CUDA kernel")
        if task.form.kind != "attention":
            return Rejected("unsupported", f"a {task.form.kind}, not attention")
        read = read_attention(task.form, with_heads=True)
        if isinstance(read, Rejected):
            return read
        refused = _refusal(read)
        made = None if refused is not None else _heads(task.form, read)
        return made if isinstance(made, Rejected) else refused

    def start(self, task: Task, target: Target) -> Config:
        """Return the first configuration."""
        return next(self.configurations(task, target, Effort.THOROUGH))

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield splits near what fills the device and tiles near the usual first."""
        read = read_attention(task.form, with_heads=True)
        if isinstance(read, Rejected) or not isinstance(target, CudaTarget):
            return
        batch, kv_heads, keys = (size_of(read.k, axis) for axis in (0, 1, 2))
        values = read.positions.values if read.positions is not None else None
        shortest, longest = (0, keys - 1) if values is None else (values.low, values.high)
        keys = min(keys, longest + 1) if isinstance(longest, int) else keys
        ideal = max(1, target.sm_count // max(1, batch * kv_heads))
        if batch > 1 and shortest != longest:
            ideal *= _UNEVEN
        head_bytes = padded(size_of(read.q, 3)) * (4 if read.q.type.dtype == "float32" else 2)
        spaces: list[Config] = []
        for splits, block_n, warps, stages in product(_SPLITS, (16, 32, 64, 128), (1, 2, 4, 8), (2, 3, 4)):
            # A warp takes 8 keys at least and 64 at most; keys and values fetched ahead share the block's memory.
            ahead = 2 * (stages - 1) * block_n * head_bytes
            if not 8 <= block_n // warps <= 64 or ahead + _RESERVED_BYTES > target.shared_bytes:
                continue
            # Splits that no key is left for are programs that start for nothing.
            if splits > 1 and (splits - 1) * block_n >= keys:
                continue
            tile: Config = (("block_n", block_n), ("num_warps", warps), ("num_stages", stages))
            joins = (False, True) if splits > 1 else (False,)
            spaces += [(("splits", splits), *tile, ("last_joins", last)) for last in joins]

        def cost(config: Config) -> float:
            values = {name: int(value) for name, value in config}
            return (
                abs(math.log2(values["splits"] / ideal))
                + abs(math.log2(values["block_n"] / 64))
                + 0.7 * abs(math.log2(values["num_warps"] / 4))
                + 0.4 * abs(values["num_stages"] - 3)
                + 0.2 * values["last_joins"]
            )

        overlaps = target.arch >= 90
        offered = with_prefetch(sorted(spaces, key=cost), offered=overlaps)
        if overlaps and not _asks_ahead(read):
            offered = (config for config in offered if not dict(config)["prefetch"])
        # A quick search is a list, any other a descent that sees the whole space: some tiles, each in three forms.
        share = 1.0 if effort is Effort.QUICK else 3 * LIMITS[Effort.THOROUGH] / LIMITS[effort]
        yield from thin(offered, effort, share)

    def plan(self, task: Task, config: Config) -> KernelPlan | Rejected:
        """State launches and requirements without compiling."""
        read = read_attention(task.form, with_heads=True)
        if isinstance(read, Rejected):
            return read
        heads = _heads(task.form, read)
        return heads if isinstance(heads, Rejected) else _plan(read, heads, dict(config))

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """Compile the attention and, with several splits, the combine."""
        return build_kernel(self.plan(task, config), target)


def _refusal(read: AttentionForm) -> Rejected | None:
    if read.op != "cached" or read.positions is None:
        return Rejected("unsupported", f"{read.op} attention; expected attention over a cache")
    queries, head_dim = size_of(read.q, 2), size_of(read.q, 3)
    if queries != 1:
        return Rejected("unsupported", f"{queries} queries per row; expected 1")
    if head_dim > _MAX_HEAD_DIM or head_dim != size_of(read.v, 3):
        return Rejected("unsupported", f"head dim {head_dim}; expected at most {_MAX_HEAD_DIM}, equal for values")
    dtypes = {read.q.type.dtype, read.k.type.dtype, read.v.type.dtype}
    if len(dtypes) != 1 or not dtypes <= _DTYPES:
        return Rejected("unsupported", f"dtypes {sorted(dtypes)}; expected one of {sorted(_DTYPES)}")
    if size_of(read.q, 1) % size_of(read.k, 1):
        return Rejected("unsupported", f"{size_of(read.q, 1)} heads over {size_of(read.k, 1)} key/value heads")
    if read.append is not None:
        arguments = [a.name if isinstance(a, Ref) else "" for a in read.append.args]
        if arguments[:2] != [read.k.name, read.v.name] or arguments[4:5] != [read.positions.name]:
            return Rejected("unsupported", "an append to other tensors than the attention reads")
    # Queries that the kernel makes lie nowhere.
    for parameter in (*(() if read.made else (read.q,)), read.k, read.v, read.out):
        if stride_of(parameter, 3) != 1:
            return Rejected("unsupported", f"{parameter.name} has stride {stride_of(parameter, 3)} along the head dim")
    return None


def _asks_ahead(read: AttentionForm) -> bool:
    """Say whether keys and values are whole pieces of 16 bytes, as the second-level cache is asked for them."""
    strides = [stride_of(parameter, axis) for parameter in (read.k, read.v) for axis in (0, 1, 2)]
    return all(stride % 16 == 0 for stride in (size_of(read.k, 3), *strides))


def _is_dense(read: AttentionForm) -> bool:
    """Say whether the keys of a head lie behind each other, and its values too."""
    return all(stride_of(parameter, 2) == size_of(parameter, 3) for parameter in (read.k, read.v))


def _heads(form: Form, read: AttentionForm) -> HeadFunctions | Rejected | None:
    """Return the functions that make queries and new keys, where the form does."""
    if not read.made:
        return None
    return head_functions(form, read, padded(size_of(read.q, 1) // size_of(read.k, 1)), padded(size_of(read.q, 3)))


def _plan(read: AttentionForm, made: HeadFunctions | None, config: _Values) -> KernelPlan | Rejected:
    refusal = _refusal(read)
    if refusal is not None or read.positions is None:
        return refusal or Rejected("unsupported", "attention without positions")
    heads, kv_heads, head_dim = size_of(read.q, 1), size_of(read.k, 1), size_of(read.q, 3)
    splits, block_n = int(config["splits"]), int(config["block_n"])
    batch = f"{read.out.name}.size0"
    new = new_tokens(read)
    k_new, v_new = new or (read.k.name, read.v.name)
    dtype = read.q.type.dtype

    def size(slot: str, axis: int, *, wide: bool = False) -> SizeOf:
        parameter = {p.name: p for p in (read.q, read.k, read.v, read.out, read.positions or read.q)}.get(slot)
        # New tokens are laid out by the step that makes them; their strides promise nothing.
        divisible = parameter is not None and stride_of(parameter, axis) % 16 == 0
        return SizeOf(f"{slot}.stride{axis}", divisible, 64 if wide else 32)

    arguments: dict[str, Argument] = {
        "q": Slot(read.q.name, dtype),
        "k_cache": Slot(read.k.name, dtype),
        "v_cache": Slot(read.v.name, dtype),
        "k_new": Slot(k_new, dtype, aligned=new is None),
        "v_new": Slot(v_new, dtype, aligned=new is None),
        "positions": Slot(read.positions.name, read.positions.type.dtype, aligned=False),
        "sinks": Slot((read.sinks or read.out).name, (read.sinks or read.out).type.dtype, aligned=False),
        "out": Slot(read.out.name, read.out.type.dtype, aligned=False),
        "positions_stride_b": size(read.positions.name, 0),
        "q_stride_b": size(read.q.name, 0, wide=True),
        "q_stride_h": size(read.q.name, 1),
        "kc_stride_b": size(read.k.name, 0, wide=True),
        "kc_stride_h": size(read.k.name, 1),
        "kc_stride_n": size(read.k.name, 2),
        "vc_stride_b": size(read.v.name, 0, wide=True),
        "vc_stride_h": size(read.v.name, 1),
        "vc_stride_n": size(read.v.name, 2),
        "kn_stride_b": size(k_new, 0, wide=True),
        "kn_stride_h": size(k_new, 1),
        "vn_stride_b": size(v_new, 0, wide=True),
        "vn_stride_h": size(v_new, 1),
        "out_stride_b": size(read.out.name, 0, wide=True),
        "out_stride_h": size(read.out.name, 1),
        "slots": SizeOf(f"{read.k.name}.size2"),
        "KV_HEADS": Constant(kv_heads),
        "GROUP": Constant(heads // kv_heads),
        "HEAD_DIM": Constant(head_dim),
        "SCALE": Constant(head_dim**-0.5 if read.scale is None else float(read.scale)),
        "WINDOW": Constant(read.window or 0),
        "SOFTCAP": Constant(float(read.softcap or 0.0)),
        "APPEND": Constant(new is not None),
        "SINKS": Constant(read.sinks is not None),
        "SPLITS": Constant(splits),
        "LAST_JOINS": Constant(bool(config["last_joins"])),
        "BLOCK_G": Constant(padded(heads // kv_heads)),
        "BLOCK_N": Constant(block_n),
        "BLOCK_D": Constant(padded(head_dim)),
        "PRECISION": Constant("ieee" if dtype == "float32" else "tf32"),
        "PDL": Constant(bool(config["pdl"])),
        "AHEAD": Constant(block_n if config["prefetch"] else 0),
        "DENSE": Constant(_is_dense(read)),
    }
    if _is_dense(read):
        arguments |= {"kc_stride_n": Constant(head_dim), "vc_stride_n": Constant(head_dim)}
    if made is not None:
        # What is made is in no memory: the result's own pointer fills its place.
        unused = {"q": arguments["out"], "k_new": arguments["out"]}
        unused |= {name: SizeOf(0) for name in ("q_stride_b", "q_stride_h", "kn_stride_b", "kn_stride_h")}
        arguments |= unused
    arguments["heads_of"] = (arguments["out"],) if made is None else made.operands
    for name, source in (("QUERIES", made and made.queries), ("KEYS", made and made.keys)):
        arguments[name] = Constant(None if source is None else load_function(source, "body"))
    for name, place in (("partial_out", "ws0"), ("partial_max", "ws1"), ("partial_sum", "ws2")):
        # Of one split nothing is partial: the result's own pointer fills the place.
        arguments[name] = Slot(place, "float32") if splits > 1 else arguments["out"]
    arguments["counters"] = Slot("ws3", "int32") if config["last_joins"] else arguments["out"]
    plan = _launches(read, config, arguments, batch)
    return plan._replace(requires=_requirements(read, made))


def _launches(read: AttentionForm, config: _Values, arguments: dict[str, Argument], batch: str) -> KernelPlan:
    from tune_model.tune.triton.kernels import decode_attention

    heads, kv_heads, head_dim = size_of(read.q, 1), size_of(read.k, 1), size_of(read.q, 3)
    splits = int(config["splits"])
    pdl = bool(config["pdl"])
    options = Options(int(config["num_warps"]), int(config["num_stages"]), programmatic=pdl)
    launches = [Launch(decode_attention.attend, arguments, (splits, kv_heads, batch), options)]
    workspaces: tuple[Workspace, ...] = ()
    if splits > 1 and not config["last_joins"]:
        names = ("partial_out", "partial_max", "partial_sum", "positions", "out", "positions_stride_b")
        shared = {name: arguments[name] for name in (*names, "out_stride_b", "out_stride_h", "HEAD_DIM", "WINDOW")}
        shared |= {name: arguments[name] for name in ("SPLITS", "BLOCK_N", "PDL")}
        columns = min(_JOINED_COLUMNS, padded(head_dim)) if splits >= _MANY_SPLITS else padded(head_dim)
        shared |= {"HEADS": Constant(heads), "BLOCK_S": Constant(padded(splits, 1)), "BLOCK_D": Constant(columns)}
        grid = (heads, batch, padded(head_dim) // columns)
        launches.append(
            Launch(decode_attention.combine, shared, grid, Options(max(1, splits // 64), 1, programmatic=pdl))
        )
    if splits > 1:
        rows = f"{batch}*{heads * splits}"
        workspaces = (
            Workspace("ws0", "float32", f"{rows}*{head_dim}"),
            Workspace("ws1", "float32", rows),
            Workspace("ws2", "float32", rows),
        )
    if config["last_joins"]:
        workspaces = (*workspaces, Workspace("ws3", "int32", f"{batch}*{kv_heads}", counters=True))
    return KernelPlan(tuple(launches), workspaces)


def _requirements(read: AttentionForm, made: HeadFunctions | None) -> tuple[Requirement, ...]:
    q = read.q if made is None else read.out
    fixed = [(q, 1), (q, 2), (q, 3), (read.k, 1)]
    sizes = [Within(f"{p.name}.size{axis}", size_of(p, axis), size_of(p, axis)) for p, axis in fixed]
    names = [read.q.name, read.k.name, read.v.name, read.out.name, *(new_tokens(read) or ())]
    if made is not None:
        names = [read.k.name, read.v.name, read.out.name, *(new_tokens(read) or ())[1:]]
    strides = [Within(f"{name}.stride3", 1, 1) for name in names]
    if _is_dense(read):
        strides += [Within(f"{p.name}.stride2", size_of(p, 3), size_of(p, 3)) for p in (read.k, read.v)]
    if read.sinks is not None:
        strides.append(Within(f"{read.sinks.name}.stride0", 1, 1))
    return (*sizes, *strides, *(made.requires if made is not None else ()))


FAMILY = TritonDecodeAttention()
