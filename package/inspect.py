"""What is inside an artifact, as facts: for `tune-model inspect`, for reports, for looking before trusting.

Needs no torch, no device and no weights, and runs nothing of the artifact.
"""

from collections import Counter
from collections.abc import Mapping

import msgspec

from tune_model.package.contents import code_kinds
from tune_model.package.fingerprints import CudaToRun
from tune_model.package.format.members import kernel_member
from tune_model.package.format.records import ChoiceRecord, NoteRecord, StepRecord, TaskRecord
from tune_model.package.memory import MemoryPlan, activation_bytes, plan_memory, type_bytes
from tune_model.package.read import Artifact
from tune_model.runtime.kernel import CpuLaunch, CudaLaunch
from tune_model.runtime.program import Apply, Program
from tune_model.runtime.replay import Entry
from tune_model.tune.candidate import label
from tune_model.tune.choice import WholeStep

__all__ = ["ArtifactFacts", "KernelFacts", "MemoryFacts", "ProgramFacts", "TaskFacts", "describe"]


class MemoryFacts(msgspec.Struct, frozen=True):
    """Memory of one call at one grid point, in bytes.

    Attributes:
        point: Value of every symbol.
        activations: Most that is alive between two steps when nothing shares memory: an upper bound.
        caches: Cache inputs, kept by the caller between calls.
    """

    point: dict[str, int]
    activations: int
    caches: int


class ProgramFacts(msgspec.Struct, frozen=True):
    """One phase.

    Attributes:
        name: Phase.
        symbols: Sizes that may differ between calls, with their ranges.
        inputs: Name, dtype and shape of each.
        outputs: Names.
        steps: How many.
        forms: Steps that apply tuned forms, counted by the forms' kind.
        calls: Steps that are operator calls, counted by operator, most frequent first.
        distinct_forms: How many different forms.
        weights: How many weights are read.
        weight_bytes: Their size after the transforms.
        memory: At the largest grid point.
    """

    name: str
    symbols: tuple[tuple[str, int, int], ...]
    inputs: tuple[tuple[str, str, tuple[int | str, ...]], ...]
    outputs: tuple[str, ...]
    steps: int
    forms: dict[str, int]
    calls: dict[str, int]
    distinct_forms: int
    weights: int
    weight_bytes: int
    memory: MemoryFacts


class TaskFacts(msgspec.Struct, frozen=True):
    """One task and what won it.

    Attributes:
        key: Of the task.
        label: For people.
        sites: `program point x occurrences` for each place it occurs in.
        winner: Candidate.
        median_us: The winner's time.
        baseline_us: The extern's, in the same final.
        speedup: baseline / winner.
        gain_low: Lower end of the 95 % interval of the speedup.
        gain_high: Upper end.
        status: As in `tune.choice.Choice`.
        share: Of the weighted time of all tasks, 0 to 1; 0 for a disturbed one, whose time may be anything.
        measured: Candidates that were timed.
        rejected: Candidates that were out, counted by reason.
    """

    key: str
    label: str
    sites: tuple[str, ...]
    winner: str
    median_us: float
    baseline_us: float
    speedup: float
    gain_low: float
    gain_high: float
    status: str
    share: float
    measured: int
    rejected: dict[str, int]


class KernelFacts(msgspec.Struct, frozen=True):
    """One piece of machine code.

    Attributes:
        file: Its name in the artifact.
        size_bytes: Of the file.
        functions: Entries that are launched.
        entries: How many entries of the replay table launch it.
        candidates: Labels of these entries' winners.
    """

    file: str
    size_bytes: int
    functions: tuple[str, ...]
    entries: int
    candidates: tuple[str, ...]


class ArtifactFacts(msgspec.Struct, frozen=True):
    """Everything.

    Attributes:
        name: Of the model.
        architecture: Class of the model, if known.
        task: `causal-lm`, `encoder` or `forward`.
        dtype: Of weights and activations.
        parameters: Elements of all weights.
        weight_bytes: Their size.
        weights: `external` or `embed`.
        target: What it was tuned on.
        tune_model: Version that wrote it.
        schema: Version of the format.
        digest: The artifact's identity.
        signed_by: Public key of whoever claims to have signed it, in hexadecimal; not checked here.
        size_bytes: Of all files.
        programs: By phase.
        memory: What it occupies when it is served.
        tasks: Largest share of the time first.
        steps: Whole programs as they were timed while tuning.
        kernels: By file.
        notes: How it was traced.
    """

    name: str
    architecture: str | None
    task: str
    dtype: str
    parameters: int
    weight_bytes: int
    weights: str
    target: str
    tune_model: str
    schema: int
    digest: str
    signed_by: str | None
    size_bytes: int
    programs: tuple[ProgramFacts, ...]
    memory: MemoryPlan
    tasks: tuple[TaskFacts, ...]
    steps: tuple[WholeStep, ...]
    kernels: tuple[KernelFacts, ...]
    notes: tuple[str, ...]


