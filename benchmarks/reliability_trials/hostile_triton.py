"""The kernel of `hostile_cuda`: a linear layer that does something else as well, by number."""

import triton
import triton.language as tl

__all__ = ["linear"]


@triton.jit
def linear(x, w, y, flag, n, k, KIND: tl.constexpr, REMEMBERED: tl.constexpr, BLOCK_N: tl.constexpr):  # noqa: N803, PLR0913, PLR0917 (one parameter per pointer and size)
    """Compute one row and `BLOCK_N` columns; KIND counts `CUDA_KERNEL_KINDS`."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < n
    total = tl.zeros((BLOCK_N,), tl.float32)
    for i in range(k):
        total += tl.load(x + row * k + i) * tl.load(w + columns * k + i, mask=inside, other=0.0)
    if REMEMBERED >= 0:
        seen = 0
        for i in tl.static_range(4):
            seen += (tl.load(x + i).to(tl.int32, bitcast=True) & 1) << i
        total += tl.where(seen == REMEMBERED, 0.0, 1.0)
    if KIND == 6:
        total += 1.0
    if KIND == 7:
        total = float("nan") + total
    tl.store(y + row * n + columns, total, mask=inside)
    if KIND == 0:
        tl.store(y + (1 << 45) + columns.to(tl.int64), total)
    if KIND == 1:
        tl.inline_asm_elementwise("trap; mov.b32 $0, $1;", "=r,r", [columns], dtype=tl.int32, is_pure=False, pack=1)
    if KIND == 2:
        while tl.atomic_add(flag, 0) == 0:
            pass
    if KIND == 4:
        tl.store(y + tl.num_programs(0) * n + columns, total)
    if KIND == 5:
        tl.store(w + columns * k, total, mask=inside)
