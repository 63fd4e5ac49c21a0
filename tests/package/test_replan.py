"""From an artifact back to the plan it was tuned from, with the weights' layouts taken out."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import two_layers
from forge import files_of, rehash, write_archive
from settled_tuning import settled

from tune_model.package.format.records import StepRecord, read_records, write_records
from tune_model.package.format.wire import ArtifactError
from tune_model.package.read import open_artifact
from tune_model.package.replan import ReplanError, plan_of
from tune_model.package.write import write_artifact
from tune_model.runtime.program import Pack, Transpose
from tune_model.tune.choice import WholeStep


@pytest.mark.parametrize("layouts", [(), (("a1", "transposed"),), (("a1", "mkldnn"),)])
def test_the_plan_comes_back(tmp_path: Path, layouts: tuple[tuple[str, str], ...]):
    tuning = settled(*layouts)
    artifact = open_artifact(write_artifact(tmp_path / "a.tuned", two_layers.contents(tuning=tuning)))
    kinds = {type(t) for w in artifact.programs["forward"].weights for t in w.transforms}
    assert kinds == {Transpose for _, layout in layouts if layout == "transposed"} | {
        Pack for _, layout in layouts if layout != "transposed"
    }
    assert plan_of(artifact) == two_layers.tuning(b"").plan


def test_steps_that_were_timed_are_kept_and_belong_to_no_plan(tmp_path: Path):
    """They used to be notes of the plan, so an artifact tuned again on another machine told the old one's times."""
    step = WholeStep("forward", (("batch", 1),), 4.0, 8.0, 1.9, 2.1)
    tuning = msgspec.structs.replace(settled(), steps=(step,))
    artifact = open_artifact(write_artifact(tmp_path / "a.tuned", two_layers.contents(tuning=tuning)))
    assert [r.step for r in artifact.records() if isinstance(r, StepRecord)] == [step]
    assert plan_of(artifact) == two_layers.tuning(b"").plan


@pytest.mark.parametrize("field", ["median_us", "baseline_us", "gain_low", "gain_high"])
@pytest.mark.parametrize("value", [-1.0, 1e300])
def test_steps_that_no_measurement_gives_are_refused(field: str, value: float):
    step = WholeStep("forward", (), 4.0, 8.0, 1.9, 2.1)
    wrong = msgspec.structs.replace(step, **{field: value})
    data = write_records(msgspec.structs.replace(settled(), steps=(step, wrong)))
    with pytest.raises(ArtifactError, match="times and gains of 0, or"):
        list(read_records(data, "records"))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"gain_low": 2.2}, "gain_low"),
        ({"point": (("batch", 0),)}, "point"),
        ({"point": (("batch", 2**31),)}, "point"),
        ({"program": "<script>"}, "program"),
    ],
)
def test_steps_of_nothing_that_is_there_are_refused(tmp_path: Path, fields: dict[str, Any], field: str):
    step = msgspec.structs.replace(WholeStep("forward", (("batch", 1),), 4.0, 8.0, 1.9, 2.1), **fields)
    files = files_of(write_artifact(tmp_path / "a.tuned", two_layers.contents(tuning=settled())))
    files["records.jsonl.gz"] = write_records(msgspec.structs.replace(settled(), steps=(step,)))
    artifact = open_artifact(write_archive(tmp_path / "forged.tuned", rehash(files)))
    with pytest.raises(ArtifactError, match=rf"\$\.step\.{field} is .*; expected "):
        list(artifact.records())


def test_records_of_another_model_are_refused(tmp_path: Path):
    path = write_artifact(tmp_path / "a.tuned", two_layers.contents(tuning=settled()))
    files = files_of(path)
    tuning = settled()
    (first, *rest) = tuning.plan.tasks
    other = msgspec.structs.replace(first, sites=(msgspec.structs.replace(first.sites[0], dims=(7,)),))
    plan = msgspec.structs.replace(tuning.plan, tasks=(other, *rest))
    files["records.jsonl.gz"] = write_records(msgspec.structs.replace(tuning, plan=plan))
    assert list(read_records(files["records.jsonl.gz"], "records"))
    forged = write_archive(tmp_path / "forged.tuned", rehash(files))
    with pytest.raises(ReplanError, match="is not what program 'forward' holds"):
        plan_of(open_artifact(forged))
