"""Mutated artifacts: every one opens as what it says, or is refused with this project's error."""

import contextlib
import gzip
import hashlib
import io
import json
import os
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from reliability_trials.mutation import hostile_text, spoil_bytes, spoil_json, spoil_text
from tune_model.package.format.archive import ArchiveWriter
from tune_model.package.format.bundle import Bundle, encode_bundle, seal_bundle
from tune_model.package.format.manifest import FileFacts, Manifest, encode_manifest, seal
from tune_model.package.format.wire import ArtifactError, decode
from tune_model.package.inspect import describe
from tune_model.package.read import Artifact, open_parts
from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.program import fingerprint

__all__ = ["Material", "check_artifact", "make_artifact"]

Files = dict[str, bytes]

_DOCUMENTS: Final = ("programs/", "replay.json", "manifest.json", "bundle.json", "parts/", "signature.json")


class Material:
    """Sound artifacts to begin with, as bytes and as files."""

    def __init__(self, paths: tuple[Path, ...]) -> None:
        self.archives = tuple(path.read_bytes() for path in paths)
        self.files = tuple(_files(path) for path in paths)
        self.digests = frozenset(part.manifest.digest for path in paths for part in open_parts(path))


def make_artifact(material: Material, case: int, folder: Path) -> tuple[Path, str]:
    """Write the mutated artifact of a number; returns where it is and what was done to it."""
    dice = Random(f"artifact {case}")  # noqa: S311 (a case can be repeated)
    number = dice.randrange(len(material.archives))
    place = folder / "mutated.tuned"
    _remove(place)
    kind = dice.choices(list(_KINDS), [weight for weight, _ in _KINDS.values()])[0]
    _KINDS[kind][1](material, number, place, dice)
    return place, kind


def check_artifact(place: Path) -> bool:
    """Open a mutated artifact and read all of it; says whether it was loaded, and `False` when it was refused.

    Raises:
        AssertionError: It was loaded as something else than it says.
    """
    try:
        parts = open_parts(place)
        for part in parts:
            records = list(part.records())
            part.constants()
            part.report()
            describe(part)
            _read_config(part)
            _start(part)
            del records
    except (TuneModelError, FileNotFoundError):
        return False
    for part in parts:
        _require_what_it_says(part)
    return True


def _read_config(part: Artifact) -> None:
    from tune_model.pipeline.config import parse_config

    # An artifact may carry a configuration of another version.
    with contextlib.suppress(TuneModelError):
        parse_config(part.config(), "config.yaml")


def _start(part: Artifact) -> None:
    """Load it, as a server does: the sound ones hold weights and no machine code, so what runs is torch's alone."""
    from tune_model.package.load import OtherMachineError, start

    # Parts of a bundle are for other machines, and all were tuned on a CPU of long ago.
    with warnings.catch_warnings(), contextlib.suppress(OtherMachineError):
        warnings.simplefilter("ignore")
        if not part.code:
            start(part, None, "cpu")


def _require_what_it_says(part: Artifact) -> None:
    """Compare what was understood with the documents, read by another library."""
    for name, data in part.files.items():
        if not name.endswith(".json"):
            continue
        said = json.loads(bytes(data))
        if name == "manifest.json":
            understood: Any = part.manifest
        elif name == "replay.json":
            understood = part.replay
        else:
            understood = part.programs[said["name"]]
        if not _is_same(said, msgspec.to_builtins(understood)):
            raise AssertionError(f"{name} was understood as something else than it says")
    for name, data in part.files.items():
        if name != "manifest.json" and hashlib.sha256(data).hexdigest() != part.manifest.files[name].sha256:
            raise AssertionError(f"{name} is not what its hash says")


def _is_same(said: Any, understood: Any) -> bool:
    if isinstance(said, dict):
        return isinstance(understood, dict) and all(
            _is_same(value, understood[key]) if key in understood else _is_default(value) for key, value in said.items()
        )
    if isinstance(said, list):
        return (
            isinstance(understood, list | tuple)
            and len(said) == len(understood)
            and all(_is_same(a, b) for a, b in zip(said, understood, strict=True))
        )
    return isinstance(said, bool) == isinstance(understood, bool) and bool(said == understood)


