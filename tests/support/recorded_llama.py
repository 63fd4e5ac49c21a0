"""Llama-3-8B as an H200 tuned it: the real plan, with the recorded times as its choices. For reports of a real size.

The recording (`recorded_gpu`) is of an earlier plan in which some pointwise tasks had other shapes; those take the
times of the recorded task that is most like them.
"""

import re
from pathlib import Path

from recorded_gpu import Recording, read

from tune_model.extract.plan import Extraction, extract
from tune_model.extract.task import Plan, PlannedTask
from tune_model.package.contents import ArtifactContents
from tune_model.pipeline.config import dump_config, load_config
from tune_model.pipeline.request import make_request
from tune_model.runtime.kernel import Kernel
from tune_model.tune.candidate import Candidate, Rejected
from tune_model.tune.choice import Choice, Measurement, Tuning
from tune_model.tune.records.facts import Trail
from tune_model.tune.search.descent import Rules, descend
from tune_model.tune.target import CudaTarget

HEADER, RECORDINGS = read()
TARGET = CudaTarget(90, HEADER.device, 132, 50 << 20, 232448, 65536, 140 << 30, 1980, "580", "13.0", "2.11", "3.6")


def llama_contents(repository: Path) -> ArtifactContents:
    """Trace Llama-3-8B (seconds) and give every task its recorded race."""
    loaded = load_config(str(repository / "configs" / "llama-3-8b.yaml"))
    request = make_request(loaded.config, loaded.folder)
    extraction: Extraction = extract(request, check=False)
    return ArtifactContents(
        name=loaded.config.name,
        request=request,
        tuning=recorded_tuning(extraction.plan),
        constants=extraction.constants,
        config_yaml=dump_config(loaded.config),
        architecture="LlamaForCausalLM",
    )


def recorded_tuning(plan: Plan) -> Tuning:
    """Return the plan as tuned."""
    choices = tuple(_choice(task, _recording(task)) for task in plan.tasks)
    return Tuning(plan, TARGET, choices, {}, 0, 0, 0.0)


def _words(label: str) -> str:
    """Return a label with what changed since the recording taken out: heads that are one task, the order of names."""
    if "rotary" in label:
        return re.sub(r"x(8|32|40)x", "xHx", label)
    size, _, names = label.removeprefix("pointwise 1x" if label.count("x") > 1 else "").partition(": ")
    return f"{size.removeprefix('pointwise ')}: {sorted(names.split(', '))}"


def _recording(task: PlannedTask) -> Recording:
    alike = [r for r in RECORDINGS if r.task == task.key or r.label == task.label]
    alike += [r for r in RECORDINGS if r.kind == task.task.form.kind and _words(r.label) == _words(task.label)]
    alike += [r for r in RECORDINGS if r.kind == task.task.form.kind]
    return alike[0]


def _choice(task: PlannedTask, recording: Recording) -> Choice:
    raced = recording.raced()
    extern = Candidate("aten")
    rungs: list[tuple[int, Measurement]] = []
    rejections: list[tuple[Candidate, Rejected]] = []
    for candidate, found in raced.items():
        if found.refused:
            rejections.append((candidate, Rejected(found.refused, "as recorded")))
        rungs += [
            (rung, Measurement(candidate, *times, 3 if rung == 0 else 8, "race", 1e-3))
            for rung, times in enumerate(found.race)
        ]
        if found.final is not None:
            rungs.append((100, Measurement(candidate, *found.final, 31, "final", 1e-3)))
    measurements = tuple(m for _, m in sorted(rungs, key=lambda pair: pair[0]))
    finals = {c: f.final for c, f in raced.items() if f.final is not None}
    winner = min(finals, key=lambda c: finals[c][0], default=extern)
    base, best = finals.get(extern, (1.0, 1.0, 1.0)), finals.get(winner, (1.0, 1.0, 1.0))
    won = winner != extern and best[2] < base[1]
    if not won:
        winner, best = extern, base
    low, high = (base[1] / best[2], base[2] / best[1]) if won else (1.0, 1.0)
    kernel = Kernel(task.task.form.body)
    status = "tuned" if won else "no gain"
    trails = _trails(recording)
    return Choice(
        task.key, winner, kernel, best[0], base[0], low, high, measurements, tuple(rejections), status, trails
    )


def _trails(recording: Recording) -> tuple[Trail, ...]:
    """Climb the recorded times of reductions and pointwise kernels again, for their footprints."""
    if recording.kind not in {"reduction", "pointwise"}:
        return ()
    trails: list[Trail] = []
    for name in recording.families:
        times = {c.config: f.race[0][0] if f.race else None for c, f in recording.raced().items() if c.family == name}
        if name != "aten":
            found = descend(next(iter(times)), list(times), times.__getitem__, lambda _: None, Rules(diagonals=True))
            trails.append(Trail(Candidate(name), found.footprints))
    return tuple(trails)
