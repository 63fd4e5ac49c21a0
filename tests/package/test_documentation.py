"""docs/artifact.md names every field that is stored, and no limit or version that is not."""

import re
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from tune_model.extract import request, task
from tune_model.package import fingerprints, read, signature
from tune_model.package.format import bundle, consistency, manifest, members, records, tensors, wire
from tune_model.pipeline.report.words import STATUS_MEANINGS
from tune_model.runtime import expression, kernel, program, replay
from tune_model.tune import candidate, choice, target
from tune_model.tune.records import facts
from tune_model.tune.search import descent

# Where each stored struct is described: how the passage begins, and which structs it describes. A passage is the table
# that follows it, or goes on to the end of the paragraph, list item or row.
TABLES: dict[str, type[msgspec.Struct]] = {
    "## manifest.json": manifest.Manifest,
    "### request": request.Request,
    "## programs/": program.Program,
    "A form is a small function": program.Form,
    "`forms`: by fingerprint, entries": replay.Entry,
    "| `bundle.json` | meaning |": bundle.Bundle,
    "## signature.json": signature.Signature,
}
PASSAGES: dict[str, tuple[type[msgspec.Struct], ...]] = {
    "| `model` |": (manifest.ModelFacts,),
    "| `files` |": (manifest.FileFacts,),
    "| `source` |": (request.TransformersSource, request.FactorySource, request.ExportedSource),
    "| `phases` |": (request.Phase,),
    "| `inputs` | of a": (request.ModelInput,),
    "| `rules` |": (task.NumericRules,),
    "`target` of `type: cuda`:": (target.CudaTarget,),
    "Of `type: cpu`:": (target.CpuTarget,),
    "| must match to run |": (fingerprints.CudaToRun, fingerprints.CpuToRun),
    "| must match to stay optimal |": (fingerprints.CudaToStayOptimal, fingerprints.CpuToStayOptimal),
    "| `symbols` |": (program.Symbol,),
    "| `inputs` | in calling order": (program.Input,),
    "| `weights` | `name`": (program.Weight,),
    "| `constants` |": (program.Constant,),
    "| `outputs` |": (program.Output,),
    "A type is": (program.TensorType,),
    "- `type: call`": (
        program.Call,
        program.Ref,
        program.Size,
        program.Items,
        program.TorchName,
        program.Real,
    ),
    "- `type: apply`": (program.Apply,),
    "| `parameters` |": (program.Parameter, program.ValueRange),
    "A weight's transforms": (program.Concatenate, program.Transpose, program.Cast, program.Pack),
    "`forms`: by fingerprint, entries": (replay.Replay,),
    "A kernel has": (kernel.Kernel, kernel.Workspace, kernel.Within, kernel.Multiple, kernel.Aligned),
    "- `type: cuda`": (kernel.CudaLaunch, kernel.Pointer, kernel.Integer, kernel.Scalar, kernel.Null),
    "- `type: cpu`": (kernel.CpuLaunch,),
    "- `type: cublaslt`": (kernel.LibraryMatmul, kernel.LibraryAlgorithm),
    "- `type: task`": (records.TaskRecord, task.PlannedTask, task.Task, task.Site),
    "- `type: choice`": (
        records.ChoiceRecord,
        candidate.Candidate,
        choice.Measurement,
        candidate.Rejected,
        facts.Trail,
        descent.Footprint,
        descent.Tried,
    ),
    "- `type: step`": (records.StepRecord, choice.WholeStep),
    "- `type: skipped`": (records.SkippedRecord, task.Skipped),
    "- `type: note`": (records.NoteRecord,),
    "| `parts` | in order": (bundle.PartFacts,),
}

# Not stored: what a probe finds, what a comparison says, what tune returns and extract plans as a whole, and what the
# records database holds beside it.
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

STORED = {
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
        signature,
    )
    for name, struct in vars(module).items()
    if isinstance(struct, type) and issubclass(struct, msgspec.Struct) and not name.startswith("_")
    if struct is not msgspec.Struct and name not in NOT_STORED
}


@pytest.fixture(scope="session")
def page(repository: Path) -> str:
    return (repository / "docs" / "artifact.md").read_text(encoding="utf-8")


def passage(page: str, begins: str) -> str:
    """The row, list item or paragraph that begins so."""
    (at,) = [match.start() for match in re.finditer(re.escape(begins), page)]
    ends = r"\n" if begins.startswith("|") else r"\n\n|\n(?=[-#|])|(?=\bOf `type: )"
    end = re.search(ends, page[at + 1 :])
    return page[at:] if end is None else page[at : at + 1 + end.start()]


def test_every_stored_struct_has_its_passage():
    described = {*TABLES.values(), *(struct for structs in PASSAGES.values() for struct in structs)}
    assert {struct.__name__ for struct in STORED - described} == set()


@pytest.mark.parametrize("begins", TABLES)
def test_tables_have_a_row_for_each_field(page: str, begins: str):
    (_, after) = page.split(begins, 1) if begins.startswith("|") else page.split(f"\n{begins}", 1)
    table = re.search(r"(?:^|\n)((?:\|.*\n)+)", after)
    assert table is not None
    rows = [cell for line in table[1].splitlines() for cell in re.findall(r"`(\w+)`", line.split(" | ")[0])]
    assert sorted(rows) == sorted(TABLES[begins].__struct_fields__)


@pytest.mark.parametrize("begins", PASSAGES)
def test_passages_name_each_field_as_often_as_structs_have_it(page: str, begins: str):
    text = passage(page, begins)
    fields = Counter(field for struct in PASSAGES[begins] for field in struct.__struct_fields__)
    if not begins.startswith("| must match"):  # there the kinds are columns
        fields.update(tag for s in PASSAGES[begins] if isinstance(tag := s.__struct_config__.tag, str))
    words = Counter(re.findall(r"`(?:type: )?(\w+)`", text))
    assert fields - words == Counter()


def test_what_a_choice_may_say_is_named(page: str, repository: Path):
    text = passage(page, "- `type: choice`")
    command = (repository / "docs" / "commands" / "tune.md").read_text(encoding="utf-8")
    for status in choice.STATUSES:
        assert re.search(rf"`{status}(: \.\.\.)?`", text), status
        assert re.search(rf"`{status}(: \.\.\.)?`", command), status
    assert set(STATUS_MEANINGS) == choice.STATUSES
    for reason in candidate.REASONS:
        assert f"`{reason}`" in text, reason


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