def _is_default(value: Any) -> bool:
    """Say whether a field that was left out on writing back can be one that has its default."""
    return value in (None, False, 0, 0.0, 1, "", [], {}, "activation", "user", [1, 1, 1], 32)


# ------------------------------------------------------------------------------------------------------------ mutations


def _files(path: Path) -> Files:
    from tune_model.package.read import _read_file

    return {name: bytes(data) for name, data in _read_file(path).items()}


def _remove(place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place)
    elif os.path.lexists(place):
        place.unlink()


def _put(files: Files, place: Path, dice: Random) -> None:
    """Write as a file or as a folder; a name that leads out of the folder is left to the archive."""
    if dice.random() < 0.5:
        place.write_bytes(_archive(files))
        return
    place.mkdir()
    for name, data in files.items():
        if not _is_inside(name):
            continue
        target = place / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        except OSError:
            continue  # too long, or a file where a folder is needed


def _is_inside(name: str) -> bool:
    return bool(name) and "\0" not in name and not name.startswith("/") and ".." not in name.split("/")


def _archive(files: Files) -> bytes:
    stream = io.BytesIO()
    writer = ArchiveWriter(stream)
    for name, data in files.items():
        try:
            writer.add(name, len(data), (data,))
        except (UnicodeEncodeError, struct.error):
            continue
    writer.finish()
    return stream.getvalue()


def rehash(files: Files) -> Files:
    """Correct every size and hash, as a forger would, where the documents can still be read."""
    files = _rename_blobs(files) if "bundle.json" in files else files
    if "manifest.json" in files:
        files = {**files, "manifest.json": _sealed(files["manifest.json"], files)}
    return files


def _sealed(data: bytes, files: Mapping[str, bytes]) -> bytes:
    try:
        manifest = decode(data, Manifest, "manifest.json")
    except ArtifactError:
        return data
    facts = {
        name: FileFacts(hashlib.sha256(content).hexdigest(), len(content))
        for name, content in sorted(files.items())
        if name not in {"manifest.json", "signature.json"}
    }
    try:
        return encode_manifest(seal(msgspec.structs.replace(manifest, files=facts)))
    except ValueError:
        return data


def _rename_blobs(files: Files) -> Files:
    """Name blobs by their hashes again, and have the parts' manifests and the list follow."""
    renamed = {name[6:]: hashlib.sha256(data).hexdigest() for name, data in files.items() if name.startswith("blobs/")}
    found: Files = {f"blobs/{renamed[name[6:]]}": data for name, data in files.items() if name.startswith("blobs/")}
    digests: dict[str, str] = {}
    try:
        for name, data in files.items():
            if name.startswith("parts/"):
                manifest = decode(data, Manifest, name)
                facts = {member: _facts(f.sha256, renamed, found) for member, f in manifest.files.items()}
                sealed = seal(msgspec.structs.replace(manifest, files=facts))
                digests[manifest.digest] = sealed.digest
                found[f"parts/{sealed.digest}.json"] = encode_manifest(sealed)
        bundle = decode(files["bundle.json"], Bundle, "bundle.json")
        parts = tuple(
            msgspec.structs.replace(part, digest=digests.get(part.digest, part.digest)) for part in bundle.parts
        )
        found["bundle.json"] = encode_bundle(seal_bundle(msgspec.structs.replace(bundle, parts=parts)))
    except (ArtifactError, ValueError):
        return files
    return found | {name: data for name, data in files.items() if name == "signature.json"}


def _facts(sha256: str, renamed: Mapping[str, str], blobs: Files) -> FileFacts:
    new = renamed.get(sha256, sha256)
    return FileFacts(new, len(blobs.get(f"blobs/{new}", b"")))


