"""docs/artifact.md names every field that is stored, and no limit or version that is not."""

from pathlib import Path

import msgspec
import pytest

from tune_model.extract import request, task
from tune_model.package import fingerprints, read
from tune_model.package.format import bundle, consistency, manifest, members, records, tensors, wire
from tune_model.runtime import expression, kernel, program, replay
from tune_model.tune import candidate, choice, target

# Not stored: what a probe finds, what a comparison says, what tune returns and extract plans as a whole.
NOT_STORED = {
    "CudaSystem",
    "CpuSystem",
    "Comparison",
    "Compatibility",
    "Selection",
    "Tuning",
    "Choice",
    "Plan",
    "Rival",
    "Built",
}

STORED = sorted(
    {
        struct
        for module in (
            request,
            task,
            fingerprints,
            manifest,
            bundle,
            records,
            kernel,
            program,
            replay,
            candidate,
            choice,
            target,
        )
        for name, struct in vars(module).items()
        if isinstance(struct, type) and issubclass(struct, msgspec.Struct) and not name.startswith("_")
        if struct is not msgspec.Struct and name not in NOT_STORED
    },
    key=lambda struct: struct.__qualname__,
)


@pytest.fixture(scope="session")
def page(repository: Path) -> str:
    return (repository / "docs" / "artifact.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("struct", STORED, ids=lambda struct: struct.__qualname__)
def test_every_field_is_named(page: str, struct: type[msgspec.Struct]):
    missing = [field for field in struct.__struct_fields__ if f"`{field}`" not in page]
    assert not missing
    tag = struct.__struct_config__.tag
    assert tag is None or f"`{tag}`" in page or f"`type: {tag}`" in page


def test_every_file_is_named(page: str):
    for name in (*members.REQUIRED, members.WEIGHTS, members.REPORT, "programs/<phase>.json", "kernels/<sha256>.cubin"):
        assert name in page
    for name in (members.BUNDLE, "parts/<digest>.json", "blobs/<sha256>"):
        assert name in page


def test_limits_and_versions_are_the_codes(page: str):
    assert f"schema version {manifest.SCHEMA}" in page
    assert f"bundle format, {bundle.BUNDLE_SCHEMA}" in page
    assert f"At most {bundle.PARTS_AT_MOST}\nparts" in page
    assert f"`launch_abi` ({fingerprints.LAUNCH_ABI})" in page
    assert f"At most {members.MEMBERS_AT_MOST} files" in page
    assert f"nested {wire.DEPTH_AT_MOST} deep" in page
    assert f"a symbolic size of {expression.MAX_LENGTH} characters" in page
    assert f"{records.TOTAL_AT_MOST >> 30} GiB unpacked" in page
    assert f"together {read.DOCUMENT_BYTES_AT_MOST >> 20} MiB and a million values" in page
    assert read.DOCUMENT_ITEMS_AT_MOST == 1_000_000
    assert f"{tensors.TENSORS_AT_MOST} tensors" in page
    assert f"{consistency.RANK_AT_MOST} dims, {consistency.PARAMETERS_AT_MOST} parameters of a form" in page
    assert f"characters and {expression.MAX_TOKENS} tokens" in page
    assert f"{consistency.TEXT_AT_MOST >> 10} KiB of different ones" in page
    sizes = {"programs/a.json": "16 MiB", "manifest.json": "4 MiB", "constants.safetensors": "1 GiB"}
    for member, text in sizes.items():
        count, unit = text.split()
        assert members.limit_of(member) == int(count) << {"MiB": 20, "GiB": 30}[unit]
        assert text in page
