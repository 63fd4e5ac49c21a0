"""Whoever can write an artifact can write its records: what looks at them computes, or refuses, and nothing else."""

import gzip
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import two_layers
from forge import Files, files_of, rehash, write_archive

from tune_model.package.coverage import Asked, cover
from tune_model.package.diff import diff_artifacts, slower_than
from tune_model.package.format.wire import ArtifactError
from tune_model.package.inspect import describe
from tune_model.package.read import Artifact, open_artifact
from tune_model.package.replan import plan_of
from tune_model.package.write import write_artifact
from tune_model.pipeline.commands.report import render
from tune_model.pipeline.report.gather import gather
from tune_model.pipeline.report.source import from_artifact
from tune_model.runtime.errors import TuneModelError

MEMBER = "records.jsonl.gz"
NUMBERS = (0, -1, 1e300, -1e300, 1e-300, 5e-324, 10**30, -(10**30), 2**63, 0.5)
VALUES = (*NUMBERS, "", "<b>|`", "x" * 1000, None, [], {}, True)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artifact(tmp_path_factory.mktemp("sound") / "a.tuned", two_layers.contents())


def documents(files: Files) -> list[Any]:
    return [json.loads(line) for line in gzip.decompress(files[MEMBER]).splitlines()]


def forged(files: Files, records: list[Any], place: Path) -> Artifact:
    """Put records into an artifact, every hash right."""
    text = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    deflate = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    body = deflate.compress(text) + deflate.flush()
    data = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\xff" + body + struct.pack("<2I", zlib.crc32(text), len(text))
    return open_artifact(write_archive(place, rehash({**files, MEMBER: data})))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document."""
    steps = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for step in steps:
        yield (*path, step)
        yield from places(value[step], (*path, step))


def put(document: Any, path: tuple[Any, ...], value: Any) -> None:
    for step in path[:-1]:
        document = document[step]
    document[path[-1]] = value


def refused(artifact: Artifact) -> ArtifactError | None:
    """Why its records cannot be read, if they cannot."""
    try:
        list(artifact.records())
    except ArtifactError as error:
        return error
    return None


def look(artifact: Artifact, other: Artifact) -> None:
    """Everything that reads records."""
    for action in (
        lambda: [render(gather(from_artifact(artifact)), format_) for format_ in ("html", "md", "json")],
        lambda: [slower_than(diff_artifacts(*pair), 0.03) for pair in ((artifact, other), (other, artifact))],
        lambda: plan_of(artifact),
        lambda: list(cover(artifact, [Asked("forward", {"batch": 3})])),
        lambda: describe(artifact),
    ):
        try:
            action()
        except TuneModelError:
            continue


@pytest.mark.parametrize("seed", range(60))
def test_forged_records_are_computed_with_or_refused(sound: Path, tmp_path: Path, seed: int):
    random = Random(seed)  # noqa: S311 (repeatable)
    files = files_of(sound)
    records = documents(files)
    for _ in range(random.choice([1, 1, 2, 4])):
        document = random.choice(records)
        put(document, random.choice(list(places(document))), random.choice(VALUES))
    if random.random() < 0.1:
        random.shuffle(records)
    if random.random() < 0.1:
        records.pop()
    look(forged(files, records, tmp_path / "forged.tuned"), open_artifact(sound))


@pytest.mark.parametrize("value", NUMBERS)
def test_every_number_may_be_anything(sound: Path, tmp_path: Path, value: float):
    """Each number of each record in turn: what is refused names the line."""
    files = files_of(sound)
    for line, document in enumerate(documents(files), start=1):
        for path in places(document):
            records = documents(files)
            old = records[line - 1]
            for step in path:
                old = old[step]
            if isinstance(old, bool) or not isinstance(old, int | float):
                continue
            put(records[line - 1], path, value)
            artifact = forged(files, records, tmp_path / "forged.tuned")
            refusal = refused(artifact)
            if refusal is None:
                look(artifact, artifact)
            else:
                assert f"{MEMBER}:{line}" in refusal.file
