"""Ways to spoil bytes and JSON documents, drawn from a dice so that a case's number says what it is."""

import contextlib
import json
from collections.abc import Callable
from random import Random
from typing import Any, Final

__all__ = ["hostile_text", "spoil_bytes", "spoil_json", "spoil_text"]

_NUMBERS: Final = (
    -1, 0, 1, 2, 63, 255, 2**31 - 1, 2**31, -(2**31), 2**48, 2**48 + 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63),
    10**30, 10**400, 0.5, -0.0, 1e-320, 1e308, 3.0000000000000004,
)  # fmt: skip

_TEXTS: Final = (
    "", " ", "\0", "\n", "a", "..", "../../etc/passwd", "/etc/passwd", "C:\\x", "manifest.json", "programs/a.json",
    "kernels/" + "0" * 64 + ".so", "%s%n", "{0.__class__}", "{x}", "$(id)", "__import__('os')", "'; drop table x; --",
    "<script>alert(1)</script>", "{{ 7*7 }}", "\u202egnp.exe", "é", "\U0001f600", "batch", "batch*batch", "batch//0",
    "((((batch))))", "-" * 70 + "1", "+".join(["1"] * 300), "min(1,2,3)", "cdiv(1,0)", "a0.size0", "1e9", "NaN", "null",
    "float32", "uint8", "aten.add.Tensor", "aten.resize_.default", "os.system", "ref", "call", "apply", "cuda", "cpu",
    "x" * 300, "tune_model.append_kv", "0" * 64, "f" * 16,
)  # fmt: skip


def hostile_text(dice: Random) -> str:
    """Return a text that means something to somebody."""
    return dice.choice(_TEXTS)


def _hostile_value(dice: Random) -> Any:
    kind = dice.randrange(8)
    if kind < 2:
        return dice.choice(_NUMBERS)
    if kind < 4:
        return hostile_text(dice)
    if kind == 4:
        return dice.choice((None, True, False, [], {}, [[]], [None], {"type": "call"}, {"type": "items", "items": []}))
    if kind == 5:
        return [dice.choice(_NUMBERS) for _ in range(dice.randrange(1, 40))]
    if kind == 6:
        return _nested(dice.choice((3, 9, 70, 500)), dice)
    return "x" * dice.choice((100, 3000, 100_000, 2_000_000)) if dice.random() < 0.3 else {hostile_text(dice): 1}


def _nested(depth: int, dice: Random) -> Any:
    value: Any = 1
    wrap: Callable[[Any], Any] = dice.choice(
        (lambda v: [v], lambda v: {"a": v}, lambda v: {"type": "items", "items": [v]})
    )
    for _ in range(depth):
        value = wrap(value)
    return value


def spoil_bytes(data: bytes, dice: Random) -> bytes:
    """Damage bytes as discs, networks and people do."""
    spoiled = bytearray(data)
    size = len(spoiled)
    kind = dice.randrange(9)
    if size == 0 or kind == 8:
        return dice.randbytes(dice.choice((0, 1, 50, 5000)))
    start = dice.randrange(size)
    end = min(size, start + dice.choice((1, 2, 8, 64, 512, 4096)))
    match kind:
        case 0 | 1:
            for _ in range(dice.choice((1, 1, 1, 3, 20))):
                spoiled[dice.randrange(size)] ^= 1 << dice.randrange(8)
        case 2:
            return bytes(spoiled[:start])
        case 3:
            return bytes(spoiled[start:])
        case 4:
            spoiled[start:end] = dice.choice((bytes(end - start), b"\xff" * (end - start), dice.randbytes(end - start)))
        case 5:
            del spoiled[start:end]
        case 6:
            spoiled[start:start] = spoiled[dice.randrange(size) :][: end - start]
        case 7:
            other = dice.randrange(size)
            length = min(end - start, size - other)
            spoiled[start : start + length], spoiled[other : other + length] = (
                spoiled[other : other + length],
                spoiled[start : start + length],
            )
    return bytes(spoiled)


