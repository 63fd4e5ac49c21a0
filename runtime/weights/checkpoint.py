"""Where weights come from: a module, a mapping, or safetensors on disk, behind one small interface.

Files are read tensor by tensor straight into memory that torch owns, on the device or on the way there: nothing is
mapped, so loading a model needs little more than the model, and every tensor starts at an address that kernels like.
"""

import io
import json
import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor, nn

from tune_model.runtime.errors import TuneModelError

__all__ = ["STORED_DTYPES", "Checkpoint", "CheckpointError", "Scratch", "WeightSource", "open_checkpoint"]

WeightSource = nn.Module | Mapping[str, Tensor] | str | Path
"""A module, a state dict, or a path to a safetensors file or a folder of them."""

_HEADER_AT_MOST = 100 * 1024 * 1024

_STAGED = 32 * 1024 * 1024
"""Bytes that travel to a device at once."""

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
    "C64": torch.complex64,
}
STORED_DTYPES = frozenset(str(dtype).removeprefix("torch.") for dtype in _DTYPES.values())
"""Torch's names of the dtypes that safetensors, and so artifacts, can hold."""


class CheckpointError(TuneModelError):
    """Weights cannot be read: a missing file, a damaged header, a tensor beyond the end of its file."""


class Scratch:
    """Memory for one tensor at a time, used again and again.

    Loading a model asks for a temporary of nearly every weight's size; freeing each would leave holes between the
    weights that malloc cannot use for the next (measured: a quarter of the model).

    Args:
        device: Where.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor, valid until the next is taken."""
        size_bytes = math.prod(shape) * dtype.itemsize
        if self._memory.shape[0] < size_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8, device=self.device)
            self._memory = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        return self._memory[:size_bytes].view(dtype).view(shape)


class Checkpoint(Protocol):
    """Tensors by name."""

    def names(self) -> Iterator[str]:
        """Return every name."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype without reading it."""
        ...

    def held(self, name: str) -> Tensor | None:
        """Return the tensor itself where it is in memory already; not to be written to."""
        ...

    def read(self, name: str) -> Tensor:
        """Return a tensor, wherever it is; not to be written to."""
        ...

    def copy_to(self, name: str, target: Tensor) -> None:
        """Copy a tensor into memory of its shape, on any device, converting its dtype."""
        ...


class _Tensors:
    """A state dict."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def held(self, name: str) -> Tensor | None:
        return self._tensors[name]

    def read(self, name: str) -> Tensor:
        return self._tensors[name].detach()

    def copy_to(self, name: str, target: Tensor) -> None:
        target.copy_(self._tensors[name].detach())


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
        self._scratch = Scratch(torch.device("cpu"))
        self._staging: list[Tensor] | None = None
        self._travelled: list[torch.cuda.Event] = []

    def names(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name][2].shape

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[self._tensors[name][2].dtype]

    def held(self, name: str) -> Tensor | None:
        return None

    def read(self, name: str) -> Tensor:
        tensor = torch.empty(self.shape(name), dtype=self.dtype(name))
        self._read_into(name, tensor)
        return tensor

    def copy_to(self, name: str, target: Tensor) -> None:
        if target.dtype != self.dtype(name) or not target.is_contiguous():
            source = self._scratch.take(self.shape(name), self.dtype(name))
            self._read_into(name, source)
            target.copy_(source)
        elif target.device.type == "cpu":
            self._read_into(name, target)
        else:
            self._stream_into(name, target)

    def _read_into(self, name: str, target: Tensor) -> None:
        with self._open(name) as (file, size_bytes):
            self._fill(name, file, _bytes_of(target), 0, size_bytes)

    def _stream_into(self, name: str, target: Tensor) -> None:
        """Copy through two pinned buffers: one is filled from the file while the other travels to the device."""
        if self._staging is None:
            self._staging = [torch.empty(_STAGED, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self._travelled = [torch.cuda.Event() for _ in range(2)]
        flat = _bytes_of(target)
        stream = torch.cuda.current_stream(target.device)
        with self._open(name) as (file, size_bytes):
            for done in range(0, size_bytes, _STAGED):
                self._staging.reverse()
                self._travelled.reverse()
                part = self._staging[0][: min(_STAGED, size_bytes - done)]
                self._travelled[0].synchronize()
                self._fill(name, file, part, done, size_bytes)
                flat[done : done + part.shape[0]].copy_(part, non_blocking=True)
                self._travelled[0].record(stream)

    @contextmanager
    def _open(self, name: str) -> Iterator[tuple[io.RawIOBase, int]]:
        path, start, entry = self._tensors[name]
        begin, end = entry.data_offsets
        with path.open("rb", buffering=0) as file:
            file.seek(start + begin)
            yield file, end - begin

    def _fill(self, name: str, file: io.RawIOBase, part: Tensor, before: int, size_bytes: int) -> None:
        view = part.numpy().data
        done = 0
        while done < len(view) and (count := file.readinto(view[done:])):
            done += count
        if done != len(view):
            path = self._tensors[name][0]
            raise CheckpointError(
                f"{path}: tensor {name!r} ends after {before + done} of {size_bytes} bytes; the file is cut off"
            )


def _bytes_of(tensor: Tensor) -> Tensor:
    """See a contiguous tensor as bytes."""
    return tensor.view(-1).view(torch.uint8) if tensor.dim() else tensor.view(1).view(torch.uint8)


def _read_header(path: Path) -> tuple[int, dict[str, _Entry]]:
    """Return where the data starts and what is there."""
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(_HEADER_AT_MOST, size_bytes - 8):
                seen = f"not a safetensors file (header of {length} bytes in {size_bytes})"
                raise CheckpointError(f"{path}: {seen}; save other formats with safetensors.torch.save_file first")
            raw = json.loads(file.read(length))
            entries = msgspec.convert({k: v for k, v in raw.items() if k != "__metadata__"}, dict[str, _Entry])
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (ValueError, AttributeError, RecursionError, msgspec.ValidationError) as error:
        raise CheckpointError(f"{path}: damaged safetensors header: {error}") from error
    start = 8 + length
    for name, entry in entries.items():
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise CheckpointError(f"{path}: tensor {name!r} has dtype {entry.dtype!r}; known: {', '.join(_DTYPES)}")
        begin, end = entry.data_offsets
        expected = math.prod(entry.shape) * dtype.itemsize
        if min(entry.shape, default=0) < 0 or end - begin != expected or begin < 0:
            seen = f"tensor {name!r} {entry.dtype} {list(entry.shape)} lies at {begin} to {end}"
            raise CheckpointError(f"{path}: {seen}; expected {expected} bytes from 0 on")
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
        except (msgspec.DecodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
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
        CheckpointError: It is of another kind, or the path holds no readable safetensors.
    """
    if isinstance(source, nn.Module):
        tensors: dict[str, Tensor] = dict(source.named_buffers(remove_duplicate=False))
        tensors.update(source.named_parameters(remove_duplicate=False))
        return _Tensors(tensors)
    if isinstance(source, str | Path):
        return _Files(_files_of(Path(source)))
    given: object = source  # whatever the caller gave
    if not isinstance(given, Mapping):
        raise CheckpointError(f"weights is a {type(given).__name__}; expected a module, a state dict or a path")
    other = next((name for name, value in given.items() if not isinstance(value, Tensor)), None)
    if other is not None:
        raise CheckpointError(f"weights[{other!r}] is a {type(given[other]).__name__}; expected a tensor")
    return _Tensors(source)
