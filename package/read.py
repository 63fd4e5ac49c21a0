"""Opening an artifact: every file checked against the manifest, every part against the others, nothing executed.

    path -> files (folder or archive) -> manifest -> sizes and hashes -> programs, replay, constants -> `Artifact`

An artifact that is damaged or foreign is refused with the file, field, expected and found; it never half-loads.
"""

import errno
import hashlib
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from tune_model.package.contents import code_kinds
from tune_model.package.format.archive import read_archive
from tune_model.package.format.bundle import read_bundle
from tune_model.package.format.consistency import SizeTexts, check_constants, check_program, check_replay
from tune_model.package.format.manifest import Manifest, decode_manifest
from tune_model.package.format.members import (
    BUNDLE,
    CONFIG,
    CONSTANTS,
    FOLDERS,
    MANIFEST,
    MEMBERS_AT_MOST,
    RECORDS,
    REPLAY,
    REPORT,
    SIGNATURE,
    WEIGHTS,
    kernel_member,
    limit_of,
    program_name,
    stored_limit_of,
)
from tune_model.package.format.records import Record, StepRecord, read_records
from tune_model.package.format.tensors import Listed, list_tensors, read_tensors
from tune_model.package.format.wire import ArtifactError, decode
from tune_model.package.signature import Signature, VerifyKey, check_signature, read_signature
from tune_model.runtime.program import Program
from tune_model.runtime.replay import Replay

if TYPE_CHECKING:
    import torch

__all__ = ["Artifact", "ChoosePart", "open_artifact", "open_parts"]

T = TypeVar("T")

_LINK_ERRORS: Final = frozenset({errno.ELOOP, errno.ENOTDIR, errno.ENXIO})
DOCUMENT_BYTES_AT_MOST: Final = 32 << 20
DOCUMENT_ITEMS_AT_MOST: Final = 1_000_000
"""Of all programs and replay tables that are opened together: a document takes ten times its size in memory."""

MAP_FROM: Final = 1 << 20
"""Files from this size on are mapped, smaller ones read: a map costs more than a copy below."""


@dataclass(frozen=True)
class Artifact:
    """A checked artifact.

    Attributes:
        path: Where it lies.
        manifest: What it is.
        programs: By phase, in the request's order.
        replay: Which kernel runs where.
        code: Machine code by SHA-256.
        files: Every file's bytes, as they were when they were checked; large ones are maps.
        signature: Who claims to have signed it, or the bundle it is a part of; believed only where a key was given.
    """

    path: Path
    manifest: Manifest
    programs: dict[str, Program]
    replay: Replay
    code: dict[str, bytes]
    files: Mapping[str, memoryview]
    _constants: Mapping[str, Listed]
    _weights: Mapping[str, Listed]
    signature: Signature | None = None

    def constants(self) -> dict[str, "torch.Tensor"]:
        """Return the constants as new tensors on the CPU."""
        return read_tensors(self.files[CONSTANTS], self._constants, copy=True)

    def weights(self) -> dict[str, "torch.Tensor"] | None:
        """Return the embedded weights by checkpoint name, where they lie in the file; `None` if they are outside."""
        return read_tensors(self.files[WEIGHTS], self._weights, copy=False) if WEIGHTS in self.files else None

    def records(self) -> Iterator[Record]:
        """Unpack the measurements behind the choices, one by one.

        Raises:
            ArtifactError: They are not what the format allows.
        """
        file = _display(self.path, RECORDS)
        for record in read_records(bytes(self.files[RECORDS]), file):
            if isinstance(record, StepRecord) and record.step.program not in self.programs:
                raise ArtifactError(
                    file, "$.step.program", f"one of {', '.join(self.programs)}", record.step.program[:80]
                )
            yield record

    def config(self) -> str:
        """Return the configuration's text."""
        return str(self.files[CONFIG], "utf-8")

    def report(self) -> str | None:
        """Return the report that came along."""
        return str(self.files[REPORT], "utf-8") if REPORT in self.files else None


class _Documents:
    """Decodes what is opened together, as long as it is not too much in all; equal code is kept once."""

    def __init__(self) -> None:
        self.texts = SizeTexts()
        self.code: dict[str, bytes] = {}
        self._bytes = 0
        self._items = 0

    def decode(self, data: bytes, type_: type[T], file: str) -> T:
        self._bytes += len(data)
        self._items += sum(data.count(sign) for sign in (b",", b"[", b"{"))
        if self._bytes > DOCUMENT_BYTES_AT_MOST:
            raise ArtifactError(file, "the size of the documents", f"at most {DOCUMENT_BYTES_AT_MOST} in all", "more")
        if self._items > DOCUMENT_ITEMS_AT_MOST:
            raise ArtifactError(file, "the number of values", f"at most {DOCUMENT_ITEMS_AT_MOST} in all", "more")
        return decode(data, type_, file)

    def take(self, name: str, data: memoryview) -> bytes:
        if name not in self.code:
            self.code[name] = bytes(data)
        return self.code[name]


