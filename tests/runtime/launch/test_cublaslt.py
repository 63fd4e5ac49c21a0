"""What is asked of cuBLASLt, against a stand-in for it; the real library is tested on a GPU."""

import ctypes
import gc
from typing import Any

import msgspec
import pytest
import torch

from tune_model.runtime.kernel import LibraryAlgorithm
from tune_model.runtime.launch.cublaslt import CublasLt, CublasLtError, Places, Problem

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


class RefusingLibrary:
    """Counts what is made and destroyed, and refuses one call of a function."""

    def __init__(self, function: str = "", at: int = 1, status: int = 13) -> None:
        self.function, self.left, self.status = function, at, status
        self.living: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> int:
            if name == self.function:
                self.left -= 1
                if self.left == 0:
                    return self.status
            for end, change in (("Create", 1), ("Destroy", -1)):
                if name.endswith(end):
                    kind = name.removesuffix(end)
                    self.living[kind] = self.living.get(kind, 0) + change
            return 0

        return call

    def opened(self) -> CublasLt:
        made = CublasLt(self, lambda _device: 0, 0)
        self.living.clear()  # the handle stays
        return made


ALGORITHM = LibraryAlgorithm(66)
PLACES = Places(0, 1, 2, 3)


@pytest.mark.parametrize(
    ("function", "at"),
    [
        ("cublasLtMatmulDescCreate", 1),
        ("cublasLtMatmulDescSetAttribute", 1),
        ("cublasLtMatmulDescSetAttribute", 3),
        ("cublasLtMatrixLayoutCreate", 1),
        ("cublasLtMatrixLayoutCreate", 3),
        ("cublasLtMatmulAlgoInit", 1),
        ("cublasLtMatmulAlgoConfigSetAttribute", 2),
        ("cublasLtMatmulAlgoCheck", 1),
    ],
)
def test_what_is_refused_says_what_and_leaves_nothing(function: str, at: int):
    """Descriptors leaked, and the finalizer of a call that was never made raised AttributeError."""
    library = RefusingLibrary(function, at)
    problem = msgspec.structs.replace(PROBLEM, bias=True)
    message = rf"^{function}.* for bfloat16 m=16 n=32 k=64 .*: CUBLAS_STATUS_EXECUTION_FAILED \(13\)$"
    with pytest.raises(CublasLtError, match=message):
        library.opened().prepare(problem, ALGORITHM, 0, PLACES)
    gc.collect()
    assert not any(library.living.values())


def test_a_wish_that_is_refused_is_not_passed_over():
    """Algorithms that need more alignment than tensors have were proposed."""
    library = RefusingLibrary("cublasLtMatmulPreferenceSetAttribute", at=3, status=7)
    with pytest.raises(CublasLtError, match=r"PreferenceSetAttribute 5 to 16: CUBLAS_STATUS_INVALID_VALUE \(7\)"):
        library.opened().search(PROBLEM, workspace_bytes=0, at_most=1)
    assert not any(library.living.values())


def test_a_status_that_is_new_keeps_its_number():
    with pytest.raises(CublasLtError, match=r"^doing: unknown status \(99\)$"):
        RefusingLibrary().opened().check(99, "doing")


@pytest.mark.parametrize("bias", [False, True])
def test_sums_of_nothing_are_zero_or_the_bias(bias: bool):
    """The library refuses k = 0, and nothing was written when it did not."""
    problem = msgspec.structs.replace(PROBLEM, m=2, n=3, k=0, result_stride=3, bias=bias)
    library = RefusingLibrary("cublasLtMatmulAlgoCheck").opened()
    assert library.workspace_bytes(problem, ALGORITHM) == 0
    run = library.prepare(problem, ALGORITHM, 0, Places(0, 1, 2, 3 if bias else None))
    memory = torch.full((4, 3), 7.0)
    added = torch.tensor([1.0, 2.0, 3.0])
    run([torch.empty(2, 0), torch.empty(0, 3), memory[1:3].view(1, 6), added])
    expected = added.expand(2, 3) if bias else torch.zeros(2, 3)
    assert torch.equal(memory[1:3], expected)
    assert bool((memory[[0, 3]] == 7).all())
