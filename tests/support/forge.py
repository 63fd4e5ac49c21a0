"""Artifacts taken apart and put together again with changes, hashes corrected as a forger would."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tune_model.package.format.archive import ArchiveWriter
from tune_model.package.format.manifest import FileFacts, decode_manifest, encode_manifest, seal
from tune_model.package.read import open_artifact

Files = dict[str, bytes]


def files_of(path: Path) -> Files:
    """Every file of a sound artifact."""
    return {name: bytes(data) for name, data in open_artifact(path).files.items()}


def rehash(files: Files) -> Files:
    """Correct sizes, hashes and digest in the manifest, so that only what the files say can be wrong."""
    manifest = decode_manifest(files["manifest.json"], "manifest.json")
    facts = {
        name: FileFacts(hashlib.sha256(data).hexdigest(), len(data))
        for name, data in sorted(files.items())
        if name != "manifest.json"
    }
    return {**files, "manifest.json": encode_manifest(seal(msgspec.structs.replace(manifest, files=facts)))}


def remade(files: Files, **changes: object) -> Files:
    """The artifact with other fields in its manifest, resealed."""
    manifest = decode_manifest(files["manifest.json"], "")
    return {**files, "manifest.json": encode_manifest(seal(msgspec.structs.replace(manifest, **changes)))}


def edit_json(files: Files, member: str, change: Callable[[Any], Any]) -> Files:
    """Change a JSON member and correct the hashes."""
    document = json.loads(files[member])
    changed = change(document)
    text = json.dumps(document if changed is None else changed, separators=(",", ":"))
    files = {**files, member: text.encode()}
    return files if member == "manifest.json" else rehash(files)


def write_folder(path: Path, files: Files) -> Path:
    for name, data in files.items():
        place = path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    return path


def write_archive(path: Path, files: Files) -> Path:
    with path.open("wb") as stream:
        archive = ArchiveWriter(stream)
        for name, data in files.items():
            archive.add(name, len(data), (data,))
        archive.finish()
    return path