def _refile_forms(data: bytes) -> bytes:
    """File every form of a program under its own fingerprint again."""
    from tune_model.runtime.program import Form

    document = json.loads(data)
    renamed: dict[str, str] = {}
    for key, form in list(document.get("forms", {}).items()):
        try:
            found = fingerprint(decode(json.dumps(form).encode(), Form, "form"))
        except (ArtifactError, RecursionError):
            return data
        document["forms"][found] = document["forms"].pop(key)
        renamed[key] = found
    for step in document.get("steps", []):
        if isinstance(step, dict) and step.get("form") in renamed:
            step["form"] = renamed[step["form"]]
    return json.dumps(document, separators=(",", ":")).encode()


def _damage(material: Material, number: int, place: Path, dice: Random) -> None:
    place.write_bytes(spoil_bytes(material.archives[number], dice))


def _damage_member(material: Material, number: int, place: Path, dice: Random) -> None:
    files = dict(material.files[number])
    name = dice.choice(sorted(files))
    files[name] = spoil_bytes(files[name], dice)
    _put(rehash(files) if dice.random() < 0.7 else files, place, dice)


def _swap_members(material: Material, number: int, place: Path, dice: Random) -> None:
    files = dict(material.files[number])
    others = material.files[dice.randrange(len(material.files))]
    one, other = dice.choice(sorted(files)), dice.choice(sorted(others))
    files[one], files[other] = others[other], files[one]
    if dice.random() < 0.3:
        del files[dice.choice(sorted(files))]
    _put(rehash(files) if dice.random() < 0.7 else files, place, dice)


def _hostile_json(material: Material, number: int, place: Path, dice: Random) -> None:
    files = dict(material.files[number])
    named = [name for name in sorted(files) if name.startswith(_DOCUMENTS)]
    blobs = [name for name in sorted(files) if name.startswith("blobs/") and files[name][:1] == b"{"]
    name = dice.choice([*named, *blobs])
    files[name] = spoil_json(files[name], dice)
    if dice.random() < 0.5 and b'"forms"' in files[name]:
        # It may be no program any more.
        with contextlib.suppress(ValueError, AttributeError, TypeError, RecursionError):
            files[name] = _refile_forms(files[name])
    _put(rehash(files) if dice.random() < 0.9 else files, place, dice)


def _oversized(material: Material, number: int, place: Path, dice: Random) -> None:
    files = dict(material.files[number])
    named = [name for name in sorted(files) if files[name][:1] == b"{" or name.startswith(_DOCUMENTS)]
    name = dice.choice(named)
    start = max(files[name].find(dice.choice((b"[", b"{", b'"')), dice.randrange(len(files[name]))), 0) + 1
    filler = dice.choice(
        (
            b"1," * dice.choice((10_000, 500_000, 3_000_000)),
            b"x" * dice.choice((100_000, 4_000_000, 20_000_000)),
            b"[" * dice.choice((1_000, 1_000_000)),
            b'{"a":' * dice.choice((1_000, 200_000)),
            b'"ab",' * dice.choice((10_000, 1_000_000)),
            b'"' + b"\\u0041" * 500_000 + b'",',
            b" " * 5_000_000,
            b"9" * 1_000_000 + b",",
        )
    )
    files[name] = files[name][:start] + filler + files[name][start:]
    _put(rehash(files), place, dice)


def _tensors(material: Material, number: int, place: Path, dice: Random) -> None:
    files = dict(material.files[number])
    name = dice.choice([n for n in sorted(files) if n.endswith(".safetensors") or _is_tensors(files[n])] or ["x"])
    if name == "x":
        return _damage(material, number, place, dice)
    data = files[name]
    (length,) = struct.unpack("<Q", data[:8])
    header = data[8 : 8 + length]
    if dice.random() < 0.7:
        header = spoil_json(header, dice)
    stated = dice.choice((len(header), len(header), len(header), 0, 1, len(data), 1 << 62, (1 << 64) - 1))
    files[name] = struct.pack("<Q", stated) + header + data[8 + length :]
    return _put(rehash(files), place, dice)


def _is_tensors(data: bytes) -> bool:
    return len(data) > 9 and data[8:9] == b"{" and struct.unpack("<Q", data[:8])[0] < len(data)