def spoil_text(text: str, dice: Random) -> str:
    """Damage a text by lines and words, as an editor does."""
    lines = text.split("\n")
    at, other = dice.randrange(len(lines)), dice.randrange(len(lines))
    match dice.randrange(9):
        case 0:
            del lines[at]
        case 1:
            lines.insert(other, lines[at])
        case 2:
            lines[at], lines[other] = lines[other], lines[at]
        case 3:
            lines[at] = " " * dice.randrange(1, 5) + lines[at]
        case 4:
            lines[at] = lines[at].lstrip()
        case 5:
            head, colon, _ = lines[at].partition(":")
            lines[at] = f"{head}{colon} {hostile_text(dice)}"
        case 6:
            head, colon, _ = lines[at].partition(":")
            lines[at] = f"{head}{colon} {dice.choice(_NUMBERS)}"
        case 7:
            words = lines[at].split(" ")
            words[dice.randrange(len(words))] = hostile_text(dice)
            lines[at] = " ".join(words)
        case _:
            place = dice.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:place] + dice.choice("{}[]:,&*!|>'\"%@`#\t-?") + lines[at][place:]
    return "\n".join(lines)


def spoil_json(data: bytes, dice: Random) -> bytes:
    """Change one place of a JSON document so that it stays JSON, for the most part."""
    document = json.loads(data)
    if dice.random() < 0.05:
        return _odd_spelling(data, dice)
    places = list(_places(document))
    for _ in range(dice.choice((1, 1, 1, 2, 5))):
        parent, key = dice.choice(places)
        _spoil_place(parent, key, places, dice)
    try:
        return json.dumps(document, separators=(",", ":")).encode()
    except (RecursionError, ValueError):  # it was put into itself
        return data[: dice.randrange(len(data))]


def _spoil_place(parent: Any, key: Any, places: list[tuple[Any, Any]], dice: Random) -> None:
    if not (key in parent if isinstance(parent, dict) else key < len(parent)):
        return
    match dice.randrange(7):
        case 0 | 1 | 2:
            parent[key] = _hostile_value(dice)
        case 3:
            other, where = dice.choice(places)
            if where in other if isinstance(other, dict) else where < len(other):
                with contextlib.suppress(RecursionError):  # nested by an earlier change
                    parent[key] = json.loads(json.dumps(other[where]))
        case 4:
            del parent[key]
        case 5 if isinstance(parent, dict):
            parent[hostile_text(dice)] = parent.pop(key)
        case 5:
            parent.insert(key, parent[key])
        case _ if isinstance(parent, dict):
            parent[hostile_text(dice)] = _hostile_value(dice)
        case _:
            parent += [parent[key]] * dice.choice((1, 10, 1000))


def _odd_spelling(data: bytes, dice: Random) -> bytes:
    """The same or nearly: other white space, a field twice, a second document, a mark in front, comments."""
    brace = data.find(b"{", dice.randrange(len(data)))
    comma = data.find(b",", max(brace, 0))
    return dice.choice(
        (
            data.replace(b",", b" ,\n"),
            data + data,
            b"\xef\xbb\xbf" + data,
            data + b"// end",
            data.replace(b":", b": ", 3),
            data[: brace + 1] + data[brace + 1 : comma + 1] * 2 + data[comma + 1 :] if 0 <= brace < comma else data,
            data.replace(b"1", b"1.0", 1),
            data.replace(b"1", b"1e0", 1),
            data.replace(b'"', b"'"),
            b"[" * dice.choice((100, 100_000)) + data,
        )
    )


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return every place of a document: a container and a key or index."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        parent = waiting.pop()
        keys = list(parent) if isinstance(parent, dict) else range(len(parent)) if isinstance(parent, list) else ()
        for key in keys:
            found.append((parent, key))
            waiting.append(parent[key])
    return found
