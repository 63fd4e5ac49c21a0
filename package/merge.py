"""Merging: artifacts of one model, each tuned on its own machine, become one bundle that every one of them loads.

The same parts give the same bytes, in whatever order they are given. Parts are kept as they are: their digests stay.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import tune_model
from tune_model.package.fingerprints import CudaToRun
from tune_model.package.format.bundle import (
    BUNDLE_SCHEMA,
    PARTS_AT_MOST,
    Bundle,
    PartFacts,
    encode_bundle,
    seal_bundle,
)
from tune_model.package.format.manifest import Manifest, encode_manifest
from tune_model.package.format.members import BUNDLE, MEMBERS_AT_MOST, SIGNATURE, blob_member, part_member
from tune_model.package.output import ArtifactFormat, choose_format, staged
from tune_model.package.parts import part_name
from tune_model.package.read import Artifact, open_parts
from tune_model.package.signature import Signer
from tune_model.package.sink import open_sink
from tune_model.runtime.errors import TuneModelError

__all__ = ["MergeError", "merge_artifacts"]


class MergeError(TuneModelError):
    """Artifacts that do not belong into one bundle; nothing was written."""


def merge_artifacts(
    paths: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    format_: ArtifactFormat | None = None,
    signer: Signer | None = None,
) -> tuple[Artifact, ...]:
    """Write a bundle of artifacts, replacing an earlier one.

    Args:
        paths: Artifacts and bundles; a part that several hold is taken once.
        output: Where. Ending in a slash it becomes a folder, else one file.
        format_: Overrides the choice by the path.
        signer: Signs the bundle; signatures of the artifacts are not kept.

    Returns:
        The parts as they are in the bundle.

    Raises:
        MergeError: They are of different models, or two were tuned for the same machine.
        ArtifactError: One of them is damaged.
        OutputError: The bundle cannot be written there.
    """
    parts = list({part.manifest.digest: part for path in paths for part in open_parts(path)}.values())
    _check_models(parts)
    _check_machines(parts)
    parts.sort(key=lambda part: _order(part.manifest))
    place = Path(output)
    format_ = format_ or choose_format(output)
    members = dict(_members(parts))
    if signer is not None:
        members[SIGNATURE] = signer.sign(BUNDLE, bytes(members[BUNDLE]))
    if len(members) > MEMBERS_AT_MOST or len(parts) > PARTS_AT_MOST:
        seen = f"{len(members)} files in {len(parts)} parts"
        raise MergeError(f"{place}: would hold {seen}; expected at most {MEMBERS_AT_MOST} in {PARTS_AT_MOST}")
    with staged(place, format_) as partial:
        with open_sink(partial, format_) as sink:
            for name, data in members.items():
                sink(name, len(data), (data,))
        open_parts(partial)
    return open_parts(place)


def _order(manifest: Manifest) -> tuple[object, ...]:
    """Sort GPUs before CPUs, newer architectures first, then by name: the order of preference among equals."""
    run = manifest.must_match_to_run
    kind = (0, -run.arch) if isinstance(run, CudaToRun) else (1, 0)
    return (*kind, manifest.target.name, manifest.digest)


def _check_models(parts: Sequence[Artifact]) -> None:
    first = parts[0]
    for part in parts[1:]:
        for field, ours, theirs in zip(_MODEL, _model(first.manifest), _model(part.manifest), strict=True):
            if ours != theirs:
                raise MergeError(
                    f"{part.path}: {field} is {_short(theirs)}, but {_short(ours)} in {first.path}; expected artifacts "
                    "of one model"
                )


_MODEL = ("$.name", "$.model", "$.request.source", "$.request.dtype", "$.request.task", "$.request.max_length",
          "$.request.max_batch", "$.request.inputs")  # fmt: skip


def _model(manifest: Manifest) -> tuple[object, ...]:
    request = manifest.request
    return (
        manifest.name,
        manifest.model,
        request.source,
        request.dtype,
        request.task,
        request.max_length,
        request.max_batch,
        request.inputs,
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}..."


def _check_machines(parts: Sequence[Artifact]) -> None:
    seen: dict[tuple[object, object], Artifact] = {}
    for part in parts:
        manifest = part.manifest
        machine = (manifest.must_match_to_run, manifest.must_match_to_stay_optimal)
        other = seen.setdefault(machine, part)
        if other is not part:
            raise MergeError(
                f"{part.path}: was tuned for the same machine as {other.path}: {part_name(manifest)} and "
                f"{part_name(other.manifest)}; a machine would never load the second; expected one of them"
            )


def _members(parts: Sequence[Artifact]) -> Iterator[tuple[str, bytes | memoryview]]:
    """Yield every file of the bundle by name: blobs in the order of their hashes, the list last."""
    blobs: dict[str, memoryview] = {}
    for part in parts:
        for name, facts in part.manifest.files.items():
            blobs[facts.sha256] = part.files[name]
    for sha256 in sorted(blobs):
        yield blob_member(sha256), blobs[sha256]
    for part in sorted(parts, key=lambda part: part.manifest.digest):
        yield part_member(part.manifest.digest), encode_manifest(part.manifest)
    listed = tuple(PartFacts(part.manifest.digest, part.manifest.target.name) for part in parts)
    bundle = Bundle(BUNDLE_SCHEMA, tune_model.__version__, parts[0].manifest.name, listed)
    yield BUNDLE, encode_bundle(seal_bundle(bundle))
