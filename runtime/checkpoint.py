"""Where weights come from: a module, a mapping, or safetensors on disk, behind one small interface.

Files are read tensor by tensor straight into memory that torch owns: nothing is mapped, so loading a model needs little
more than the model, and every tensor starts at an address that kernels like.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor, nn

from tune_model.runtime.errors import TuneModelError

__all__ = ["Checkpoint", "CheckpointError", "WeightSource", "open_checkpoint"]

WeightSource = nn.Module | Mapping[str, Tensor] | str | Path
"""A module, a state dict, or a path to a safetensors file or a folder of them."""

_HEADER_AT_MOST = 100 * 1024 * 1024

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class CheckpointError(TuneModelError):
    """Weights cannot be read: a missing file, a damaged header, a tensor beyond the end of its file."""


class Checkpoint(Protocol):
    """Tensors by name."""

    def names(self) -> Iterator[str]:
        """Return every name."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        ...

    def read(self, name: str) -> Tensor:
        """Return a tensor, wherever it is; not to be written to."""
        ...


class _Tensors:
    """A state dict."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> Tensor:
        return self._tensors[name].detach()


class _Entry(msgspec.Struct, frozen=True):
    """One tensor in a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Files:
    """Safetensors files."""

    def __init__(self, paths: list[Path]) -> None:
        self._tensors: dict[str, tuple[Path, int, _Entry]] = {}
        for path in paths:
            start, entries = _read_header(path)
            self._tensors.update((name, (path, start, entry)) for name, entry in entries.items())

    def names(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name][2].shape

    def read(self, name: str) -> Tensor:
        path, start, entry = self._tensors[name]
        begin, end = entry.data_offsets
        buffer = torch.empty(end - begin, dtype=torch.uint8)
        with path.open("rb", buffering=0) as file:
            file.seek(start + begin)
            view = buffer.numpy().data
            done = 0
            while done < len(view) and (count := file.readinto(view[done:])):
                done += count
        if done != len(view):
            raise CheckpointError(
                f"{path}: tensor {name!r} ends after {done} of {len(view)} bytes; the file is cut off"
            )
        return buffer.view(_DTYPES[entry.dtype]).view(entry.shape)


def _read_header(path: Path) -> tuple[int, dict[str, _Entry]]:
    """Return where the data starts and what is there."""
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(_HEADER_AT_MOST, size_bytes - 8):
                raise CheckpointError(f"{path}: not a safetensors file (header of {length} bytes in {size_bytes})")
            raw = json.loads(file.read(length))
            entries = msgspec.convert({k: v for k, v in raw.items() if k != "__metadata__"}, dict[str, _Entry])
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (ValueError, AttributeError, msgspec.ValidationError) as error:
        raise CheckpointError(f"{path}: damaged safetensors header: {error}") from error
    start = 8 + length
    for name, entry in entries.items():
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise CheckpointError(f"{path}: tensor {name!r} has dtype {entry.dtype!r}; known: {', '.join(_DTYPES)}")
        begin, end = entry.data_offsets
        if min(entry.shape, default=0) < 0 or end - begin != math.prod(entry.shape) * dtype.itemsize or begin < 0:
            raise CheckpointError(f"{path}: tensor {name!r} {entry.dtype} {list(entry.shape)} lies at {begin} to {end}")
        if start + end > size_bytes:
            raise CheckpointError(f"{path}: tensor {name!r} ends at {start + end}; the file has {size_bytes} bytes")
    return start, entries


def _files_of(path: Path) -> list[Path]:
    """Return the safetensors files that a path stands for."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such file or folder; expected safetensors weights")
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(msgspec.json.decode(index.read_bytes())["weight_map"].values())
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index}: expected an object with a weight_map: {error}") from error
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise CheckpointError(f"{index}: weight_map names files outside its folder")
        return [path / name for name in sorted(names)]
    files = (
        [path / "model.safetensors"] if (path / "model.safetensors").is_file() else sorted(path.glob("*.safetensors"))
    )
    if not files:
        raise CheckpointError(f"{path}: holds no safetensors file")
    return files


def open_checkpoint(source: WeightSource) -> Checkpoint:
    """Make one interface of whatever weights come from.

    Args:
        source: A module (tied parameters are found under each of their names), a state dict, or a path.

    Raises:
        CheckpointError: The path holds no readable safetensors.
    """
    if isinstance(source, nn.Module):
        tensors: dict[str, Tensor] = dict(source.named_buffers(remove_duplicate=False))
        tensors.update(source.named_parameters(remove_duplicate=False))
        return _Tensors(tensors)
    if isinstance(source, str | Path):
        return _Files(_files_of(Path(source)))
    return _Tensors(source)
