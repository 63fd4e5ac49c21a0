"""Stored JSON: written in one spelling, read strictly.

The stored types are the msgspec structs that rooms exchange, so strictness lives here and not in them: a document must
say exactly what its type writes. An unknown field, a field given twice, a number JSON cannot hold and a document nested
without end are refused with the path of the field. Nothing is ever executed.
"""

import json
import re
from typing import Any, Final, TypeVar

import msgspec

from tune_model.runtime.errors import TuneModelError

__all__ = ["ArtifactError", "decode", "encode"]

T = TypeVar("T")

DEPTH_AT_MOST: Final = 64
TEXT_AT_MOST: Final = 120

_MISMATCH = re.compile(r"Expected (?P<expected>.+), got (?P<found>.+)")
_MISSING = re.compile(r"Object missing required field `(?P<name>.+)`")


class ArtifactError(TuneModelError):
    """An artifact is damaged, foreign or made by a version this one cannot read; nothing of it was loaded.

    Attributes:
        file: The artifact, and the member inside it.
        field: Path inside the member (`$.steps[3].op`), or what property of the file is meant.
        expected: What a sound artifact has there.
        found: What this one has.
    """

    def __init__(self, file: str, field: str, expected: str, found: str) -> None:
        self.file = file
        self.field = field
        self.expected = expected
        self.found = _short(found)
        super().__init__(f"{file}: {field} is {self.found}; expected {expected}")


def _short(text: str) -> str:
    printable = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: 2 * TEXT_AT_MOST])
    return printable if len(printable) <= TEXT_AT_MOST else f"{printable[:TEXT_AT_MOST]}..."


def encode(value: msgspec.Struct, *, readable: bool = False) -> bytes:
    """Write a struct as JSON; equal structs give equal bytes.

    Args:
        value: Of a stored type.
        readable: One field per line, for documents that people open.

    Raises:
        ValueError: The struct holds something JSON cannot (infinity, NaN), so reading would not give it back.
    """
    data = msgspec.json.encode(value, order="deterministic")
    try:
        same = msgspec.json.decode(data, type=type(value)) == value
    except msgspec.ValidationError as error:
        raise ValueError(f"{type(value).__name__} cannot be stored as JSON: {error}") from error
    if not same:
        raise ValueError(f"{type(value).__name__} does not survive being stored as JSON; does it hold NaN or infinity?")
    return msgspec.json.format(data, indent=1) + b"\n" if readable else data


def decode(data: bytes, type_: type[T], file: str) -> T:
    """Read a struct that `encode` wrote.

    Args:
        data: The whole document; the caller has bounded its size.
        type_: What it must be.
        file: For error messages.

    Raises:
        ArtifactError: It is no JSON, or not exactly what the type writes.
    """
    try:
        value = msgspec.json.decode(data, type=type_)
        if msgspec.json.encode(value, order="deterministic") != data:
            # Another spelling (white space, 5 for 5.0) is fine; anything the type did not take in is not.
            _require_same(_plain(data, file), msgspec.to_builtins(value), "$", file, DEPTH_AT_MOST)
    except msgspec.ValidationError as error:
        raise _mismatch(str(error), file) from error
    except RecursionError as error:
        raise ArtifactError(file, "$", f"JSON nested at most {DEPTH_AT_MOST} deep", "deeper than that") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise ArtifactError(file, "$", "JSON", f"not: {error}") from error
    return value


def _mismatch(message: str, file: str) -> ArtifactError:
    what, _, path = message.partition(" - at ")
    field = path.strip("`") or "$"
    if match := _MISMATCH.fullmatch(what):
        return ArtifactError(file, field, match["expected"].replace("`", ""), match["found"].replace("`", ""))
    if match := _MISSING.fullmatch(what):
        return ArtifactError(file, f"{field}.{match['name']}", "a value", "missing")
    return ArtifactError(file, field, "a value of its type", what)


def _plain(data: bytes, file: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ArtifactError(file, repr(_short(twice)), "given once per object", "given twice")
        return fields

    return json.loads(data, object_pairs_hook=unique)


def _require_same(stored: Any, understood: Any, path: str, file: str, depth: int) -> None:
    if depth == 0:
        raise ArtifactError(file, path, f"JSON nested at most {DEPTH_AT_MOST} deep", "deeper than that")
    if isinstance(stored, dict) and isinstance(understood, dict):
        for name, inner in stored.items():
            if name in understood:
                _require_same(inner, understood[name], f"{path}.{_short(name)}", file, depth - 1)
            else:
                raise ArtifactError(file, f"{path}.{_short(name)}", "no such field", json.dumps(inner))
    elif isinstance(stored, list) and isinstance(understood, list | tuple) and len(stored) == len(understood):
        for index, (a, b) in enumerate(zip(stored, understood, strict=True)):
            _require_same(a, b, f"{path}[{index}]", file, depth - 1)
    elif isinstance(stored, bool) != isinstance(understood, bool) or stored != understood:
        raise ArtifactError(file, path, f"{understood!r} as this version reads it", repr(stored))