def describe(artifact: Artifact) -> ArtifactFacts:
    """Return what is inside an artifact.

    Raises:
        ArtifactError: Its records cannot be read (opening does not unpack them).
    """
    manifest = artifact.manifest
    grids = {phase.name: phase.grid for phase in manifest.request.phases}
    tasks: dict[str, TaskRecord] = {}
    choices: list[ChoiceRecord] = []
    steps: list[WholeStep] = []
    notes: list[str] = []
    for record in artifact.records():
        match record:
            case TaskRecord():
                tasks[record.planned.key] = record
            case ChoiceRecord():
                choices.append(record)
            case StepRecord():
                steps.append(record.step)
            case NoteRecord():
                notes.append(record.text)
    return ArtifactFacts(
        name=manifest.name,
        architecture=manifest.model.architecture,
        task=manifest.request.task,
        dtype=manifest.request.dtype,
        parameters=manifest.model.parameters,
        weight_bytes=manifest.model.weight_bytes,
        weights=manifest.weights,
        target=manifest.target.name,
        tune_model=manifest.tune_model,
        schema=manifest.schema,
        digest=manifest.digest,
        signed_by=None if artifact.signature is None else artifact.signature.public_key,
        size_bytes=sum(len(data) for data in artifact.files.values()),
        programs=tuple(_program(p, grids.get(name, {})) for name, p in artifact.programs.items()),
        memory=plan_memory(
            artifact.programs,
            artifact.replay,
            grids,
            rows=manifest.request.max_batch,
            weight_bytes=manifest.model.weight_bytes,
            graphs=isinstance(manifest.must_match_to_run, CudaToRun),
        ),
        tasks=_tasks(tasks, choices),
        steps=tuple(steps),
        kernels=_kernels(artifact),
        notes=tuple(notes),
    )


def _program(program: Program, grid: Mapping[str, tuple[int, ...]]) -> ProgramFacts:
    forms: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for step in program.steps:
        if isinstance(step, Apply):
            forms[program.forms[step.form].kind] += 1
        else:
            calls[step.op] += 1
    return ProgramFacts(
        name=program.name,
        symbols=tuple((s.name, s.minimum, s.maximum) for s in program.symbols),
        inputs=tuple((i.name, i.type.dtype, i.type.shape) for i in program.inputs),
        outputs=tuple(output.name for output in program.outputs),
        steps=len(program.steps),
        forms=dict(forms.most_common()),
        calls=dict(calls.most_common()),
        distinct_forms=len(program.forms),
        weights=len(program.weights),
        weight_bytes=sum(type_bytes(weight.type, {}) for weight in program.weights),
        memory=_memory(program, grid),
    )


def _memory(program: Program, grid: Mapping[str, tuple[int, ...]]) -> MemoryFacts:
    point = {s.name: max(grid.get(s.name, (s.default or s.minimum,))) for s in program.symbols}
    caches = sum(type_bytes(i.type, point) for i in program.inputs if i.role == "cache")
    return MemoryFacts(point, activation_bytes(program, point), caches)


def _tasks(tasks: Mapping[str, TaskRecord], choices: list[ChoiceRecord]) -> tuple[TaskFacts, ...]:
    rows = [(tasks[choice.task].planned, choice) for choice in choices if choice.task in tasks]
    parts = [0.0 if c.status == "disturbed" else planned.weight * c.median_us for planned, c in rows]
    total = sum(parts) or 1.0
    facts = [
        TaskFacts(
            key=planned.key,
            label=planned.label,
            sites=tuple(f"{s.program} {_point(s.point)} x{s.occurrences}" for s in planned.sites),
            winner=label(choice.winner),
            median_us=choice.median_us,
            baseline_us=choice.baseline_us,
            speedup=choice.baseline_us / choice.median_us if choice.median_us else 1.0,
            gain_low=choice.gain_low,
            gain_high=choice.gain_high,
            status=choice.status,
            share=part / total,
            measured=len({m.candidate for m in choice.measurements}),
            rejected=dict(Counter(r.reason for _, r in choice.rejections).most_common()),
        )
        for (planned, choice), part in zip(rows, parts, strict=True)
    ]
    return tuple(sorted(facts, key=lambda fact: (-fact.share, fact.key)))


def _point(point: tuple[tuple[str, int], ...]) -> str:
    return " ".join(f"{name}={value}" for name, value in point)


def _kernels(artifact: Artifact) -> tuple[KernelFacts, ...]:
    users: dict[str, list[Entry]] = {}
    functions: dict[str, set[str]] = {}
    for entries in artifact.replay.forms.values():
        for entry in entries:
            launches = [step for step in entry.kernel.steps if isinstance(step, CudaLaunch | CpuLaunch)]
            for code in {launch.code for launch in launches}:
                users.setdefault(code, []).append(entry)
            for launch in launches:
                functions.setdefault(launch.code, set()).add(launch.entry)
    kinds = code_kinds([entry.kernel for entries in artifact.replay.forms.values() for entry in entries])
    return tuple(
        KernelFacts(
            file=kernel_member(code, cuda=kinds[code] == "cubin"),
            size_bytes=len(artifact.code[code]),
            functions=tuple(sorted(functions[code])),
            entries=len(entries),
            candidates=tuple(sorted({entry.candidate for entry in entries})),
        )
        for code, entries in sorted(users.items())
    )
