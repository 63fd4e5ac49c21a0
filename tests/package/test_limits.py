"""Documents that are legal piece by piece and too much in all: refused before they cost seconds or gigabytes."""

import json
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import two_layers
from forge import Files, edit_json, rehash, write_archive, write_folder
from spending import CALLS_AT_MOST, CPU_SECONDS_AT_MOST, spending

from tune_model.package.format.wire import ArtifactError
from tune_model.package.merge import merge_artifacts
from tune_model.package.read import open_artifact, open_parts
from tune_model.runtime.program import fingerprint

FORM = fingerprint(two_layers.FORM)
PROGRAM = "programs/forward.json"


@contextmanager
def cheaply() -> Iterator[None]:
    """Fail when the body costs too much. `benchmarks/reliability.py` holds every opening to 2 seconds of wall time."""
    with spending() as spent:
        yield
    assert spent.calls < CALLS_AT_MOST
    assert spent.cpu_s < CPU_SECONDS_AT_MOST


def refused(path: Path, field: str) -> None:
    with cheaply(), pytest.raises(ArtifactError) as caught:
        open_artifact(path)
    assert caught.value.field == field, caught.value


def shape(value: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        document["values"]["v0"]["shape"] = value

    return change


SIZES = {
    "a chain of sums": "+".join(["batch"] * 400),
    "a chain of products": "*".join(["b"] * 1000),
    "a chain of signs": "-" * 1000 + "1",
    "a minimum of everything": f"min({','.join(['1'] * 900)})",
    "a number without end": "9" * 3000,
}


@pytest.mark.parametrize("text", SIZES.values(), ids=SIZES)
def test_sizes_that_would_be_trees_without_end(tmp_path: Path, files: Files, text: str):
    refused(write_folder(tmp_path / "a", edit_json(files, PROGRAM, shape([text, 8]))), "$.values.v0")


def test_many_different_sizes(tmp_path: Path, files: Files):
    def change(document: Any) -> None:
        for number in range(3000):
            text = "+".join(["batch"] * 40) + f"+{number}"
            document["values"][f"x{number}"] = {"dtype": "float32", "shape": [text]}

    path = write_folder(tmp_path / "a", edit_json(files, PROGRAM, change))
    with cheaply(), pytest.raises(ArtifactError, match="characters of them in all"):
        open_artifact(path)


def test_the_same_size_many_times_costs_nothing(tmp_path: Path, files: Files):
    def change(document: Any) -> None:
        for number in range(3000):
            document["values"][f"x{number}"] = {"dtype": "float32", "shape": ["+".join(["batch"] * 100)]}

    path = write_folder(tmp_path / "a", edit_json(files, PROGRAM, change))
    with cheaply():
        open_artifact(path)


def test_a_tensor_of_very_many_dims(tmp_path: Path, files: Files):
    refused(write_folder(tmp_path / "a", edit_json(files, PROGRAM, shape([1] * 100_000))), "$.values.v0.shape")


def test_more_values_than_any_model_has(tmp_path: Path, files: Files):
    def change(document: Any) -> None:
        document["steps"][2]["args"] += [1] * 1_000_000

    refused(write_folder(tmp_path / "a", edit_json(files, PROGRAM, change)), "the number of values")


def test_values_that_are_spread_over_many_programs(tmp_path: Path, files: Files):
    changed = dict(files)
    document = json.loads(files[PROGRAM])
    document["steps"][2]["args"] += [1] * 200_000
    for number in range(8):
        document["name"] = f"forward.{number}"
        changed[f"programs/forward.{number}.json"] = json.dumps(document, separators=(",", ":")).encode()
    refused(write_archive(tmp_path / "a.tuned", rehash(changed)), "the number of values")


def test_a_text_longer_than_all_documents_may_be(tmp_path: Path, files: Files):
    changed = dict(files)
    for number in range(4):
        document = {**json.loads(files[PROGRAM]), "name": f"forward.{number}"}
        document["outputs"][0]["name"] = "y" * (10 << 20)
        changed[f"programs/forward.{number}.json"] = json.dumps(document, separators=(",", ":")).encode()
    refused(write_archive(tmp_path / "a.tuned", rehash(changed)), "the size of the documents")


def test_entries_times_parameters(tmp_path: Path, files: Files):
    """Each entry is checked against its form's slots: many of both would be very many checks."""

    def change(document: Any) -> None:
        (entry, *_) = document["forms"][FORM]
        document["forms"][FORM] = [entry | {"dims": [number], "kernel": {"steps": []}} for number in range(8000)]

    changed = edit_json(files, "replay.json", change)
    kernel = next(name for name in changed if name.startswith("kernels/"))
    del changed[kernel]
    path = write_folder(tmp_path / "a", rehash(changed))
    with cheaply():
        assert len(open_artifact(path).replay.forms[FORM]) == 8000


@pytest.mark.parametrize("name", ["{x}", "{0.__class__}", "%s", "a.b", ""])
def test_names_are_only_compared(tmp_path: Path, files: Files, name: str):
    """A slot's name was once formatted into a text, where braces mean something."""

    def change(document: Any) -> None:
        form = document["forms"].pop(FORM)
        form["results"][0]["name"] = form["body"][1]["results"][0] = name
        text = json.dumps({FORM: form})
        from tune_model.package.format.wire import decode
        from tune_model.runtime.program import Form

        key = fingerprint(decode(json.dumps(form).encode(), Form, text[:10]))
        document["forms"][key] = form
        for step in document["steps"]:
            if step.get("form") == FORM:
                step["form"] = key

    # The replay table is still about the old form.
    refused(write_folder(tmp_path / "a", edit_json(files, PROGRAM, change)), "$.forms")


def test_a_list_of_very_many_tensors(tmp_path: Path, files: Files):
    entry = {"dtype": "F32", "shape": [], "data_offsets": [0, 0]}
    header = json.dumps({f"t{number}": entry for number in range(210_000)}, separators=(",", ":")).encode()
    stored = struct.pack("<Q", len(header)) + header
    changed = rehash({**files, "constants.safetensors": stored})
    refused(write_folder(tmp_path / "a", changed), "the number of tensors")


def test_a_bundle_whose_parts_share_a_large_document(tmp_path: Path, artifact_file: Path, files: Files):
    """Each part decodes it anew, so what is small once may be large in all."""

    def machine(number: int) -> Path:
        def change(document: Any) -> None:
            document["target"]["name"] = document["must_match_to_stay_optimal"]["name"] = f"CPU {number}"

        from tune_model.package.format.manifest import Manifest, encode_manifest, seal
        from tune_model.package.format.wire import decode

        document = json.loads(large["manifest.json"])
        change(document)
        manifest = seal(decode(json.dumps(document).encode(), Manifest, "manifest"))
        return write_archive(tmp_path / f"{number}.tuned", {**large, "manifest.json": encode_manifest(manifest)})

    def grow(document: Any) -> None:
        document["steps"][2]["args"] += [1] * 300_000

    large = edit_json(files, PROGRAM, grow)
    parts = [machine(number) for number in range(3)]
    assert len(open_parts(parts[0])) == 1
    merge_artifacts(parts, tmp_path / "three.tuned")
    parts.append(machine(3))
    with pytest.raises(ArtifactError, match="the number of values"):
        merge_artifacts(parts, tmp_path / "four.tuned")
    assert not (tmp_path / "four.tuned").exists()


GRIDS = {
    "no values": [],
    "a negative value": [4, -1],
    "a value beyond memory": [1 << 60],
    "a value beyond numbers": [10**40],
}


@pytest.mark.parametrize("values", GRIDS.values(), ids=GRIDS)
def test_grids_that_have_no_largest_size(tmp_path: Path, files: Files, values: list[int]):
    from tune_model.package.format.manifest import Manifest, encode_manifest, seal
    from tune_model.package.format.wire import decode

    document = json.loads(files["manifest.json"])
    document["request"]["phases"][0]["grid"]["batch"] = values
    manifest = seal(decode(json.dumps(document).encode(), Manifest, "manifest"))
    changed = {**files, "manifest.json": encode_manifest(manifest)}
    refused(write_folder(tmp_path / "a", changed), "$.request.phases[0].grid.batch")


def test_a_list_of_parts_as_large_as_a_disc(tmp_path: Path):
    """It was copied before its size was looked at."""
    folder = tmp_path / "bundle"
    folder.mkdir()
    with (folder / "bundle.json").open("wb") as file:
        file.truncate(8 << 30)
    tracemalloc.start()
    try:
        refused(folder, "the size")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
