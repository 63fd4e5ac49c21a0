import gzip
import os
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import two_layers
from forge import Files, edit_json, files_of, rehash, write_archive, write_folder

from tune_model.package.format.manifest import decode_manifest
from tune_model.package.format.wire import ArtifactError
from tune_model.package.read import open_artifact
from tune_model.runtime.program import fingerprint

FORM = fingerprint(two_layers.FORM)
PROGRAM = "programs/forward.json"


def kernel_of(files: Files) -> str:
    return next(name for name in files if name.startswith("kernels/"))


def test_a_folder_and_a_file_read_the_same(tmp_path: Path, artifact_file: Path, files: Files):
    folder, file = open_artifact(write_folder(tmp_path / "a", files)), open_artifact(artifact_file)
    assert (folder.manifest, folder.programs, folder.replay, folder.code) == (
        file.manifest,
        file.programs,
        file.replay,
        file.code,
    )


def test_nothing_there(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        open_artifact(tmp_path / "missing.tuned")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match=r"expected one with manifest\.json"):
        open_artifact(tmp_path / "empty")


# ------------------------------------------------------------------------------- damage that the hashes do not cover


def drop(member: str) -> Callable[[Files], Files]:
    return lambda files: {name: data for name, data in files.items() if name != member}


def flip(member: str, at: int) -> Callable[[Files], Files]:
    def change(files: Files) -> Files:
        data = bytearray(files[member])
        data[at] ^= 1
        return {**files, member: bytes(data)}

    return change


def cut(member: str) -> Callable[[Files], Files]:
    return lambda files: {**files, member: files[member][:-3]}


def swap_kernel_for_other_code(files: Files) -> Files:
    name = kernel_of(files)
    return {**files, name: files[name][::-1]}


DAMAGE = {
    "a bit of a program": (flip(PROGRAM, 40), PROGRAM, "the SHA-256"),
    "a bit of the constants": (flip("constants.safetensors", -1), "constants.safetensors", "the SHA-256"),
    "a bit of the records": (flip("records.jsonl.gz", 30), "records.jsonl.gz", "the SHA-256"),
    "other machine code": (swap_kernel_for_other_code, "kernels/", "the SHA-256"),
    "a truncated program": (cut(PROGRAM), PROGRAM, "the size"),
    "a truncated manifest": (cut("manifest.json"), "manifest.json", None),
    "an empty manifest": (lambda f: {**f, "manifest.json": b""}, "manifest.json", None),
    "a missing program": (drop(PROGRAM), PROGRAM, "the file"),
    "missing records": (drop("records.jsonl.gz"), "records.jsonl.gz", "the file"),
    "a file nobody listed": (lambda f: {**f, "report.html": b"hi"}, "report.html", "the file"),
    "two members swapped": (
        lambda f: {**f, "config.yaml": f["records.jsonl.gz"], "records.jsonl.gz": f["config.yaml"]},
        None,
        "the size",
    ),
}


