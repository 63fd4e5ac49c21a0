"""Writing an artifact: all of it, or nothing.

It is made beside its place under a temporary name, read back with every check, then renamed. Equal contents give equal
bytes: members in one order, JSON in one spelling, no times of day.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import tune_model
from tune_model.package.contents import (
    ArtifactContents,
    build_replay,
    code_kinds,
    measure_model,
    named_architecture,
    portable_request,
    weight_sources,
)
from tune_model.package.fingerprints import to_run, to_stay_optimal
from tune_model.package.format.manifest import SCHEMA, FileFacts, Manifest, encode_manifest, seal
from tune_model.package.format.members import (
    CONFIG,
    CONSTANTS,
    MANIFEST,
    RECORDS,
    REPLAY,
    REPORT,
    SIGNATURE,
    WEIGHTS,
    kernel_member,
    limit_of,
    program_member,
)
from tune_model.package.format.records import write_records
from tune_model.package.format.tensors import tensor_chunks, tensors_size
from tune_model.package.format.wire import encode
from tune_model.package.output import ArtifactFormat, choose_format, staged
from tune_model.package.read import open_artifact
from tune_model.package.signature import Signer
from tune_model.package.sink import Chunks, Sink, open_sink

__all__ = ["write_artifact"]


def write_artifact(
    path: str | os.PathLike[str],
    contents: ArtifactContents,
    format_: ArtifactFormat | None = None,
    signer: Signer | None = None,
) -> Path:
    """Write an artifact, replacing an earlier one.

    Args:
        path: Where. Ending in a slash it becomes a folder, else one file.
        contents: What.
        format_: Overrides the choice by the path.
        signer: Signs it.

    Returns:
        The path without a trailing slash.

    Raises:
        OutputError: It cannot be written there (no folder, read-only, disk full), or something else is there.
        ArtifactError: The contents do not fit together; a fault of whoever made them.
    """
    place = Path(path)
    format_ = format_ or choose_format(path)
    contents = replace(contents, request=portable_request(contents.request))
    members = _members(contents)
    with staged(place, format_) as partial:
        with open_sink(partial, format_) as sink:
            _write_members(contents, members, sink, signer)
        open_artifact(partial)
    return place


class _Member:
    """A file to write: its size, and its data as often as it is asked for."""

    def __init__(self, size_bytes: int, chunks: Callable[[], Chunks]) -> None:
        self.size_bytes = size_bytes
        self.chunks = chunks


def _whole(data: bytes) -> _Member:
    return _Member(len(data), lambda: (data,))


def _members(contents: ArtifactContents) -> dict[str, _Member]:
    """Return every file but the manifest."""
    tuning = contents.tuning
    replay = build_replay(tuning)
    members = {program_member(program.name): _whole(encode(program)) for program in tuning.plan.programs}
    if len(members) != len(tuning.plan.programs):
        raise ValueError("two programs have one name")
    members[REPLAY] = _whole(encode(replay))
    for sha256, kind in code_kinds([entry.kernel for entries in replay.forms.values() for entry in entries]).items():
        members[kernel_member(sha256, cuda=kind == "cubin")] = _whole(tuning.code[sha256])
    keys = {constant.key for program in tuning.plan.programs for constant in program.constants}
    constants = {key: contents.constants[key] for key in sorted(keys)}
    members[CONSTANTS] = _Member(tensors_size(constants), lambda: tensor_chunks(constants))
    members[RECORDS] = _whole(write_records(tuning))
    members[CONFIG] = _whole(contents.config_yaml.encode())
    if contents.report_html is not None:
        members[REPORT] = _whole(contents.report_html.encode())
    if contents.weights is not None:
        weights = {name: contents.weights[name] for name in weight_sources(tuning.plan.programs)}
        members[WEIGHTS] = _Member(tensors_size(weights), lambda: tensor_chunks(weights))
    for name, member in members.items():
        if member.size_bytes > (limit_of(name) or 0):
            raise ValueError(f"{name} has {member.size_bytes} bytes; an artifact may hold {limit_of(name) or 0} there")
    return dict(sorted(members.items()))


def _manifest(contents: ArtifactContents, files: dict[str, FileFacts]) -> Manifest:
    tuning = contents.tuning
    has_code = any(name.startswith("kernels/") for name in files)
    return seal(
        Manifest(
            schema=SCHEMA,
            tune_model=tune_model.__version__,
            name=contents.name,
            model=measure_model(tuning.plan.programs, contents.architecture or named_architecture(contents.request)),
            request=contents.request,
            target=tuning.target,
            must_match_to_run=to_run(tuning.target, has_code=has_code),
            must_match_to_stay_optimal=to_stay_optimal(tuning.target),
            weights="external" if contents.weights is None else "embed",
            files=files,
        )
    )


def _write_members(contents: ArtifactContents, members: dict[str, _Member], sink: Sink, signer: Signer | None) -> None:
    """Write all members, then the manifest, which holds their hashes."""
    files: dict[str, FileFacts] = {}
    for name, member in members.items():
        sha256 = hashlib.sha256()
        sink(name, member.size_bytes, _hashed(member.chunks(), sha256.update))
        files[name] = FileFacts(sha256.hexdigest(), member.size_bytes)
    manifest = encode_manifest(_manifest(contents, files))
    sink(MANIFEST, len(manifest), (manifest,))
    if signer is not None:
        signature = signer.sign(MANIFEST, manifest)
        sink(SIGNATURE, len(signature), (signature,))


def _hashed(chunks: Chunks, update: Callable[[bytes | memoryview], None]) -> Iterator[bytes | memoryview]:
    for chunk in chunks:
        update(chunk)
        yield chunk