ChoosePart = Callable[[tuple[Artifact, ...]], Artifact]
"""Takes one of a bundle's parts."""


def open_artifact(
    path: str | os.PathLike[str], part: ChoosePart | None = None, verify_key: VerifyKey | None = None
) -> Artifact:
    """Open and check an artifact, a folder or a file.

    Args:
        path: An artifact, or a bundle of several.
        part: Takes one of a bundle's parts; by default the one for this machine.
        verify_key: Who must have signed it; without one signatures are not checked.

    Raises:
        SignatureError: It is not signed by the key, or was changed afterwards.
        ArtifactError: It is damaged, foreign or of another version.
        OtherMachineError: It is a bundle without a part for this machine.
        OSError: It does not exist or cannot be read.
    """
    parts = open_parts(path, verify_key)
    if part is not None:
        return part(parts)
    if len(parts) == 1:
        return parts[0]
    from tune_model.package.parts import native_part

    return native_part(parts)


def open_parts(path: str | os.PathLike[str], verify_key: VerifyKey | None = None) -> tuple[Artifact, ...]:
    """Open and check every part of a bundle; an artifact is its own only part.

    Raises:
        SignatureError: It is not signed by the key, or was changed afterwards.
        ArtifactError: It is damaged, foreign or of another version.
        OSError: It does not exist or cannot be read.
    """
    place = Path(path)
    files = _read_folder(place) if place.is_dir() else _read_file(place)
    signature = read_signature(files.pop(SIGNATURE, None), str(place))
    if verify_key is not None:
        check_signature(signature, files, verify_key, str(place))
    return tuple(replace(part, signature=signature) for part in _read_parts(place, files))


def _read_parts(place: Path, files: Mapping[str, memoryview]) -> tuple[Artifact, ...]:
    if BUNDLE in files:
        documents = _Documents()
        found = read_bundle(files, str(place))
        return tuple(_assemble(place, manifest, members, documents) for manifest, members in found)
    if MANIFEST not in files:
        expected = f"one with {MANIFEST}, as tune-model writes"
        raise ArtifactError(str(place), "the list of files", expected, f"without {MANIFEST}")
    manifest_file = _display(place, MANIFEST)
    _check_limit(files[MANIFEST], MANIFEST, place)
    manifest = decode_manifest(bytes(files[MANIFEST]), manifest_file)
    _check_files(files, manifest, place)
    return (_assemble(place, manifest, files, _Documents()),)


def _display(place: Path, member: str) -> str:
    return f"{place}: {member}"


def _assemble(place: Path, manifest: Manifest, files: Mapping[str, memoryview], documents: _Documents) -> Artifact:
    programs: dict[str, Program] = {}
    order = {phase.name: number for number, phase in enumerate(manifest.request.phases)}
    for member in sorted(files, key=lambda member: (order.get(program_name(member) or "", len(order)), member)):
        name = program_name(member)
        if name is not None:
            file = _display(place, member)
            programs[name] = documents.decode(bytes(files[member]), Program, file)
            if programs[name].name != name:
                raise ArtifactError(file, "$.name", repr(name), repr(programs[name].name))
            check_program(programs[name], file, documents.texts)
    replay = documents.decode(bytes(files[REPLAY]), Replay, _display(place, REPLAY))
    code = _read_code(replay, files, place, documents)
    check_replay(replay, programs, code, _display(place, REPLAY), documents.texts)
    constants = list_tensors(files[CONSTANTS], _display(place, CONSTANTS))
    check_constants(programs, constants, _display(place, CONSTANTS))
    weights = list_tensors(files[WEIGHTS], _display(place, WEIGHTS)) if WEIGHTS in files else {}
    if (manifest.weights == "embed") != (WEIGHTS in files):
        found = f"{manifest.weights!r} {'with' if WEIGHTS in files else 'without'} {WEIGHTS}"
        raise ArtifactError(_display(place, MANIFEST), "$.weights", "'embed' exactly when they are inside", found)
    _check_texts(files, place)
    return Artifact(place, manifest, programs, replay, code, files, constants, weights)


def _read_code(replay: Replay, files: Mapping[str, memoryview], place: Path, documents: _Documents) -> dict[str, bytes]:
    """Return the machine code, which must be exactly what the replay table launches."""
    kinds = code_kinds([entry.kernel for entries in replay.forms.values() for entry in entries])
    launched = {kernel_member(sha256, cuda=kind == "cubin"): sha256 for sha256, kind in kinds.items()}
    stored = {member for member in files if member.startswith("kernels/")}
    if missing := sorted(launched.keys() - stored):
        raise ArtifactError(_display(place, REPLAY), "a launch", "of code in the artifact", f"of {missing[0]}, missing")
    if unknown := sorted(stored - launched.keys()):
        raise ArtifactError(_display(place, unknown[0]), "the file", "launched by an entry of replay.json", "not")
    return {sha256: documents.take(sha256, files[member]) for member, sha256 in launched.items()}