def _records(material: Material, number: int, place: Path, dice: Random) -> None:
    files = dict(material.files[number])
    name = dice.choice([n for n in sorted(files) if files[n][:2] == b"\x1f\x8b"])
    lines = gzip.decompress(files[name]).split(b"\n")
    at = dice.randrange(len(lines))
    match dice.randrange(5):
        case 0:
            lines[at] = spoil_json(lines[at], dice) if lines[at] else b"{}"
        case 1:
            lines[at] = spoil_bytes(lines[at], dice)
        case 2:
            lines = lines * 200
        case 3:
            lines = [b" " * 30_000_000]
        case _:
            lines[at] = b'{"type":"note","text":"' + b"x" * 20_000_000 + b'"}'
    files[name] = gzip.compress(b"\n".join(lines), 1, mtime=0)
    if dice.random() < 0.3:
        files[name] = spoil_bytes(files[name], dice)
    _put(rehash(files), place, dice)


def _names(material: Material, number: int, place: Path, dice: Random) -> None:
    files = dict(material.files[number])
    new = dice.choice(
        ("../x", "/x", "programs/../../x.json", "programs/" + "a" * 80 + ".json", "kernels/x.so", "x\0y", "é.json",
         "manifest.json ", "MANIFEST.JSON", "programs/A.json", "programs//x.json", hostile_text(dice), "parts/x.json",
         "blobs/" + "0" * 64, "bundle.json", "report.html", "weights.safetensors", "programs/decode.json")
    )  # fmt: skip
    files[new] = files[dice.choice(sorted(files))]
    _put(rehash(files) if dice.random() < 0.5 else files, place, dice)


def _file_system(material: Material, number: int, place: Path, dice: Random) -> None:
    """Links, pipes and folders where files should be."""
    place.mkdir()
    for name, data in material.files[number].items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)
    victim = place / dice.choice(sorted(material.files[number]))
    match dice.randrange(6):
        case 0:
            victim.unlink()
            victim.symlink_to("/etc/passwd")
        case 1:
            victim.unlink()
            victim.symlink_to(victim.name)
        case 2:
            victim.unlink()
            os.mkfifo(victim)
        case 3:
            victim.unlink()
            victim.mkdir()
        case 4:
            (place / "kernels").mkdir(exist_ok=True)
            (place / "kernels" / "deep").mkdir()
        case _:
            (place / "programs").mkdir(exist_ok=True)
            (place / "programs" / "link.json").symlink_to("/dev/zero")


def _zip(material: Material, number: int, place: Path, dice: Random) -> None:
    """Archives of other tools, bombs among them."""
    method = dice.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    with zipfile.ZipFile(place, "w", method) as archive:
        for name, data in material.files[number].items():
            archive.writestr(name, data)
        if dice.random() < 0.5:
            archive.writestr("report.html", bytes(20 << 20))
        if dice.random() < 0.3:
            archive.comment = b"hello"
    if dice.random() < 0.5:
        place.write_bytes(spoil_bytes(place.read_bytes(), dice))


def _config(material: Material, number: int, place: Path, dice: Random) -> None:
    from tune_model.pipeline.config import shipped_configs

    files = dict(material.files[number])
    if "config.yaml" not in files:
        return _damage_member(material, number, place, dice)
    text = dice.choice(sorted(shipped_configs().items()))[1].read_text(encoding="utf-8")
    files["config.yaml"] = spoil_text(text, dice).encode(errors="surrogatepass")
    return _put(rehash(files), place, dice)


_Mutate = Callable[[Material, int, Path, Random], None]
_KINDS: Final[dict[str, tuple[int, _Mutate]]] = {
    "damage": (20, _damage),
    "damaged member": (15, _damage_member),
    "swapped members": (8, _swap_members),
    "hostile JSON": (35, _hostile_json),
    "oversized field": (4, _oversized),
    "tensors": (6, _tensors),
    "records": (5, _records),
    "names": (5, _names),
    "file system": (4, _file_system),
    "foreign archive": (3, _zip),
    "configuration": (3, _config),
}
