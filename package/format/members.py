"""The files of an artifact: their names, which are required, and how large each may be.

One statement of the layout for the writer, the reader and docs/artifact.md. Sizes are limits against hostile input, far
above what real models need.
"""

import re
from typing import Final, NamedTuple

__all__ = [
    "BUNDLE",
    "CONFIG",
    "CONSTANTS",
    "FOLDERS",
    "MANIFEST",
    "MEMBERS_AT_MOST",
    "RECORDS",
    "REPLAY",
    "REPORT",
    "REQUIRED",
    "SIGNATURE",
    "SIGNATURE_BYTES_AT_MOST",
    "WEIGHTS",
    "blob_member",
    "bundle_limit_of",
    "kernel_member",
    "limit_of",
    "part_member",
    "program_member",
    "program_name",
    "stored_limit_of",
]

MANIFEST: Final = "manifest.json"
REPLAY: Final = "replay.json"
CONSTANTS: Final = "constants.safetensors"
WEIGHTS: Final = "weights.safetensors"
RECORDS: Final = "records.jsonl.gz"
CONFIG: Final = "config.yaml"
REPORT: Final = "report.html"
BUNDLE: Final = "bundle.json"
SIGNATURE: Final = "signature.json"
"""Beside either; listed by none, since it is made of what lists the others."""

FOLDERS: Final = frozenset({"programs", "kernels", "parts", "blobs"})
REQUIRED: Final = frozenset({MANIFEST, REPLAY, CONSTANTS, RECORDS, CONFIG})
MEMBERS_AT_MOST: Final = 8192

MIB: Final = 1 << 20
SIGNATURE_BYTES_AT_MOST: Final = 4096


class _Rule(NamedTuple):
    pattern: re.Pattern[str]
    size_bytes_at_most: int


_RULES: Final = tuple(
    _Rule(re.compile(pattern, re.ASCII), size)
    for pattern, size in (
        (r"manifest\.json", 4 * MIB),
        (r"programs/[a-z][a-z0-9_.=-]{0,63}\.json", 16 * MIB),
        (r"replay\.json", 16 * MIB),
        (r"kernels/[0-9a-f]{64}\.(cubin|so)", 64 * MIB),
        (r"constants\.safetensors", 1024 * MIB),
        (r"weights\.safetensors", 1 << 44),
        (r"records\.jsonl\.gz", 256 * MIB),
        (r"config\.yaml", 4 * MIB),
        (r"report\.html", 64 * MIB),
    )
)

_BUNDLE_RULES: Final = tuple(
    _Rule(re.compile(pattern, re.ASCII), size)
    for pattern, size in (
        (r"bundle\.json", 1 * MIB),
        (r"parts/[0-9a-f]{64}\.json", 4 * MIB),
        (r"blobs/[0-9a-f]{64}", 1 << 44),
    )
)


def limit_of(member: str) -> int | None:
    """Return the largest size a member may have, in bytes; `None` if an artifact has no such member.

    The names accepted have no leading slash, no backslash and no part that is `..`, so none lies outside the artifact.
    """
    return next((rule.size_bytes_at_most for rule in _RULES if rule.pattern.fullmatch(member)), None)


def bundle_limit_of(member: str) -> int | None:
    """Return the largest size a bundle's member may have, in bytes; `None` if a bundle has no such member.

    What a blob is, and so how large it may be, its part's manifest says.
    """
    return next((rule.size_bytes_at_most for rule in _BUNDLE_RULES if rule.pattern.fullmatch(member)), None)


def stored_limit_of(member: str) -> int | None:
    """Return the largest size of a member of whatever is stored, an artifact or a bundle; `None` if neither has it."""
    if member == SIGNATURE:
        return SIGNATURE_BYTES_AT_MOST
    limit = limit_of(member)
    return bundle_limit_of(member) if limit is None else limit


def part_member(digest: str) -> str:
    """Return where a part's manifest is stored in a bundle."""
    return f"parts/{digest}.json"


def blob_member(sha256: str) -> str:
    """Return where a file of a bundle's parts is stored."""
    return f"blobs/{sha256}"


def program_member(name: str) -> str:
    """Return where a phase's program is stored."""
    return f"programs/{name}.json"


def program_name(member: str) -> str | None:
    """Return the phase whose program a member is; `None` for other members."""
    folder, _, rest = member.partition("/")
    return rest.removesuffix(".json") if folder == "programs" else None


def kernel_member(sha256: str, *, cuda: bool) -> str:
    """Return where a kernel's machine code is stored: a cubin, or a shared library for the CPU."""
    return f"kernels/{sha256}.{'cubin' if cuda else 'so'}"