def _check_texts(files: Mapping[str, memoryview], place: Path) -> None:
    for member in (CONFIG, REPORT):
        if member in files:
            try:
                str(files[member], "utf-8")
            except UnicodeDecodeError as error:
                raise ArtifactError(_display(place, member), "the text", "UTF-8", f"not, at {error.start}") from error


def _check_limit(data: memoryview, member: str, place: Path) -> None:
    limit = limit_of(member) or 0
    if len(data) > limit:
        raise ArtifactError(_display(place, member), "the size", f"at most {limit} bytes", str(len(data)))


def _check_files(files: Mapping[str, memoryview], manifest: Manifest, place: Path) -> None:
    present = files.keys() - {MANIFEST}
    if unknown := sorted(present - manifest.files.keys()):
        raise ArtifactError(_display(place, unknown[0]), "the file", "listed in manifest.json", "not listed")
    if missing := sorted(manifest.files.keys() - present):
        raise ArtifactError(_display(place, missing[0]), "the file", "present, manifest.json lists it", "missing")
    for member in present:
        facts = manifest.files[member]
        if len(files[member]) != facts.size_bytes:
            found = f"{len(files[member])} bytes"
            raise ArtifactError(_display(place, member), "the size", f"{facts.size_bytes} bytes", found)
        if member.startswith("kernels/") and facts.sha256 != member[8 : 8 + 64]:
            raise ArtifactError(_display(place, MANIFEST), f"$.files[{member!r}].sha256", "its name", facts.sha256)
    # Large files first, so that threads (hashing releases the interpreter) end together.
    order = sorted(present, key=lambda member: -len(files[member]))
    with ThreadPoolExecutor(max_workers=4) as pool:
        hashes = pool.map(lambda member: hashlib.sha256(files[member]).hexdigest(), order)
        for member, sha256 in zip(order, hashes, strict=True):
            if sha256 != manifest.files[member].sha256:
                expected = f"{manifest.files[member].sha256}: copy the artifact again"
                raise ArtifactError(_display(place, member), "the SHA-256", expected, sha256)


def _read_file(place: Path) -> dict[str, memoryview]:
    descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        buffer = _contents(descriptor, str(place))
    finally:
        os.close(descriptor)
    return read_archive(buffer, str(place))


def _read_folder(place: Path) -> dict[str, memoryview]:
    """Read a folder's files; links are not followed, so nothing outside it is ever opened."""
    root = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        files: dict[str, memoryview] = {}
        for name in _names(root, place):
            if name not in FOLDERS:
                files[name] = _read_member(root, name, name, place)
                continue
            folder = _open_inside(root, name, name, place, os.O_DIRECTORY)
            try:
                for inner in _names(folder, place):
                    member = f"{name}/{inner}"
                    files[member] = _read_member(folder, inner, member, place)
            finally:
                os.close(folder)
        return files
    finally:
        os.close(root)


def _names(folder: int, place: Path) -> list[str]:
    names = os.listdir(folder)
    if len(names) > MEMBERS_AT_MOST:
        raise ArtifactError(str(place), "the number of files", f"at most {MEMBERS_AT_MOST}", str(len(names)))
    return sorted(names)


def _open_inside(folder: int, name: str, member: str, place: Path, flags: int) -> int:
    try:
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | flags, dir_fd=folder)
    except OSError as error:
        what = "a link, or not what its name says" if error.errno in _LINK_ERRORS else str(error.strerror)
        raise ArtifactError(_display(place, member), "the file", "a readable file of an artifact", what) from error


def _read_member(folder: int, name: str, member: str, place: Path) -> memoryview:
    if stored_limit_of(member) is None:
        raise ArtifactError(_display(place, member), "the name", "one that an artifact's files have", "another")
    descriptor = _open_inside(folder, name, member, place, 0)
    try:
        return _contents(descriptor, _display(place, member))
    finally:
        os.close(descriptor)


def _contents(descriptor: int, file: str) -> memoryview:
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode):
        raise ArtifactError(file, "the file", "a regular file", stat.filemode(facts.st_mode))
    if facts.st_size >= MAP_FROM:
        return memoryview(mmap.mmap(descriptor, facts.st_size, access=mmap.ACCESS_READ))
    with open(descriptor, "rb", closefd=False) as stream:
        return memoryview(stream.read(MAP_FROM))
