"""Which of cuBLASLt's algorithms could compute a product: what the library itself proposes, and variations of these."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import Final

import msgspec

from tune_model.runtime.kernel import LibraryAlgorithm
from tune_model.runtime.launch.cublaslt import CublasLt, CublasLtError, Problem, installed_version, open_cublaslt
from tune_model.tune.machine.cuda import is_offline
from tune_model.tune.target import CudaTarget

__all__ = ["LibraryChoice", "library_version", "proposals", "variations"]

_WORKSPACE_BYTES: Final = 32 << 20
"""What NVIDIA recommends on Hopper; algorithms that split K use it."""

_AT_MOST: Final = 64
_SPLITS: Final = (1, 2, 3, 4, 5, 6, 8, 12, 16)
_REDUCTION: Final = 2
"""In the type that sums have; in place or in the type of the result rounds every part."""


class LibraryChoice(msgspec.Struct, frozen=True):
    """An algorithm and the bytes of workspace it needs for the problem it was found for."""

    algorithm: LibraryAlgorithm
    workspace_bytes: int


def library_version(target: CudaTarget) -> int | None:
    """Return the version of the library that can be asked about a target; `None` where there is no such GPU here."""
    return None if is_offline(target) else installed_version()


@lru_cache(maxsize=4096)
def proposals(problem: Problem) -> tuple[LibraryChoice, ...]:
    """Return what the library proposes on this machine's first GPU, its own favourite first.

    With little workspace it proposes others, so it is asked twice; these follow.
    """
    library = open_cublaslt(0)
    found: dict[LibraryAlgorithm, int] = {}
    for workspace_bytes in (_WORKSPACE_BYTES, 0):
        for algorithm, needed in library.search(problem, workspace_bytes=workspace_bytes, at_most=_AT_MOST):
            found.setdefault(algorithm, needed)
    return tuple(LibraryChoice(algorithm, needed) for algorithm, needed in found.items())


def variations(problem: Problem, at_most: int) -> Iterator[LibraryChoice]:
    """Yield algorithms that the library accepts but did not propose: others' tiles with another order or split of K."""
    library = open_cublaslt(0)
    known = {choice.algorithm for choice in proposals(problem)}

    def legal() -> Iterator[LibraryChoice]:
        for choice in proposals(problem):
            for changed in _changes(choice.algorithm):
                if changed in known:
                    continue
                known.add(changed)
                needed = _needed(library, problem, changed)
                if needed is not None and needed <= _WORKSPACE_BYTES:
                    yield LibraryChoice(changed, needed)

    return islice(legal(), at_most)


def _changes(algorithm: LibraryAlgorithm) -> Iterator[LibraryAlgorithm]:
    for swizzle in (0, 1):
        if swizzle != algorithm.swizzle:
            yield msgspec.structs.replace(algorithm, swizzle=swizzle)
    for splits in _SPLITS:
        if splits != algorithm.split_k:
            yield msgspec.structs.replace(algorithm, split_k=splits, reduction=_REDUCTION if splits > 1 else 0)


def _needed(library: CublasLt, problem: Problem, algorithm: LibraryAlgorithm) -> int | None:
    try:
        return library.workspace_bytes(problem, algorithm)
    except CublasLtError:
        return None
