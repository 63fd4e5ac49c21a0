"""Which attention is measured at which sizes."""

from typing import Any, Final, NamedTuple

from attending.forms import GEMMA, decode_form, padded_form, prefill_form
from tune_model.extract.cost import size_bytes
from tune_model.runtime.program import Form

__all__ = ["DECODE", "PREFILL", "SMALL_DECODE", "SMALL_PREFILL", "Decode", "Prefill"]

_LONGEST: Final = 32768 + 64


class Decode(NamedTuple):
    """A decode step.

    Attributes:
        batch: Rows.
        low: Least context of a row: tokens it sees besides its own.
        high: Most; rows of different length where it is more than the least.
        max_length: Of the cache.
        masked: Whether the exported graph's way is measured too.
        heads: Query heads, key/value heads, head dim.
    """

    batch: int
    low: int
    high: int
    max_length: int
    masked: bool = False
    heads: tuple[int, int, int] = (32, 8, 128)

    @property
    def name(self) -> str:
        """The row's name in the result file."""
        context = str(self.low) if self.low == self.high else f"{self.low} to {self.high}"
        return f"decode batch {self.batch} context {context} of {self.max_length}"

    @property
    def form(self) -> Form:
        """What is tuned."""
        return decode_form(self.batch, (self.low, self.high), self.max_length, self.heads)

    def used_bytes(self, contexts: int) -> int:
        """Return the traffic when all rows together see so many tokens."""
        _, kv_heads, head_dim = self.heads
        at_most = size_bytes(self.form)
        return at_most - 4 * kv_heads * head_dim * (self.batch * (self.high + 1) - contexts)


class Prefill(NamedTuple):
    """A prompt's attention, or an encoder's.

    Attributes:
        name: Of the row.
        form: What is tuned.
        facts: What the row says of it.
        skip: Backends that would not fit.
    """

    name: str
    form: Form
    facts: dict[str, Any]
    skip: tuple[str, ...] = ()


def _decode() -> tuple[Decode, ...]:
    found = [Decode(16, 1024, 1024, 1088, masked=True)]
    for context in (8192, 32768, 1024, 512):
        for batch in (1, 16, 64):
            # A cache of 64 long rows beside its float64 reference is all a device holds: shorter ones for short rows.
            longest = _LONGEST if batch < 64 or context > 8192 else 8192 + 64
            found.append(Decode(batch, context - 1, context - 1, longest))
    found += [Decode(16, context - 1, context - 1, _LONGEST) for context in (2048, 4096, 16384)]
    found.append(Decode(16, 2047, 14335, _LONGEST))
    return tuple(found)


def _prefill(lengths: tuple[int, ...]) -> tuple[Prefill, ...]:
    found = []
    for length in lengths:
        skip = ("math",) if length > 2048 else ()
        found.append(Prefill(f"prefill {length}", prefill_form(length), {"kind": "plain", "length": length}, skip))
    return tuple(found)


DECODE: Final = _decode()
PREFILL: Final = (
    *_prefill((2048, 8192, 512, 1024, 4096)),
    Prefill("prefill 2048 and append", prefill_form(2048, cache=8192), {"kind": "append", "length": 2048}),
    Prefill(
        "prefill 4096 window 1024 cap 50",
        prefill_form(4096, GEMMA, window=1024, softcap=50.0),
        {"kind": "window", "length": 4096},
    ),
    Prefill("encoder 32 x 512 padded", padded_form(32, 512, 12, 64), {"kind": "padded", "length": 512}, ("math",)),
)

SMALL_DECODE: Final = (
    Decode(2, 40, 40, 64, masked=True, heads=(4, 2, 16)),
    Decode(3, 5, 60, 64, heads=(4, 2, 16)),
)
SMALL_PREFILL: Final = (
    Prefill("prefill 48", prefill_form(48, (4, 2, 16)), {"kind": "plain", "length": 48}),
    Prefill("encoder 2 x 16 padded", padded_form(2, 16, 2, 16), {"kind": "padded", "length": 16}),
)
