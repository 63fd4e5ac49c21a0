"""safetensors files inside an artifact: written in one order, read in place.

The format is huggingface/safetensors' (8 bytes length, JSON header, data without holes). Its own library reads from a
path only; here the file may lie inside a larger one, and the tensors of embedded weights are used where they lie. Torch
is imported only to make tensors, so that listing an artifact's contents needs none.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from tune_model.package.format.wire import ArtifactError, decode

if TYPE_CHECKING:
    import torch

__all__ = ["DTYPES", "Listed", "element_bytes", "list_tensors", "read_tensors", "tensor_chunks", "tensors_size"]

# safetensors' name, torch's name, bytes per element.
_DTYPES: Final = (
    ("F64", "float64", 8),
    ("F32", "float32", 4),
    ("F16", "float16", 2),
    ("BF16", "bfloat16", 2),
    ("F8_E4M3", "float8_e4m3fn", 1),
    ("F8_E5M2", "float8_e5m2", 1),
    ("C64", "complex64", 8),
    ("I64", "int64", 8),
    ("I32", "int32", 4),
    ("I16", "int16", 2),
    ("I8", "int8", 1),
    ("U64", "uint64", 8),
    ("U32", "uint32", 4),
    ("U16", "uint16", 2),
    ("U8", "uint8", 1),
    ("BOOL", "bool", 1),
)
DTYPES: Final = frozenset(name for _, name, _ in _DTYPES)
"""Torch's names of the dtypes that an artifact may hold."""

_ELEMENT_BYTES: Final = {name: size for _, name, size in _DTYPES}
_FROM_STORED: Final = {stored: (name, size) for stored, name, size in _DTYPES}
_TO_STORED: Final = {name: (stored, size) for stored, name, size in _DTYPES}

HEADER_AT_MOST: Final = 16 << 20
TENSORS_AT_MOST: Final = 200_000
CHUNK: Final = 64 << 20

_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class _Described(msgspec.Struct, frozen=True):
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=32)]
    data_offsets: tuple[_Size, _Size]


class Listed(msgspec.Struct, frozen=True):
    """A tensor in a file.

    Attributes:
        dtype: Torch's name: `bfloat16`.
        shape: Sizes.
        start: Of its data in the file.
        end: Of its data in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def element_bytes(dtype: str) -> int:
    """Return the size of one element of a dtype that an artifact may hold."""
    return _ELEMENT_BYTES[dtype]


def _header(tensors: Mapping[str, "torch.Tensor"]) -> bytes:
    described: dict[str, Any] = {}
    at = 0
    for name in _order(tensors):
        tensor = tensors[name]
        stored, _ = _TO_STORED[str(tensor.dtype).removeprefix("torch.")]
        end = at + tensor.numel() * tensor.element_size()
        described[name] = {"dtype": stored, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-(len(text) + 8) % 64)  # so that the first tensor is as aligned as the file
    return struct.pack("<Q", len(text)) + text


def _order(tensors: Mapping[str, "torch.Tensor"]) -> list[str]:
    """Return names by decreasing element size, so that every tensor is aligned to its own elements."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def tensors_size(tensors: Mapping[str, "torch.Tensor"]) -> int:
    """Return the size in bytes of the file that `tensor_chunks` makes."""
    return len(_header(tensors)) + sum(t.numel() * t.element_size() for t in tensors.values())


def tensor_chunks(tensors: Mapping[str, "torch.Tensor"]) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file; equal tensors give equal bytes.

    One tensor at a time is copied to the CPU, so writing needs memory for the largest one only.

    Raises:
        KeyError: A tensor's dtype has no name in safetensors.
    """
    import torch

    yield _header(tensors)
    for name in _order(tensors):
        tensor = tensors[name].detach().to("cpu").resolve_conj().resolve_neg().contiguous()
        if tensor.numel():
            flat = tensor.reshape(-1).view(torch.uint8).numpy().data
            yield from (flat[at : at + CHUNK] for at in range(0, len(flat), CHUNK))


def list_tensors(buffer: memoryview, file: str) -> dict[str, Listed]:
    """Read and check the header of a safetensors file.

    Args:
        buffer: The whole file, one byte per item.
        file: For error messages.

    Raises:
        ArtifactError: The header is no safetensors header, or does not describe exactly the data that follows.
    """
    total = len(buffer)
    length = struct.unpack("<Q", buffer[:8])[0] if total >= 8 else 0
    if not 2 <= length <= min(total - 8, HEADER_AT_MOST):
        raise ArtifactError(file, "the length of the header", f"2 to {min(total - 8, HEADER_AT_MOST)}", str(length))
    header = bytes(buffer[8 : 8 + length])
    if header.count(b"{") > TENSORS_AT_MOST:
        raise ArtifactError(file, "the number of tensors", f"at most {TENSORS_AT_MOST}", "more")
    described = decode(header, dict[str, _Described], file)
    listed: dict[str, Listed] = {}
    at = start = 8 + length
    for name, tensor in sorted(described.items(), key=lambda item: (item[1].data_offsets, item[0])):
        if tensor.dtype not in _FROM_STORED:
            raise ArtifactError(file, f"$[{name!r}].dtype", f"one of {', '.join(_FROM_STORED)}", repr(tensor.dtype))
        dtype, element = _FROM_STORED[tensor.dtype]
        for size in tensor.shape:
            element *= size
        expected = [at - start, at - start + element]
        if list(tensor.data_offsets) != expected:
            raise ArtifactError(file, f"$[{name!r}].data_offsets", str(expected), str(list(tensor.data_offsets)))
        listed[name] = Listed(dtype, tensor.shape, at, at + element)
        at += element
    if at != total:
        raise ArtifactError(file, "the size", f"{at} bytes, where its last tensor ends", str(total))
    return listed


def read_tensors(buffer: memoryview, listed: Mapping[str, Listed], *, copy: bool) -> dict[str, "torch.Tensor"]:
    """Make tensors of a file's data.

    Args:
        buffer: The whole file.
        listed: From `list_tensors`.
        copy: Give tensors their own memory. Without, they use the buffer's, which must not be written to.
    """
    import warnings

    import torch

    tensors: dict[str, torch.Tensor] = {}
    with warnings.catch_warnings():
        # The buffer may be a read-only map; nobody writes to weights, and constants are copies.
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        for name, tensor in listed.items():
            dtype = getattr(torch, tensor.dtype)
            if tensor.start == tensor.end:
                tensors[name] = torch.empty(tensor.shape, dtype=dtype)
                continue
            data = buffer[tensor.start : tensor.end]
            raw = torch.frombuffer(bytearray(data) if copy else data, dtype=torch.uint8)
            if raw.data_ptr() % dtype.itemsize:
                raw = raw.clone()
            tensors[name] = raw.view(dtype).reshape(tensor.shape)
    return tensors
