"""The manifest: what an artifact is, what it needs, and the hash of every other file in it.

Versioned: `SCHEMA` goes up when a reader of the old kind would misunderstand the new one. No paths of the machine it
was made on and no times of day: the same choices give the same bytes.
"""

import hashlib
from typing import Annotated, Final, Literal

import msgspec

from tune_model.extract.request import Request
from tune_model.package.fingerprints import ToRun, ToStayOptimal
from tune_model.package.format.members import MANIFEST, MEMBERS_AT_MOST, REQUIRED, limit_of, program_name
from tune_model.package.format.wire import ArtifactError, decode, encode
from tune_model.tune.target import Target

__all__ = ["SCHEMA", "FileFacts", "Manifest", "ModelFacts", "decode_manifest", "digest", "encode_manifest", "seal"]

SCHEMA: Final = 1
SIZE_AT_MOST: Final = 1 << 48

Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class FileFacts(msgspec.Struct, frozen=True):
    """What a file must hold."""

    sha256: Sha256
    size_bytes: Count


class ModelFacts(msgspec.Struct, frozen=True):
    """The model in numbers.

    Attributes:
        architecture: Class of the model, if known.
        parameters: Elements of all weights the programs read, counted once.
        weight_bytes: Their size after the transforms.
    """

    architecture: str | None
    parameters: Count
    weight_bytes: Count


class Manifest(msgspec.Struct, frozen=True):
    """What `manifest.json` holds.

    Attributes:
        schema: Version of the format.
        tune_model: Version of tune-model that wrote the artifact.
        name: Of the model.
        model: The model in numbers.
        request: What was extracted: model source (its folder replaced by the configuration found there), dtype, task,
            workload grid.
        target: The machine it was tuned on.
        must_match_to_run: First fingerprint: a mismatch refuses.
        must_match_to_stay_optimal: Second fingerprint: a mismatch warns.
        weights: `external`: the caller brings them; `embed`: they are inside.
        files: Every other file, by name.
        digest: SHA-256 over all of the above, so over everything: the artifact's identity.
    """

    schema: Annotated[int, msgspec.Meta(ge=1)]
    tune_model: Annotated[str, msgspec.Meta(max_length=64)]
    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]
    model: ModelFacts
    request: Request
    target: Target
    must_match_to_run: ToRun
    must_match_to_stay_optimal: ToStayOptimal
    weights: Literal["external", "embed"]
    files: Annotated[dict[str, FileFacts], msgspec.Meta(max_length=MEMBERS_AT_MOST)]
    digest: str = ""


class _Version(msgspec.Struct):
    schema: int
    tune_model: str = "unknown"


def digest(manifest: Manifest) -> str:
    """Return the SHA-256 of a manifest without its digest."""
    unsealed = msgspec.structs.replace(manifest, digest="")
    return hashlib.sha256(msgspec.json.encode(unsealed, order="deterministic")).hexdigest()


def seal(manifest: Manifest) -> Manifest:
    """Return the manifest with its digest filled in."""
    return msgspec.structs.replace(manifest, digest=digest(manifest))


def encode_manifest(manifest: Manifest) -> bytes:
    """Write a sealed manifest, one field per line."""
    return encode(manifest, readable=True)


def decode_manifest(data: bytes, file: str) -> Manifest:
    """Read and check a manifest.

    Args:
        data: The document.
        file: For error messages.

    Raises:
        ArtifactError: It is damaged, names files no artifact has, or has another schema version.
    """
    _check_version(data, file)
    manifest = decode(data, Manifest, file)
    actual = digest(manifest)
    if manifest.digest != actual:
        raise ArtifactError(file, "$.digest", f"{actual}, the digest of the rest", manifest.digest)
    _check_files(manifest, file)
    _check_request(manifest.request, file)
    return manifest


def _check_version(data: bytes, file: str) -> None:
    """Before anything else is read: another version has other fields, and deserves that as its error."""
    try:
        version = msgspec.json.decode(data, type=_Version)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return  # Not even that can be read: the full decoding says where and why.
    if version.schema != SCHEMA:
        what = f"{version.schema} (written by tune-model {version.tune_model})"
        raise ArtifactError(file, "$.schema", f"{SCHEMA}; use a matching tune-model, or tune again", what)


def _check_request(request: Request, file: str) -> None:
    """Make sure that whoever asks for a phase's largest size finds one that is a size."""
    for index, phase in enumerate(request.phases):
        for name, values in phase.grid.items():
            if not values or not all(0 <= value <= SIZE_AT_MOST for value in values):
                found = f"of {len(values)} values, {min(values, default=0)} to {max(values, default=0)}"
                expected = f"sizes from 0 to {SIZE_AT_MOST}, at least one"
                raise ArtifactError(file, f"$.request.phases[{index}].grid.{name}", expected, found)


def _check_files(manifest: Manifest, file: str) -> None:
    for name, facts in manifest.files.items():
        limit = limit_of(name)
        if limit is None or name == MANIFEST:
            raise ArtifactError(file, "$.files", "names of an artifact's files", repr(name))
        if facts.size_bytes > limit:
            raise ArtifactError(file, f"$.files[{name!r}].size_bytes", f"at most {limit}", str(facts.size_bytes))
    missing = sorted(REQUIRED - {MANIFEST} - manifest.files.keys())
    if missing:
        raise ArtifactError(file, "$.files", f"{missing[0]} in it", "without it")
    if not any(program_name(name) for name in manifest.files):
        raise ArtifactError(file, "$.files", "at least one programs/<phase>.json", "without any")
