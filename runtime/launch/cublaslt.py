"""Call cuBLASLt with an algorithm that was chosen before: through ctypes, in the copy of the library that torch uses.

An algorithm is stored by the values of its attributes, never by its place in a list, and means the same kernel only in
the library version it was chosen with. Sizes, layouts and the algorithm are settled when a step is prepared; a call
fills in addresses, workspace and torch's current stream. Values of enumerations are those of `cublasLt.h`.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec
import torch

from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.execution.invoke import PreparedStep, Slots
from tune_model.runtime.kernel import LibraryAlgorithm

__all__ = ["ALIGNMENT", "CublasLt", "CublasLtError", "Places", "Problem", "installed_version", "open_cublaslt"]

_STATUSES: Final = {
    1: "CUBLAS_STATUS_NOT_INITIALIZED",
    3: "CUBLAS_STATUS_ALLOC_FAILED",
    7: "CUBLAS_STATUS_INVALID_VALUE",
    8: "CUBLAS_STATUS_ARCH_MISMATCH",
    11: "CUBLAS_STATUS_MAPPING_ERROR",
    13: "CUBLAS_STATUS_EXECUTION_FAILED",
    14: "CUBLAS_STATUS_INTERNAL_ERROR",
    15: "CUBLAS_STATUS_NOT_SUPPORTED",
    16: "CUBLAS_STATUS_LICENSE_ERROR",
}
_TYPES: Final = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType_t
_COMPUTE_FLOAT32: Final = 68
_COMPUTE_TF32: Final = 77
_EPILOGUE_DEFAULT, _EPILOGUE_BIAS = 1, 4
_DESC_TRANSPOSE_A, _DESC_TRANSPOSE_B, _DESC_EPILOGUE, _DESC_BIAS_POINTER = 3, 4, 7, 8
_PREFER_WORKSPACE_BYTES: Final = 1
_PREFER_REDUCTIONS: Final = 3
_PREFER_ALIGNMENTS: Final = (5, 6, 7, 8)  # of A, B, C and D

_REDUCE_IN_COMPUTE_TYPE: Final = 2
"""Parts of a split K stay float32 until they are added. The other schemes add them, or keep them, in the result's type
(cublasLtReductionScheme_t), which costs all its accuracy where they cancel."""

ALIGNMENT: Final = 16
"""Bytes that every operand's address must be a multiple of: what algorithms are searched and checked for."""

# Attribute of cublasLtMatmulAlgo_t and its width in bytes; the id is given when an algorithm is made.
_ALGORITHM_FIELDS: Final = {
    "tile": (1, 4),
    "split_k": (2, 4),
    "reduction": (3, 4),
    "swizzle": (4, 4),
    "custom": (5, 4),
    "stages": (6, 4),
    "inner_shape": (7, 2),
    "cluster_shape": (8, 2),
}
_ALGORITHM_ID: Final = (0, 4)


class CublasLtError(TuneModelError):
    """cuBLASLt is missing, or refused a call; the message holds the problem and the status by its name."""


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t: opaque."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Problem(msgspec.Struct, frozen=True):
    """A product of two matrices with all sizes settled: `result[m, n] = a[m, k] @ b[k, n] + bias[n]`.

    Attributes:
        m: Rows of `a` and the result.
        n: Columns of `b` and the result.
        k: Length of the dot products.
        a_stride: Elements from one row of `a` to the next; with `a_by_columns` from one column to the next.
        b_stride: Elements from one row of `b` to the next; with `b_by_columns` from one column to the next.
        result_stride: Elements from one row of the result to the next.
        dtype: Of all operands; sums are float32.
        a_by_columns: Elements of a column of `a` are adjacent.
        b_by_columns: Elements of a column of `b` are adjacent, as in a linear layer's weight [n, k].
        tf32: float32 operands may be rounded to tf32.
        bias: A vector of `n` is added.
    """

    m: int
    n: int
    k: int
    a_stride: int
    b_stride: int
    result_stride: int
    dtype: str
    a_by_columns: bool = False
    b_by_columns: bool = False
    tf32: bool = False
    bias: bool = False

    def __str__(self) -> str:
        a, b = ("by columns" if turned else "by rows" for turned in (self.a_by_columns, self.b_by_columns))
        sums = "tf32" if self.dtype == "float32" and self.tf32 else "float32"
        strides = f"strides {self.a_stride}, {self.b_stride}, {self.result_stride}"
        bias = ", bias" if self.bias else ""
        return f"{self.dtype} m={self.m} n={self.n} k={self.k} (a {a}, b {b}, {strides}, {sums} products{bias})"


