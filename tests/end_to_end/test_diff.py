"""The release gate on artifacts that were really tuned."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import small_tune
from forge import files_of, rehash, write_archive

from tune_model.package.format.records import ChoiceRecord, read_records
from tune_model.package.format.wire import encode
from tune_model.pipeline import cli


def slowed(artifact: Path, place: Path, factor: float) -> Path:
    """Write the artifact as if its winners had been measured slower; the plain operators' times stay.

    What a busy machine disturbed counts as undisturbed, since here only the arithmetic is asked for.
    """
    files = files_of(artifact)
    lines: list[bytes] = []
    for record in read_records(files["records.jsonl.gz"], "records"):
        document: dict[str, Any] = json.loads(encode(record))
        if isinstance(record, ChoiceRecord):
            document["status"] = document["status"].replace("disturbed", "no gain")
            document["median_us"] *= factor
            document["gain_low"] /= factor
            document["gain_high"] /= factor
            winner = document["winner"]
            for measurement in document["measurements"]:
                if measurement["candidate"] == winner:
                    for name in ("median_us", "low_us", "high_us"):
                        measurement[name] *= factor
        lines.append(json.dumps(document).encode() + b"\n")
    return write_archive(place, rehash({**files, "records.jsonl.gz": gzip.compress(b"".join(lines), mtime=0)}))


def test_a_seeded_regression_fails_and_a_re_tune_passes(
    little: small_tune.Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    again = tmp_path / "again.tuned"
    assert cli.run(["tune", str(little.config), "-o", str(again), "--records", str(little.records), "--json"]) == 0
    old, same, slower = (
        str(slowed(path, tmp_path / name, factor))
        for path, name, factor in (
            (little.artifact, "old.tuned", 1.0),
            (again, "same.tuned", 1.0),
            (little.artifact, "slower.tuned", 1.05),
        )
    )
    capsys.readouterr()
    assert cli.run(["diff", old, same, "--fail-if-slower", "3%"]) == 0
    assert cli.run(["diff", old, slower, "--fail-if-slower", "3%"]) == 5
    assert "the weighted time of all tasks is slower by 5.0%" in capsys.readouterr().err
    assert cli.run(["diff", slower, old, "--fail-if-slower", "3%"]) == 0
    assert cli.run(["diff", old, slower, "--fail-if-slower", "6%"]) == 0
