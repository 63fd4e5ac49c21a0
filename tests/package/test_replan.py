"""From an artifact back to the plan it was tuned from, with the weights' layouts taken out."""

from pathlib import Path

import handmade
import msgspec
import pytest
from forge import files_of, rehash, write_archive

from tune_model.package.format.records import read_records, write_records
from tune_model.package.read import open_artifact
from tune_model.package.replan import ReplanError, plan_of
from tune_model.package.write import write_artifact
from tune_model.runtime.kernel import Kernel
from tune_model.runtime.program import Pack, Transpose, fingerprint
from tune_model.tune.choice import Tuning
from tune_model.tune.relayout import apply_layouts


def settled(*layouts: tuple[str, str]) -> Tuning:
    """The handmade tuning with weights re-laid out, as tune settles them."""
    tuning = handmade.tuning(b"")
    choices = tuple(msgspec.structs.replace(c, kernel=Kernel(handmade.FORM.body)) for c in tuning.choices)
    plan = apply_layouts(tuning.plan, {fingerprint(handmade.FORM): layouts})
    return msgspec.structs.replace(tuning, plan=plan, choices=choices, code={})


@pytest.mark.parametrize("layouts", [(), (("a1", "transposed"),), (("a1", "mkldnn"),)])
def test_the_plan_comes_back(tmp_path: Path, layouts: tuple[tuple[str, str], ...]):
    tuning = settled(*layouts)
    artifact = open_artifact(write_artifact(tmp_path / "a.tuned", handmade.contents(tuning=tuning)))
    kinds = {type(t) for w in artifact.programs["forward"].weights for t in w.transforms}
    assert kinds == {Transpose for _, layout in layouts if layout == "transposed"} | {
        Pack for _, layout in layouts if layout != "transposed"
    }
    assert plan_of(artifact) == handmade.tuning(b"").plan


def test_records_of_another_model_are_refused(tmp_path: Path):
    path = write_artifact(tmp_path / "a.tuned", handmade.contents(tuning=settled()))
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
