"""What is asked of cuBLASLt, against a stand-in for it; the real library is tested on a GPU."""

import ctypes
from typing import Any

from tune_model.runtime.launch.cublaslt import CublasLt, Problem

PROBLEM = Problem(16, 32, 64, 64, 64, 32, "bfloat16", b_by_columns=True)
REDUCTION_MASK, ALIGNMENT_OF_A = 3, 5
"""Of cublasLtMatmulPreferenceAttributes_t."""

REDUCTION = 3
"""Of cublasLtMatmulAlgoConfigAttributes_t."""


class FakeLibrary:
    """Proposes one algorithm for each reduction scheme it is given; whatever else it is asked succeeds."""

    def __init__(self, *reductions: int) -> None:
        self.reductions = reductions
        self.preferences: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0

    def cublasLtMatmulPreferenceSetAttribute(  # noqa: N802 (the library's names)
        self, _preference: Any, attribute: int, value: Any, _size: Any
    ) -> int:
        self.preferences[attribute] = value._obj.value
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> int:  # noqa: N802
        *_, results, count = arguments
        for place, reduction in enumerate(self.reductions):
            results[place].algorithm.data[0] = reduction
        count._obj.value = len(self.reductions)
        return 0

    def cublasLtMatmulAlgoConfigGetAttribute(  # noqa: N802
        self, algorithm: Any, attribute: int, value: Any, _size: ctypes.c_size_t, _written: Any
    ) -> int:
        value._obj.value = algorithm._obj.data[0] if attribute == REDUCTION else 1
        return 0


def test_algorithms_that_round_the_parts_of_a_sum_are_not_asked_for_and_not_taken():
    """In place (1) and in the result's type (4), parts are rounded to bfloat16: where they cancel nothing is left."""
    library = FakeLibrary(0, 1, 2, 4)
    found = CublasLt(library, lambda _device: 0, 0).search(PROBLEM, workspace_bytes=1 << 20, at_most=8)
    assert [algorithm.reduction for algorithm, _ in found] == [0, 2]
    assert library.preferences[REDUCTION_MASK] == 2
    assert library.preferences[ALIGNMENT_OF_A] == 16