class _Descriptors(NamedTuple):
    """Handles of one problem; the library works by columns, so it is told the transposed product, b first."""

    product: ctypes.c_void_p
    b: ctypes.c_void_p
    a: ctypes.c_void_p
    result: ctypes.c_void_p


class Places(NamedTuple):
    """Indices in a slot list of what a product reads and writes."""

    a: int
    b: int
    result: int
    bias: int | None = None
    workspace: int | None = None


class _Call:
    """What one call in flight owns: descriptors hold the bias's address, so concurrent calls cannot share them.

    Args:
        library: Made the descriptors.
        descriptors: Released with this.
    """

    __slots__ = ("_library", "bias", "descriptors")

    def __init__(self, library: "CublasLt", descriptors: _Descriptors) -> None:
        self._library = library
        self.descriptors = descriptors
        self.bias = 0

    def __del__(self) -> None:
        self._library.release(self.descriptors)


class CublasLt:
    """cuBLASLt on one device.

    Args:
        library: libcublasLt, or a stand-in for tests.
        current_stream: Gives the handle of torch's current stream on a device.
        device: Index; must be torch's current device while this is made.
    """

    def __init__(self, library: Any, current_stream: Callable[[int], int], device: int) -> None:
        self.library = library
        self.device = device
        self._current_stream = current_stream
        self._handle = ctypes.c_void_p()
        self.check(library.cublasLtCreate(ctypes.byref(self._handle)), "cublasLtCreate")

    def check(self, status: int, doing: str) -> None:
        """Raise when the library refused.

        Args:
            status: Of a call; 0 is success.
            doing: The function and, where there is one, the problem.

        Raises:
            CublasLtError: With the status by its name.
        """
        if status != 0:
            raise CublasLtError(f"{doing}: {_STATUSES.get(status, 'unknown status')} ({status})")

    def describe(self, problem: Problem) -> _Descriptors:
        """Make the library's descriptors of a problem; the caller releases them.

        Raises:
            CublasLtError: It takes no such problem; what was made of it is released.
        """
        compute = _COMPUTE_TF32 if problem.dtype == "float32" and problem.tf32 else _COMPUTE_FLOAT32
        product = ctypes.c_void_p()
        made = self.library.cublasLtMatmulDescCreate(ctypes.byref(product), compute, _TYPES["float32"])
        self.check(made, f"cublasLtMatmulDescCreate for {problem}")
        with ExitStack() as undo:
            undo.callback(self.library.cublasLtMatmulDescDestroy, product)
            self._set(product, _DESC_TRANSPOSE_A, ctypes.c_int32(int(problem.b_by_columns)), problem)
            self._set(product, _DESC_TRANSPOSE_B, ctypes.c_int32(int(problem.a_by_columns)), problem)
            if problem.bias:
                self._set(product, _DESC_EPILOGUE, ctypes.c_int32(_EPILOGUE_BIAS), problem)
            b_shape = (problem.k, problem.n) if problem.b_by_columns else (problem.n, problem.k)
            a_shape = (problem.m, problem.k) if problem.a_by_columns else (problem.k, problem.m)
            matrices = []
            for rows, columns, stride in (
                (*b_shape, problem.b_stride),
                (*a_shape, problem.a_stride),
                (problem.n, problem.m, problem.result_stride),
            ):
                matrices.append(self._matrix(problem, rows, columns, stride))
                undo.callback(self.library.cublasLtMatrixLayoutDestroy, matrices[-1])
            undo.pop_all()
        return _Descriptors(product, *matrices)

    def release(self, descriptors: _Descriptors) -> None:
        """Free descriptors."""
        self.library.cublasLtMatmulDescDestroy(descriptors.product)
        for matrix in descriptors[1:]:
            self.library.cublasLtMatrixLayoutDestroy(matrix)

    def _matrix(self, problem: Problem, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
        matrix = ctypes.c_void_p()
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(stride)
        made = self.library.cublasLtMatrixLayoutCreate(ctypes.byref(matrix), _TYPES[problem.dtype], *sizes)
        self.check(made, f"cublasLtMatrixLayoutCreate of {rows} x {columns} for {problem}")
        return matrix

    def _set(self, product: ctypes.c_void_p, attribute: int, value: Any, problem: Problem) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        found = self.library.cublasLtMatmulDescSetAttribute(product, attribute, ctypes.byref(value), size)
        if found:  # the bias's address is set between calls, where text would cost more than the setting
            self.check(found, f"cublasLtMatmulDescSetAttribute {attribute} for {problem}")

    def search(self, problem: Problem, *, workspace_bytes: int, at_most: int) -> list[tuple[LibraryAlgorithm, int]]:
        """Ask the library which algorithms suit a problem, but for those that round the parts of a split K.

        Args:
            problem: What to compute.
            workspace_bytes: Most scratch memory an algorithm may ask for.
            at_most: How many to return.

        Returns:
            Algorithms with the workspace each needs, the one that the library would take first.
        """
        results = (_Found * at_most)()
        count = ctypes.c_int()
        with self._described(problem) as made, self._preference(workspace_bytes) as preference:
            status = self.library.cublasLtMatmulAlgoGetHeuristic(
                self._handle, *made, made.result, preference, at_most, results, ctypes.byref(count)
            )
        if status != 0:
            return []
        legal = [result for result in results[: count.value] if result.state == 0]
        found = [(self._read(result.algorithm), result.workspace_bytes) for result in legal]
        return [pair for pair in found if pair[0].reduction in {0, _REDUCE_IN_COMPUTE_TYPE}]

    @contextmanager
    def _described(self, problem: Problem) -> Iterator[_Descriptors]:
        made = self.describe(problem)
        try:
            yield made
        finally:
            self.release(made)

    @contextmanager
    def _preference(self, workspace_bytes: int) -> Iterator[ctypes.c_void_p]:
        preference = ctypes.c_void_p()
        made = self.library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference))
        self.check(made, "cublasLtMatmulPreferenceCreate")
        wishes: list[tuple[int, Any]] = [
            (_PREFER_WORKSPACE_BYTES, ctypes.c_uint64(workspace_bytes)),
            (_PREFER_REDUCTIONS, ctypes.c_uint32(_REDUCE_IN_COMPUTE_TYPE)),
        ]
        wishes += [(attribute, ctypes.c_uint32(ALIGNMENT)) for attribute in _PREFER_ALIGNMENTS]
        try:
            for attribute, value in wishes:
                size = ctypes.c_size_t(ctypes.sizeof(value))
                wished = self.library.cublasLtMatmulPreferenceSetAttribute(
                    preference, attribute, ctypes.byref(value), size
                )
                # Without the wish the library would propose what our addresses or sums do not suit.
                self.check(wished, f"cublasLtMatmulPreferenceSetAttribute {attribute} to {value.value}")
            yield preference
        finally:
            self.library.cublasLtMatmulPreferenceDestroy(preference)

    def _read(self, algorithm: _Algorithm) -> LibraryAlgorithm:
        values = {name: self._attribute(algorithm, *field) for name, field in _ALGORITHM_FIELDS.items()}
        return LibraryAlgorithm(self._attribute(algorithm, *_ALGORITHM_ID), **values)

    def _attribute(self, algorithm: _Algorithm, attribute: int, width: int) -> int:
        value, written = ctypes.c_uint32(), ctypes.c_size_t()
        size = ctypes.c_size_t(width)
        status = self.library.cublasLtMatmulAlgoConfigGetAttribute(
            ctypes.byref(algorithm), attribute, ctypes.byref(value), size, ctypes.byref(written)
        )
        self.check(status, f"cublasLtMatmulAlgoConfigGetAttribute {attribute}")
        return value.value

    def _algorithm(self, problem: Problem, made: _Descriptors, wanted: LibraryAlgorithm) -> tuple[_Algorithm, int]:
        """Make an algorithm from its attributes and let the library check it; returns the workspace it needs too."""
        algorithm, checked = _Algorithm(), _Found()
        kind = _TYPES[problem.dtype]
        compute = _COMPUTE_TF32 if problem.dtype == "float32" and problem.tf32 else _COMPUTE_FLOAT32
        kinds = (compute, _TYPES["float32"], kind, kind, kind, kind)
        status = self.library.cublasLtMatmulAlgoInit(self._handle, *kinds, wanted.id, ctypes.byref(algorithm))
        self.check(status, f"cublasLtMatmulAlgoInit of algorithm {wanted.id} for {problem}")
        for name, (attribute, width) in _ALGORITHM_FIELDS.items():
            value = ctypes.c_uint32(getattr(wanted, name))
            size = ctypes.c_size_t(width)
            status = self.library.cublasLtMatmulAlgoConfigSetAttribute(
                ctypes.byref(algorithm), attribute, ctypes.byref(value), size
            )
            doing = f"cublasLtMatmulAlgoConfigSetAttribute {name} to {value.value} of algorithm {wanted.id}"
            self.check(status, f"{doing} for {problem}")
        status = self.library.cublasLtMatmulAlgoCheck(
            self._handle, *made, made.result, ctypes.byref(algorithm), ctypes.byref(checked)
        )
        self.check(status, f"cublasLtMatmulAlgoCheck of {wanted} for {problem}")
        return algorithm, int(checked.workspace_bytes)

    def workspace_bytes(self, problem: Problem, wanted: LibraryAlgorithm) -> int:
        """Return the workspace that an algorithm needs for a problem.

        Raises:
            CublasLtError: It cannot run it.
        """
        if 0 in (problem.m, problem.n, problem.k):
            return 0
        with self._described(problem) as made:
            return self._algorithm(problem, made, wanted)[1]

    def prepare(self, problem: Problem, wanted: LibraryAlgorithm, workspace_bytes: int, places: Places) -> PreparedStep:
        """Prepare a product of tensors in a slot list.

        Args:
            problem: Sizes and layouts.
            wanted: By its attributes.
            workspace_bytes: Size of the workspace that will be given.
            places: Where the tensors are.

        Raises:
            CublasLtError: The library does not know the algorithm, or it cannot run this problem.
        """
        if 0 in (problem.m, problem.n):
            return lambda _: None
        if problem.k == 0:
            return _prepare_empty_sums(problem, places)
        spare = [_Call(self, self.describe(problem))]
        algorithm, _ = self._algorithm(problem, spare[0].descriptors, wanted)
        a, b, result, bias, workspace = places
        matmul, handle, device, stream = self.library.cublasLtMatmul, self._handle, self.device, self._current_stream
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        alpha, beta, chosen = ctypes.byref(one), ctypes.byref(zero), ctypes.byref(algorithm)
        pointer, size = ctypes.c_void_p, ctypes.c_size_t(workspace_bytes)

        def run(slots: Slots) -> None:
            try:
                call = spare.pop()
            except IndexError:
                call = _Call(self, self.describe(problem))
            made = call.descriptors
            if bias is not None and (address := slots[bias].data_ptr()) != call.bias:
                self._set(made.product, _DESC_BIAS_POINTER, ctypes.c_uint64(address), problem)
                call.bias = address
            target = pointer(slots[result].data_ptr())
            status = matmul(
                handle,
                made.product,
                alpha,
                pointer(slots[b].data_ptr()),
                made.b,
                pointer(slots[a].data_ptr()),
                made.a,
                beta,
                target,
                made.result,
                target,
                made.result,
                chosen,
                pointer(0 if workspace is None else slots[workspace].data_ptr()),
                size,
                pointer(stream(device)),
            )
            spare.append(call)
            if status:
                self.check(status, f"cublasLtMatmul {problem}")

        return run


