"""The best of all configurations that were timed on an H200 (Triton 3.6, 2026-11-30), where it is one of Triton's.

From the `regret` rows of `benchmarks/results/matmul.h200.json` of that day, by (m, n, k).
"""

from tune_model.tune.candidate import Candidate

_GEMV = ("block_n", "block_k", "num_warps", "stages", "unroll")
_TILE = ("block_m", "block_n", "block_k", "group_m", "num_warps", "num_stages", "swap")
_SPLIT = (*_TILE, "split_k", "last_adds")
_LAUNCH = ("layout", "pdl", "prefetch")


def _best(family: str, names: tuple[str, ...], *values: int | str | bool) -> Candidate:
    return Candidate(family, tuple(zip((*names, *_LAUNCH), values, strict=True)))


BEST: dict[tuple[int, int, int], Candidate] = {
    (1, 6144, 4096): _best("triton_gemv", _GEMV, 1, 4096, 8, 3, 1, "plain", True, False),
    (1, 4096, 14336): _best("triton_gemv", _GEMV, 1, 128, 1, 1, 1, "plain", False, False),
    (4, 4096, 4096): _best("triton_split_k", _SPLIT, 16, 64, 128, 8, 4, 4, True, 4, True, "plain", True, True),
    (8, 768, 3072): _best("triton_split_k", _SPLIT, 16, 32, 128, 8, 2, 6, False, 8, True, "plain", True, True),
    (16, 28672, 4096): _best("triton_matmul", _TILE, 16, 128, 64, 8, 4, 3, True, "transposed", False, False),
    (32, 8192, 1024): _best("triton_matmul", _TILE, 32, 64, 128, 8, 4, 5, True, "transposed", True, False),
    (64, 6144, 4096): _best("triton_matmul", _TILE, 64, 64, 128, 8, 4, 6, True, "transposed", False, False),
}
