"""Attention of one new token per row over a cache: splits of the keys, the cache append fused in, then a combine.

Head counts and the head dim are compiled in; batch, strides and cache length stay arguments, and each row's length is
read on the device, so one kernel serves every position and every cache.
"""

from collections.abc import Iterator

from tune_model.extract.task import Task
from tune_model.runtime.kernel import Requirement, Within, Workspace
from tune_model.runtime.program import FormKind, Parameter, Ref
from tune_model.tune.attention import AttentionForm, read_attention
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.search_order import thin, with_dependent_launch
from tune_model.tune.target import CudaTarget, Target
from tune_model.tune.triton.compile import Options
from tune_model.tune.triton.launch import Argument, Constant, KernelPlan, Launch, SizeOf, Slot, build_kernel

__all__ = ["FAMILY", "TritonDecodeAttention"]

_DTYPES = {"bfloat16", "float16", "float32"}
_MAX_HEAD_DIM = 256

_Values = dict[str, int | float | str | bool]


class TritonDecodeAttention:
    """See the module."""

    name = "triton_decode_attention"
    version = 1
    kinds: frozenset[FormKind] = frozenset({"attention"})

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept cached attention with one query per row and contiguous head dims."""
        if not isinstance(target, CudaTarget):
            return Rejected("unsupported", "a CUDA kernel")
        if task.form.kind != "attention":
            return Rejected("unsupported", f"a {task.form.kind}, not attention")
        read = read_attention(task.form)
        if isinstance(read, Rejected):
            return read
        return _refusal(read)

    def start(self, task: Task, target: Target) -> Config:
        """Return the first configuration."""
        return next(self.configurations(task, target, Effort.THOROUGH))

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield splits near what fills the device first, then block sizes, warps and stages."""
        read = read_attention(task.form)
        if isinstance(read, Rejected) or not isinstance(target, CudaTarget):
            return
        batch, _, keys = (_known(read.k, axis) for axis in (0, 1, 2))
        kv_heads = _known(read.k, 1)
        context = read.positions.values.high if read.positions is not None and read.positions.values else keys - 1
        keys = min(keys, context + 1) if isinstance(context, int) else keys
        ideal = max(1, (2 * target.sm_count) // max(1, batch * kv_heads))
        spaces: list[Config] = []
        for splits in (1, 2, 4, 8, 16, 32, 64, 128):
            for block_n, warps, stages in _TILES:
                spaces.append((("splits", splits), ("block_n", block_n), ("num_warps", warps), ("num_stages", stages)))

        def cost(config: Config) -> float:
            values = dict(config)
            splits, block_n = int(values["splits"]), int(values["block_n"])
            off = abs((splits / ideal) - 1.0) if splits > ideal else (ideal / splits) - 1.0
            # Splits that no key is left for are programs that start for nothing.
            waste = max(0.0, splits * block_n / keys - 1.0)
            rank = _TILES.index((block_n, int(values["num_warps"]), int(values["num_stages"])))
            return min(off, 4.0) + 2.0 * waste + 0.08 * rank

        ordered = sorted(spaces, key=cost)
        yield from thin(with_dependent_launch(ordered, offered=target.arch >= 90), effort)

    def plan(self, task: Task, config: Config) -> KernelPlan | Rejected:
        """State launches and requirements without compiling."""
        read = read_attention(task.form)
        if isinstance(read, Rejected):
            return read
        return _plan(read, dict(config))

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """Compile the attention and, with several splits, the combine."""
        plan = self.plan(task, config)
        if isinstance(plan, Rejected) or not isinstance(target, CudaTarget):
            return plan if isinstance(plan, Rejected) else Rejected("unsupported", "a CUDA kernel")
        return build_kernel(plan, target)


# block_n, num_warps, num_stages; the order is the prior.
_TILES = (
    (64, 4, 3),
    (64, 4, 2),
    (128, 4, 2),
    (32, 4, 3),
    (64, 2, 3),
    (32, 2, 4),
    (128, 8, 2),
    (64, 8, 3),
    (32, 1, 4),
    (128, 4, 3),
    (16, 1, 4),
)


def _known(parameter: Parameter, axis: int) -> int:
    size = parameter.type.shape[axis]
    if not isinstance(size, int):
        raise TypeError(f"a task's form must be concrete; {parameter.name} has size {size!r}")
    return size


def _stride(parameter: Parameter, axis: int) -> int:
    if parameter.type.strides is not None:
        stride = parameter.type.strides[axis]
        if not isinstance(stride, int):
            raise TypeError(f"a task's form must be concrete; {parameter.name} has stride {stride!r}")
        return stride
    product = 1
    for later in range(axis + 1, len(parameter.type.shape)):
        product *= _known(parameter, later)
    return product


def _new_tokens(read: AttentionForm) -> tuple[str, str] | None:
    """Slots of the appended keys and values; `None` when the form appends nothing."""
    if read.append is None:
        return None
    names = [a.name if isinstance(a, Ref) else "" for a in read.append.args]
    return names[2], names[3]


def _refusal(read: AttentionForm) -> Rejected | None:
    if read.op != "cached" or read.positions is None:
        return Rejected("unsupported", f"{read.op} attention; expected attention over a cache")
    queries, head_dim = _known(read.q, 2), _known(read.q, 3)
    if queries != 1:
        return Rejected("unsupported", f"{queries} queries per row; expected 1")
    if head_dim > _MAX_HEAD_DIM or head_dim != _known(read.v, 3):
        return Rejected("unsupported", f"head dim {head_dim}; expected at most {_MAX_HEAD_DIM}, equal for values")
    dtypes = {read.q.type.dtype, read.k.type.dtype, read.v.type.dtype}
    if len(dtypes) != 1 or not dtypes <= _DTYPES:
        return Rejected("unsupported", f"dtypes {sorted(dtypes)}; expected one of {sorted(_DTYPES)}")
    if _known(read.q, 1) % _known(read.k, 1):
        return Rejected("unsupported", f"{_known(read.q, 1)} heads over {_known(read.k, 1)} key/value heads")
    if read.append is not None:
        arguments = [a.name if isinstance(a, Ref) else "" for a in read.append.args]
        if arguments[:2] != [read.k.name, read.v.name] or arguments[4:5] != [read.positions.name]:
            return Rejected("unsupported", "an append to other tensors than the attention reads")
    for parameter in (read.q, read.k, read.v, read.out):
        if _stride(parameter, 3) != 1:
            return Rejected("unsupported", f"{parameter.name} has stride {_stride(parameter, 3)} along the head dim")
    return None


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def _plan(read: AttentionForm, config: _Values) -> KernelPlan | Rejected:
    refusal = _refusal(read)
    if refusal is not None or read.positions is None:
        return refusal or Rejected("unsupported", "attention without positions")
    heads, kv_heads, head_dim = _known(read.q, 1), _known(read.k, 1), _known(read.q, 3)
    splits, block_n = int(config["splits"]), int(config["block_n"])
    batch = f"{read.q.name}.size0"
    new = _new_tokens(read)
    k_new, v_new = new or (read.k.name, read.v.name)
    dtype = read.q.type.dtype

    def size(slot: str, axis: int, *, wide: bool = False) -> SizeOf:
        parameter = {p.name: p for p in (read.q, read.k, read.v, read.out, read.positions or read.q)}.get(slot)
        # New tokens are laid out by the step that makes them; their strides promise nothing.
        divisible = parameter is not None and _stride(parameter, axis) % 16 == 0
        return SizeOf(f"{slot}.stride{axis}", divisible, 64 if wide else 32)

    arguments: dict[str, Argument] = {
        "q": Slot(read.q.name, dtype),
        "k_cache": Slot(read.k.name, dtype),
        "v_cache": Slot(read.v.name, dtype),
        "k_new": Slot(k_new, dtype, aligned=new is None),
        "v_new": Slot(v_new, dtype, aligned=new is None),
        "positions": Slot(read.positions.name, read.positions.type.dtype, aligned=False),
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
        "KV_HEADS": Constant(kv_heads),
        "GROUP": Constant(heads // kv_heads),
        "HEAD_DIM": Constant(head_dim),
        "SCALE": Constant(head_dim**-0.5 if read.scale is None else float(read.scale)),
        "WINDOW": Constant(read.window or 0),
        "SOFTCAP": Constant(float(read.softcap or 0.0)),
        "APPEND": Constant(new is not None),
        "SPLITS": Constant(splits),
        "BLOCK_G": Constant(max(16, _power_of_two(heads // kv_heads))),
        "BLOCK_N": Constant(block_n),
        "BLOCK_D": Constant(max(16, _power_of_two(head_dim))),
        "PRECISION": Constant("ieee" if dtype == "float32" else "tf32"),
        "PDL": Constant(bool(config["pdl"])),
    }
    for name, place in (("partial_out", "ws0"), ("partial_max", "ws1"), ("partial_sum", "ws2")):
        # With one split nothing is partial: the result's own pointer fills the place.
        arguments[name] = Slot(place, "float32") if splits > 1 else arguments["out"]
    return _launches(read, config, arguments, batch)


def _launches(read: AttentionForm, config: _Values, arguments: dict[str, Argument], batch: str) -> KernelPlan:
    from tune_model.tune.triton.kernels import decode_attention

    heads, kv_heads, head_dim = _known(read.q, 1), _known(read.k, 1), _known(read.q, 3)
    splits = int(config["splits"])
    pdl = bool(config["pdl"])
    options = Options(int(config["num_warps"]), int(config["num_stages"]), programmatic=pdl)
    launches = [Launch(decode_attention.attend, arguments, (splits, kv_heads, batch), options)]
    workspaces: tuple[Workspace, ...] = ()
    if splits > 1:
        names = ("partial_out", "partial_max", "partial_sum", "positions", "out", "positions_stride_b")
        shared = {name: arguments[name] for name in (*names, "out_stride_b", "out_stride_h", "HEAD_DIM", "WINDOW")}
        shared |= {name: arguments[name] for name in ("SPLITS", "BLOCK_N", "BLOCK_D", "PDL")}
        shared |= {"HEADS": Constant(heads), "BLOCK_S": Constant(_power_of_two(splits))}
        warps = 4 if splits * head_dim >= 4096 else 1
        launches.append(
            Launch(decode_attention.combine, shared, (heads, batch, 1), Options(warps, 1, programmatic=pdl))
        )
        rows = f"{batch}*{heads * splits}"
        workspaces = (
            Workspace("ws0", "float32", f"{rows}*{head_dim}"),
            Workspace("ws1", "float32", rows),
            Workspace("ws2", "float32", rows),
        )
    return KernelPlan(tuple(launches), workspaces, (), _requirements(read))


def _requirements(read: AttentionForm) -> tuple[Requirement, ...]:
    fixed = [(read.q, 1), (read.q, 2), (read.q, 3), (read.k, 1)]
    sizes = [Within(f"{p.name}.size{axis}", _known(p, axis), _known(p, axis)) for p, axis in fixed]
    names = [read.q.name, read.k.name, read.v.name, read.out.name, *(_new_tokens(read) or ())]
    return (*sizes, *(Within(f"{name}.stride3", 1, 1) for name in names))


FAMILY = TritonDecodeAttention()