def _prepare_empty_sums(problem: Problem, places: Places) -> PreparedStep:
    """Prepare a product over no elements, which the library refuses: zeros, or the bias."""
    shape, strides = (problem.m, problem.n), (problem.result_stride, 1)

    def run(slots: Slots) -> None:
        result = slots[places.result].as_strided(shape, strides)
        if places.bias is None:
            result.zero_()
        else:
            result.copy_(slots[places.bias].as_strided((problem.n,), (1,)))

    return run


@lru_cache(maxsize=1)
def _load() -> Any:
    """Return the libcublasLt that torch has loaded.

    Raises:
        CublasLtError: There is none.
    """
    major = (torch.version.cuda or "").split(".", maxsplit=1)[0]
    if not major:
        raise CublasLtError(f"torch {torch.__version__} is built without CUDA")
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{major}")
    except OSError as error:
        raise CublasLtError(f"cuBLASLt (libcublasLt.so.{major}) does not load: {error}") from error
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return library


def installed_version() -> int | None:
    """Return cuBLASLt's version as it states it (130200 for 13.2), `None` where there is no cuBLASLt."""
    try:
        return int(_load().cublasLtGetVersion())
    except CublasLtError:
        return None


@lru_cache(maxsize=16)
def open_cublaslt(device: int) -> CublasLt:
    """Return cuBLASLt on a device that torch has used.

    Raises:
        CublasLtError: There is none.
    """
    stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if stream is None:
        raise CublasLtError(f"torch {torch.__version__} is built without CUDA")
    with torch.cuda.device(device):
        torch.empty(1, device="cuda")  # makes the context
        torch.cuda.current_blas_handle()  # loads the library
        return CublasLt(_load(), stream, device)