@pytest.mark.parametrize(("change", "file", "field"), DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("put", [write_folder, write_archive])
def test_damage(
    tmp_path: Path,
    files: Files,
    put: Callable[[Path, Files], Path],
    change: Callable[[Files], Files],
    file: str | None,
    field: str | None,
):
    changed = change(files)
    if changed.get("manifest.json") == files["manifest.json"]:
        assert changed != files
    with pytest.raises(ArtifactError) as caught:
        open_artifact(put(tmp_path / "a.tuned", changed))
    error = caught.value
    assert str(tmp_path / "a.tuned") in error.file
    assert file is None or file in error.file
    assert field is None or error.field == field
    assert error.expected
    assert error.found


# ---------------------------------------------------------------------------------- documents that say something else


def at(*path: str | int) -> Callable[[Any], Any]:
    def walk(document: Any) -> Any:
        for step in path:
            document = document[step]
        return document

    return walk


def put(*path: str | int, value: Any) -> Callable[[Any], None]:
    *parents, last = path

    def change(document: Any) -> None:
        at(*parents)(document)[last] = value

    return change


def nested_items(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"type": "items", "items": [value]}
    return value


MANIFEST = "manifest.json"
REPLAY = "replay.json"
ENTRY = ("forms", FORM, 0)
KERNEL = (*ENTRY, "kernel")

HOSTILE = {
    "a newer schema": (MANIFEST, put("schema", value=2), "$.schema"),
    "no schema": (MANIFEST, lambda d: {k: v for k, v in d.items() if k != "schema"}, "$.schema"),
    "an unknown field": (MANIFEST, put("surprise", value=1), "$.surprise"),
    "another name": (MANIFEST, put("name", value="other"), "$.digest"),
    "a name with a slash": (MANIFEST, put("name", value="../x"), "$.name"),
    "another architecture": (MANIFEST, put("target", "machine", value="riscv"), "$.digest"),
    "a file outside": (MANIFEST, put("files", "../evil", value={"sha256": "0" * 64, "size_bytes": 1}), "$.digest"),
    "a list for a manifest": (MANIFEST, lambda _: [], None),
    "a number for a list": (PROGRAM, put("steps", value=3), "$.steps"),
    "an unknown kind of step": (PROGRAM, put("steps", 0, "type", value="system"), "$.steps[0].type"),
    "an unknown field of a step": (PROGRAM, put("steps", 2, "shell", value="ls"), "$.steps[2].shell"),
    "another phase": (PROGRAM, put("name", value="decode"), "$.name"),
    "a step that reads what is not there": (PROGRAM, put("steps", 0, "inputs", 0, value="v9"), "$.steps[0].inputs"),
    "a step that reads what comes later": (PROGRAM, put("steps", 0, "inputs", 0, value="v1"), "$.steps[0].inputs"),
    "two steps that make one value": (PROGRAM, put("steps", 1, "outputs", 0, value="v0"), "$.steps[1].outputs"),
    "an unknown form": (PROGRAM, put("steps", 0, "form", value="0" * 16), "$.steps[0].form"),
    "an input too few": (PROGRAM, put("steps", 0, "inputs", value=["x", "w0"]), "$.steps[0]"),
    "a form changed": (PROGRAM, put("forms", FORM, "kind", value="pointwise"), f"$.forms.{FORM}"),
    "a size that is code": (PROGRAM, put("values", "v0", "shape", 0, value="__import__('os')"), "$.values.v0"),
    "a size over an unknown symbol": (PROGRAM, put("values", "v0", "shape", 0, value="seq"), "$.values.v0"),
    "a size beyond memory": (PROGRAM, put("values", "v0", "shape", 0, value=1 << 60), "$.values.v0"),
    "a size beyond 64 bits": (PROGRAM, put("values", "v0", "shape", 0, value=1 << 90), "$.values.v0"),
    "a size nested without end": (PROGRAM, put("values", "v0", "shape", 0, value="(" * 1000 + "1"), "$.values.v0"),
    "a negative size": (PROGRAM, put("values", "v0", "shape", 0, value=-1), "$.values.v0.shape"),
    "a weight of a negative size": (PROGRAM, put("weights", 0, "type", "shape", 0, value=-8), "$.weights.w0.shape"),
    "a weight of an unknown size": (
        PROGRAM,
        put("weights", 0, "type", "shape", 0, value="batch"),
        "$.weights.w0.shape",
    ),
    "an unknown dtype": (PROGRAM, put("values", "v0", "dtype", value="__class__"), "$.values.v0.dtype"),
    "a symbol upside down": (PROGRAM, put("symbols", 0, "minimum", value=65), "$.symbols.batch"),
    "a symbol of no input": (PROGRAM, put("symbols", 0, "input", value="y"), "$.symbols.batch"),
    "an output of nothing": (PROGRAM, put("outputs", 0, "value", value="v7"), "$.outputs.y"),
    "an argument nested deep": (PROGRAM, put("steps", 2, "args", 1, value=nested_items(20)), None),
    "an argument nested deeper": (PROGRAM, put("steps", 2, "args", 1, value=nested_items(200)), None),
    "a dtype that is none": (
        PROGRAM,
        put("steps", 2, "args", 1, value={"type": "torch", "kind": "dtype", "name": "load"}),
        "$.steps[2].args[1]",
    ),
    "a kernel for no form": (REPLAY, lambda d: {"forms": {"0" * 16: d["forms"][FORM]}}, "$.forms"),
    "two entries for a point": (REPLAY, put("forms", FORM, 1, "dims", 0, value=1), f"$.forms.{FORM}"),
    "a point of another rank": (REPLAY, put(*ENTRY, "dims", value=[1, 2]), f"$.forms.{FORM}[0].dims"),
    "a negative point": (REPLAY, put(*ENTRY, "dims", value=[-1]), f"$.forms.{FORM}[0].dims"),
    "a launch of code that is not there": (REPLAY, put(*KERNEL, "steps", 0, "code", value="0" * 64), "a launch"),
    "code that nobody launches": (REPLAY, put("forms", value={}), "the file"),
    "a launch on an unknown slot": (
        REPLAY,
        put(*KERNEL, "steps", 0, "pointers", 0, value="a9"),
        f"$.forms.{FORM}[0].kernel.steps[0].pointers",
    ),
    "a launch size over an unknown name": (
        REPLAY,
        put(*KERNEL, "steps", 0, "sizes", 0, value="a0.size9"),
        f"$.forms.{FORM}[0].kernel.steps[0].sizes",
    ),
    "a division by nothing": (
        REPLAY,
        put(*KERNEL, "requires", 0, value={"type": "multiple", "expression": "a0.size0", "of": 0}),
        f"$.forms.{FORM}[0].kernel.requires",
    ),
    "a time that is no number": (REPLAY, put(*ENTRY, "median_us", value="NaN"), "$.forms[...][0].median_us"),
    "a time that is null": (REPLAY, put(*ENTRY, "median_us", value=None), "$.forms[...][0].median_us"),
}


@pytest.mark.parametrize(("member", "change", "field"), HOSTILE.values(), ids=HOSTILE)
def test_documents_that_say_something_else(
    tmp_path: Path, files: Files, member: str, change: Callable[[Any], Any], field: str | None
):
    """All hashes are right: these are refused for what they say."""
    with pytest.raises(ArtifactError) as caught:
        open_artifact(write_folder(tmp_path / "a", edit_json(files, member, change)))
    assert field is None or caught.value.field == field


TEXTS = {
    "no JSON": b"hello",
    "half a document": b'{"forms":',
    "two documents": b'{"forms":{}}{"forms":{}}',
    "no UTF-8": b'{"forms":{"\xff":[]}}',
    "nested lists": b"[" * 100_000,
    "nested objects": b'{"forms":' * 100_000,
    "nested arguments": b'{"steps":[{"type":"call","op":"","args":[' + b'{"type":"items","items":[' * 10_000,
    "a field given twice": b'{"forms":{},"forms":{}}',
    "a number beyond floats": b'{"forms":{"0":[{"median_us":1e999}]}}',
    "infinity": b'{"forms":{"0":[{"median_us":Infinity}]}}',
    "nothing": b"",
    "zeros": bytes(1000),
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("member", [REPLAY, PROGRAM, MANIFEST])
def test_texts_that_are_no_such_document(tmp_path: Path, files: Files, member: str, text: bytes):
    changed = {**files, member: text}
    with pytest.raises(ArtifactError):
        open_artifact(write_folder(tmp_path / "a", changed if member == MANIFEST else rehash(changed)))


def test_other_spelling_of_the_same_document_is_read(tmp_path: Path, files: Files):
    """White space and the spelling of numbers may differ between versions of the JSON library."""
    text = files[REPLAY].replace(b":3.0", b": 3").replace(b",", b", ")
    assert text != files[REPLAY]
    artifact = open_artifact(write_folder(tmp_path / "a", rehash({**files, REPLAY: text})))
    assert artifact.replay == open_artifact(write_folder(tmp_path / "b", files)).replay


def test_an_old_reader_says_which_version_it_needs(tmp_path: Path, files: Files):
    future = edit_json(files, MANIFEST, lambda d: {"schema": 7, "tune_model": "9.1.0", "all": "different"})
    with pytest.raises(ArtifactError, match=r"\$.schema is 7 \(written by tune-model 9.1.0\); expected 1"):
        open_artifact(write_folder(tmp_path / "a", future))


# ------------------------------------------------------------------------------------------- folders and file systems


def test_links_are_not_followed(tmp_path: Path, files: Files):
    for member in ("config.yaml", PROGRAM, kernel_of(files)):
        folder = write_folder(tmp_path / member.replace("/", "-"), files)
        (tmp_path / "elsewhere").write_bytes(files[member])
        (folder / member).unlink()
        (folder / member).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ArtifactError, match="a link"):
            open_artifact(folder)


def test_a_linked_folder_inside_is_not_followed(tmp_path: Path, files: Files):
    folder = write_folder(tmp_path / "a", files)
    (folder / "kernels").rename(tmp_path / "elsewhere")
    (folder / "kernels").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match="kernels"):
        open_artifact(folder)


