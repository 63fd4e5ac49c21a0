"""`records.jsonl.gz`: the tasks, every measurement and every rejection behind an artifact's choices.

One JSON object per line. Compressed the same way by every version of Python, with no time of day inside. Read only when
somebody asks (a report, a comparison, a new race without the model), never to run the artifact.
"""

import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import Final, cast

import msgspec

from tune_model.extract.task import PlannedTask, Skipped
from tune_model.package.format.wire import ArtifactError, decode, encode
from tune_model.tune.candidate import Candidate, Rejected
from tune_model.tune.choice import Choice, Measurement, Tuning, WholeStep
from tune_model.tune.records.facts import Trail

__all__ = [
    "ChoiceRecord",
    "NoteRecord",
    "Record",
    "SkippedRecord",
    "StepRecord",
    "TaskRecord",
    "read_records",
    "records_of",
    "write_records",
]

# Magic, deflate, no flags, mtime 0, "smallest", "unknown system": gzip.compress fills the last in by Python version.
_GZIP_HEADER: Final = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\xff"
_GZIP_END: Final = struct.Struct("<2I")

LINE_AT_MOST: Final = 16 << 20
TOTAL_AT_MOST: Final = 2 << 30
_CHUNK: Final = 1 << 20

_TIME_AT_LEAST: Final = 1e-9
_TIME_AT_MOST: Final = 1e15
"""Microseconds: from less than light takes through a transistor to a lifetime."""

_COUNT_AT_MOST: Final = 1e24
_SIZE_AT_MOST: Final = 2**31 - 1


class TaskRecord(msgspec.Struct, frozen=True, tag="task"):
    """A task, with where it occurs and its form."""

    planned: PlannedTask


class ChoiceRecord(msgspec.Struct, frozen=True, tag="choice"):
    """The outcome for one task; fields as in `tune.choice.Choice`, the kernel being in replay.json."""

    task: str
    winner: Candidate
    median_us: float
    baseline_us: float
    gain_low: float
    gain_high: float
    status: str
    measurements: tuple[Measurement, ...]
    rejections: tuple[tuple[Candidate, Rejected], ...]
    trails: tuple[Trail, ...] = ()


class StepRecord(msgspec.Struct, frozen=True, tag="step"):
    """A whole program at one point of its grid, before and after."""

    step: WholeStep


class SkippedRecord(msgspec.Struct, frozen=True, tag="skipped"):
    """A step that stayed an ATen call."""

    skipped: Skipped


class NoteRecord(msgspec.Struct, frozen=True, tag="note"):
    """How a phase was traced, what was patched or merged."""

    text: str


Record = TaskRecord | ChoiceRecord | StepRecord | SkippedRecord | NoteRecord
_RECORD: Final = cast("type[Record]", Record)


def records_of(tuning: Tuning) -> Iterator[Record]:
    """Yield what is stored of a tuning, in order."""
    yield from map(TaskRecord, tuning.plan.tasks)
    yield from map(_choice_record, tuning.choices)
    yield from map(StepRecord, tuning.steps)
    yield from map(SkippedRecord, tuning.plan.skipped)
    yield from map(NoteRecord, tuning.plan.notes)


def _choice_record(choice: Choice) -> ChoiceRecord:
    return ChoiceRecord(
        choice.task,
        choice.winner,
        choice.median_us,
        choice.baseline_us,
        choice.gain_low,
        choice.gain_high,
        choice.status,
        choice.measurements,
        choice.rejections,
        choice.trails,
    )


def write_records(tuning: Tuning) -> bytes:
    """Return the file's bytes; equal tunings give equal bytes."""
    text = b"".join(encode(record) + b"\n" for record in records_of(tuning))
    deflate = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    body = deflate.compress(text) + deflate.flush()
    return _GZIP_HEADER + body + _GZIP_END.pack(zlib.crc32(text), len(text) & 0xFFFFFFFF)


