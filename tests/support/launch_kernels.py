"""Triton kernels for the launcher's tests, compiled ahead of time: nothing here runs Triton's own launcher."""

import hashlib
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language.extra import cuda as tlc


@triton.jit
def add_scaled(x, y, out, n, scale, block: tl.constexpr):
    i = tl.program_id(0) * block + tl.arange(0, block)
    inside = i < n
    tl.store(out + i, tl.load(x + i, mask=inside) + scale * tl.load(y + i, mask=inside), mask=inside)


@triton.jit
def add_scaled_programmatic(x, y, out, n, scale, block: tl.constexpr):
    """Starts before its predecessor has finished and waits for it itself."""
    i = tl.program_id(0) * block + tl.arange(0, block)
    inside = i < n
    tlc.gdc_launch_dependents()
    tlc.gdc_wait()
    tl.store(out + i, tl.load(x + i, mask=inside) + scale * tl.load(y + i, mask=inside), mask=inside)


@triton.jit
def multiply(a, b, c, m, n, k, block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr):  # noqa: PLR0917
    """c = a @ b.T with enough stages to need more than 48 KB of shared memory."""
    rows = tl.program_id(0) * block_m + tl.arange(0, block_m)
    columns = tl.program_id(1) * block_n + tl.arange(0, block_n)
    inner = tl.arange(0, block_k)
    total = tl.zeros((block_m, block_n), tl.float32)
    for start in range(0, k, block_k):
        at = start + inner
        left = tl.load(a + rows[:, None] * k + at[None, :], mask=(rows[:, None] < m) & (at[None, :] < k), other=0.0)
        right = tl.load(
            b + columns[None, :] * k + at[:, None], mask=(columns[None, :] < n) & (at[:, None] < k), other=0.0
        )
        total = tl.dot(left, right, total)
    tl.store(c + rows[:, None] * n + columns[None, :], total, mask=(rows[:, None] < m) & (columns[None, :] < n))


def build(
    function: Any, signature: dict[str, str], arch: int, options: dict[str, Any], **constants: int
) -> tuple[str, bytes, Any]:
    """Compile for `arch`; return the cubin's hash, the cubin and its metadata. 16-byte alignment is promised."""
    names = list(function.arg_names)
    divisible = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature.get(n, "")[:1] == "*"}
    source = ASTSource(
        function,
        {name: signature.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        divisible,
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    cubin = compiled.asm["cubin"]
    return hashlib.sha256(cubin).hexdigest(), cubin, compiled.metadata