def test_the_artifact_itself_may_be_reached_through_a_link(tmp_path: Path, files: Files):
    write_folder(tmp_path / "a", files)
    (tmp_path / "latest").symlink_to("a")
    assert open_artifact(tmp_path / "latest").manifest.name == "two-layers"


def test_a_pipe_does_not_block(tmp_path: Path, files: Files):
    folder = write_folder(tmp_path / "a", files)
    (folder / "config.yaml").unlink()
    os.mkfifo(folder / "config.yaml")
    with pytest.raises(ArtifactError, match=r"config\.yaml"):
        open_artifact(folder)
    os.mkfifo(tmp_path / "pipe.tuned")
    with pytest.raises(ArtifactError, match="regular file"):
        open_artifact(tmp_path / "pipe.tuned")


@pytest.mark.parametrize("name", ["extra.txt", "kernels/evil.so", "programs/../../x.json", "kernels/deep/er.so", "a/b"])
def test_unknown_names_are_refused(tmp_path: Path, files: Files, name: str):
    if ".." not in name:
        with pytest.raises(ArtifactError):
            open_artifact(write_folder(tmp_path / "a", {**files, name: b"x"}))
    with pytest.raises(ArtifactError):
        open_artifact(write_archive(tmp_path / "a.tuned", {**files, name: b"x"}))


