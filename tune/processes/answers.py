"""What a child process answers, as bytes: never pickled, so nothing a candidate's process sends is executed here.

A candidate may have overwritten anything in its process; an answer that does not parse is the end of that process.
"""

from typing import Final

import msgspec

from tune_model.tune.candidate import Built, Rejected
from tune_model.tune.device import Passed, Samples

__all__ = ["ANSWER_AT_MOST", "Answer", "AnswerError", "Found", "decode_answer", "encode_answer"]

ANSWER_AT_MOST: Final = 256 << 20
"""Machine code is the largest part of an answer."""

Found = Passed | Samples | Rejected | Built | tuple[Samples | Rejected, ...] | None


class AnswerError(Exception):
    """The bytes are no answer. Internal; the candidate at work is rejected."""


class Answer(msgspec.Struct, frozen=True):
    """One answer.

    Attributes:
        found: What was asked for.
        broken: The process should be replaced.
    """

    found: Found
    broken: bool = False


class _Wire(msgspec.Struct, frozen=True, omit_defaults=True):
    """An answer as it travels: structs that are stored elsewhere have no tags, so each has a place of its own."""

    passed: Passed | None = None
    rejected: Rejected | None = None
    built: Built | None = None
    samples: Samples | None = None
    several: tuple[tuple[Samples | None, Rejected | None], ...] | None = None
    broken: bool = False


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(_Wire)


def encode_answer(answer: Answer) -> bytes:
    """Write an answer."""
    found, broken = answer.found, answer.broken
    match found:
        case Passed():
            wire = _Wire(passed=found, broken=broken)
        case Rejected():
            wire = _Wire(rejected=found, broken=broken)
        case Built():
            wire = _Wire(built=found, broken=broken)
        case Samples():
            wire = _Wire(samples=found, broken=broken)
        case tuple():
            pairs = tuple((f, None) if isinstance(f, Samples) else (None, f) for f in found)
            wire = _Wire(several=pairs, broken=broken)
        case None:
            wire = _Wire(broken=broken)
    return _ENCODER.encode(wire)


def decode_answer(data: bytes) -> Answer:
    """Read an answer.

    Raises:
        AnswerError: It is none.
    """
    try:
        wire = _DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise AnswerError(str(error)) from error
    if wire.several is not None:
        several = tuple(samples or rejected for samples, rejected in wire.several)
        if None in several:
            raise AnswerError("a place of several that holds nothing")
        return Answer(several, wire.broken)  # type: ignore[arg-type]
    return Answer(wire.passed or wire.rejected or wire.built or wire.samples, wire.broken)