def read_records(data: bytes, file: str) -> Iterator[Record]:
    """Yield the records one by one, unpacking no more than a line ahead.

    Args:
        data: The file's bytes.
        file: For error messages.

    Raises:
        ArtifactError: It is no gzip file, or a line is no record.
    """
    for number, line in enumerate(_lines(data, file), start=1):
        record = decode(line, _RECORD, f"{file}:{number}")
        _check_numbers(record, f"{file}:{number}")
        yield record


def _check_numbers(record: Record, file: str) -> None:
    """Refuse numbers that no measurement gives, so that whoever computes with them need not expect any."""
    match record:
        case TaskRecord(planned):
            counts = [planned.weight, planned.flops, planned.size_bytes, *(s.occurrences for s in planned.sites)]
            if not all(0 <= count <= _COUNT_AT_MOST for count in counts):
                expected = f"weights, operations, bytes and occurrences of 0 to {_COUNT_AT_MOST:g}"
                raise ArtifactError(file, "$.planned", expected, str(counts))
        case ChoiceRecord():
            times = [record.median_us, record.baseline_us, record.gain_low, record.gain_high]
            for measurement in record.measurements:
                times += [measurement.median_us, measurement.low_us, measurement.high_us]
            for trail in record.trails:
                tried = [one for step in trail.footprints for one in (step.at, *step.tried)]
                times += [one.time_us for one in tried if one.time_us is not None]
            _check_times(times, file)
            _check_interval(record, file, "$")
        case StepRecord(step):
            _check_times([step.median_us, step.baseline_us, step.gain_low, step.gain_high], file)
            _check_interval(step, file, "$.step")
            if not all(1 <= size <= _SIZE_AT_MOST for _, size in step.point):
                raise ArtifactError(file, "$.step.point", f"sizes of 1 to {_SIZE_AT_MOST}", str(step.point))


def _check_interval(gains: ChoiceRecord | WholeStep, file: str, field: str) -> None:
    if gains.gain_low > gains.gain_high:
        seen = f"{gains.gain_low} to {gains.gain_high}"
        raise ArtifactError(file, f"{field}.gain_low", "at most gain_high", seen)


def _check_times(times: Iterable[float], file: str) -> None:
    for time in times:
        if time != 0 and not _TIME_AT_LEAST <= time <= _TIME_AT_MOST:
            expected = f"times and gains of 0, or {_TIME_AT_LEAST:g} to {_TIME_AT_MOST:g}"
            raise ArtifactError(file, "$", expected, str(time))


def _lines(data: bytes, file: str) -> Iterator[bytes]:
    rest = bytearray()
    for chunk in _unpack(data, file):
        first, *others = chunk.split(b"\n")
        rest += first
        for line in others:
            yield bytes(rest)
            rest = bytearray(line)
        if len(rest) > LINE_AT_MOST:
            raise ArtifactError(file, "a line", f"at most {LINE_AT_MOST} bytes", "longer")
    if rest:
        raise ArtifactError(file, "the last line", "ended by a line break", "cut off")


def _unpack(data: bytes, file: str) -> Iterator[bytes]:
    inflate = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    pending = data
    total = 0
    while not inflate.eof:
        try:
            chunk = inflate.decompress(pending, _CHUNK)
        except zlib.error as error:
            raise ArtifactError(file, "the data", "gzip", str(error)) from error
        pending = inflate.unconsumed_tail
        if not chunk and not pending and not inflate.eof:
            raise ArtifactError(file, "the data", "a whole gzip file", "cut off")
        total += len(chunk)
        if total > TOTAL_AT_MOST:
            raise ArtifactError(file, "the unpacked size", f"at most {TOTAL_AT_MOST} bytes", "more")
        yield chunk
    if inflate.unused_data:
        raise ArtifactError(file, "the data", "one gzip stream", f"followed by {len(inflate.unused_data)} more bytes")