# -------------------------------------------------------------------------------------------------------------- files


def zip_with(files: Files, path: Path, compression: int) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def test_a_zip_bomb_is_never_unpacked(tmp_path: Path, files: Files):
    """10 MB of zeros in 10 KB: refused because it is compressed at all, before any of it is read."""
    bomb = zip_with({**files, "report.html": bytes(10 << 20)}, tmp_path / "bomb.tuned", zipfile.ZIP_DEFLATED)
    assert bomb.stat().st_size < 100_000
    with pytest.raises(ArtifactError, match="zip"):
        open_artifact(bomb)


def test_an_archive_of_another_tool_is_refused_with_advice(tmp_path: Path, files: Files):
    with pytest.raises(ArtifactError, match="zip"):
        open_artifact(zip_with(files, tmp_path / "a.tuned", zipfile.ZIP_STORED))


def test_records_that_unpack_without_end(tmp_path: Path, files: Files):
    """Opening never unpacks them; asking for them stops at a line's limit."""
    bomb = gzip.compress(bytes(100 << 20))
    artifact = open_artifact(write_folder(tmp_path / "a", rehash({**files, "records.jsonl.gz": bomb})))
    with pytest.raises(ArtifactError, match="a line"):
        list(artifact.records())


def test_a_member_twice(tmp_path: Path, files: Files):
    path = write_archive(tmp_path / "a.tuned", files)
    data = path.read_bytes().replace(b"replay.json", b"config.yaml")
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match="twice"):
        open_artifact(path)


ENDS = {
    "empty": lambda data: b"",
    "text": lambda data: b"this is no artifact" * 100,
    "half": lambda data: data[: len(data) // 2],
    "without its last byte": lambda data: data[:-1],
    "something before": lambda data: b"#!/bin/sh\n" + data,
    "something behind": lambda data: data + b"x",
    "a comment": lambda data: data[:-2] + struct.pack("<H", 5) + b"hello",
    "twice": lambda data: data * 2,
}


@pytest.mark.parametrize("change", ENDS.values(), ids=ENDS)
def test_files_that_are_no_archive(tmp_path: Path, artifact_file: Path, change: Callable[[bytes], bytes]):
    path = tmp_path / "a.tuned"
    path.write_bytes(change(artifact_file.read_bytes()))
    with pytest.raises(ArtifactError):
        open_artifact(path)


def test_every_kind_of_bit_flip_is_refused(tmp_path: Path, artifact_file: Path):
    """One byte changed anywhere, headers and padding included: no such file is accepted."""
    sound = artifact_file.read_bytes()
    generator = random.Random(5)  # noqa: S311 (repeatable, not secret)
    path = tmp_path / "a.tuned"
    for _ in range(300):
        damaged = bytearray(sound)
        damaged[generator.randrange(len(sound))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(ArtifactError):
            open_artifact(path)


def test_every_truncation_is_refused(tmp_path: Path, artifact_file: Path):
    sound = artifact_file.read_bytes()
    path = tmp_path / "a.tuned"
    for length in range(0, len(sound), 211):
        path.write_bytes(sound[:length])
        with pytest.raises(ArtifactError):
            open_artifact(path)


def test_opening_is_repeatable_and_changes_nothing(tmp_path: Path, files: Files):
    folder = write_folder(tmp_path / "a", files)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert files_of(folder) == files_of(folder) == files
    assert decode_manifest(files[MANIFEST], MANIFEST).digest == open_artifact(folder).manifest.digest
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)
