"""A bundle: several artifacts of one model, each tuned on its own machine, in one file or folder.

    bundle.json            what the parts are
    parts/<digest>.json    a part's manifest, named by its digest
    blobs/<sha256>         every other file of the parts, named by its hash, each once however many parts have it

A part is an artifact whose files lie among the blobs: its manifest says which. So reading one is reading an artifact,
with every check, and what parts share (weights, constants, a configuration) is stored once.
"""

import hashlib
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from tune_model.package.format.manifest import Manifest, Sha256, decode_manifest
from tune_model.package.format.members import BUNDLE, MANIFEST, blob_member, bundle_limit_of, limit_of, part_member
from tune_model.package.format.wire import ArtifactError, decode, encode

__all__ = ["BUNDLE_SCHEMA", "PARTS_AT_MOST", "Bundle", "PartFacts", "encode_bundle", "read_bundle", "seal_bundle"]

BUNDLE_SCHEMA: Final = 1
PARTS_AT_MOST: Final = 64


class PartFacts(msgspec.Struct, frozen=True):
    """One part.

    Attributes:
        digest: Of its manifest, and so of everything in it.
        target: Name of the machine it was tuned on.
    """

    digest: Sha256
    target: str


class Bundle(msgspec.Struct, frozen=True):
    """What `bundle.json` holds.

    Attributes:
        schema: Version of the bundle format.
        tune_model: Version of tune-model that wrote it.
        name: Of the model.
        parts: In the order in which they are preferred where several fit a machine equally.
        digest: SHA-256 over all of the above, and so over every part.
    """

    schema: Annotated[int, msgspec.Meta(ge=1)]
    tune_model: Annotated[str, msgspec.Meta(max_length=64)]
    name: Annotated[str, msgspec.Meta(max_length=200)]
    parts: Annotated[tuple[PartFacts, ...], msgspec.Meta(min_length=1, max_length=PARTS_AT_MOST)]
    digest: str = ""


class _Version(msgspec.Struct):
    schema: int
    tune_model: str = "unknown"


def seal_bundle(bundle: Bundle) -> Bundle:
    """Return the bundle with its digest filled in."""
    return msgspec.structs.replace(bundle, digest=_digest(bundle))


def encode_bundle(bundle: Bundle) -> bytes:
    """Write a sealed bundle's list of parts, one field per line."""
    return encode(bundle, readable=True)


def read_bundle(files: Mapping[str, memoryview], place: str) -> list[tuple[Manifest, dict[str, memoryview]]]:
    """Return every part as its manifest and its files, each of the size and hash the manifest says.

    Args:
        files: Of the bundle, by name.
        place: For error messages.

    Raises:
        ArtifactError: Something is damaged, missing, superfluous, or of another version.
    """
    file = f"{place}: {BUNDLE}"
    bundle = _decode(files[BUNDLE], file)
    _check_names(files, bundle, place)
    for name, data in files.items():
        folder, _, sha256 = name.partition("/")
        if folder == "blobs" and hashlib.sha256(data).hexdigest() != sha256:
            raise ArtifactError(f"{place}: {name}", "the SHA-256", "its name", "another; copy the bundle again")
    parts = [_read_part(part, files, bundle, place) for part in bundle.parts]
    used = {facts.sha256 for manifest, _ in parts for facts in manifest.files.values()}
    for name in files:
        folder, _, sha256 = name.partition("/")
        if folder == "blobs" and sha256 not in used:
            raise ArtifactError(f"{place}: {name}", "the file", "one that a part lists", "listed by none")
    return parts


def _digest(bundle: Bundle) -> str:
    unsealed = msgspec.structs.replace(bundle, digest="")
    return hashlib.sha256(msgspec.json.encode(unsealed, order="deterministic")).hexdigest()


def _decode(stored: memoryview, file: str) -> Bundle:
    if len(stored) > (bundle_limit_of(BUNDLE) or 0):
        raise ArtifactError(file, "the size", f"at most {bundle_limit_of(BUNDLE)} bytes", str(len(stored)))
    data = bytes(stored)
    try:
        version = msgspec.json.decode(data, type=_Version)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        version = _Version(BUNDLE_SCHEMA)  # Not even that can be read: the full decoding says where and why.
    if version.schema != BUNDLE_SCHEMA:
        what = f"{version.schema} (written by tune-model {version.tune_model})"
        raise ArtifactError(file, "$.schema", f"{BUNDLE_SCHEMA}; use a matching tune-model, or merge again", what)
    bundle = decode(data, Bundle, file)
    if bundle.digest != _digest(bundle):
        raise ArtifactError(file, "$.digest", f"{_digest(bundle)}, the digest of the rest", bundle.digest)
    if len({part.digest for part in bundle.parts}) != len(bundle.parts):
        raise ArtifactError(file, "$.parts", "each part once", "one given twice")
    return bundle


def _check_names(files: Mapping[str, memoryview], bundle: Bundle, place: str) -> None:
    """Check that what lies here is the list, the parts it names, and blobs."""
    expected = {BUNDLE, *(part_member(part.digest) for part in bundle.parts)}
    for name in sorted(files):
        if bundle_limit_of(name) is None or (not name.startswith("blobs/") and name not in expected):
            raise ArtifactError(f"{place}: {name}", "the file", "one that bundle.json lists", "not listed")
    if missing := sorted(expected - files.keys()):
        raise ArtifactError(f"{place}: {missing[0]}", "the file", "present, bundle.json lists it", "missing")


def _read_part(
    part: PartFacts, files: Mapping[str, memoryview], bundle: Bundle, place: str
) -> tuple[Manifest, dict[str, memoryview]]:
    member = part_member(part.digest)
    file = f"{place}: {member}"
    limit = bundle_limit_of(member) or 0
    if len(files[member]) > limit:
        raise ArtifactError(file, "the size", f"at most {limit} bytes", str(len(files[member])))
    manifest = decode_manifest(bytes(files[member]), file)
    for field, seen, expected in (
        ("$.digest", manifest.digest, part.digest),
        ("$.target.name", manifest.target.name, part.target),
        ("$.name", manifest.name, bundle.name),
    ):
        if seen != expected:
            raise ArtifactError(file, field, f"{expected!r}, as {BUNDLE} says", repr(seen))
    found = {MANIFEST: files[member]}
    for name, facts in manifest.files.items():
        blob = files.get(blob_member(facts.sha256))
        if blob is None:
            raise ArtifactError(file, f"$.files[{name!r}]", "a file among the blobs", f"{facts.sha256}, missing")
        if len(blob) != facts.size_bytes or len(blob) > (limit_of(name) or 0):
            raise ArtifactError(
                file, f"$.files[{name!r}].size_bytes", f"{len(blob)}, the file's", str(facts.size_bytes)
            )
        if name.startswith("kernels/") and facts.sha256 != name[8 : 8 + 64]:
            raise ArtifactError(file, f"$.files[{name!r}].sha256", "its name", facts.sha256)
        found[name] = blob
    return manifest, found
