"""Two groupings of a Llama's steps compete: recorded times decide, and what is written computes the same."""

from pathlib import Path

import msgspec
import pytest
import small_models
import torch
from tuning_fakes import TARGET, RecordedDevice, without_times
from untuned import untuned

from tune_model.extract.plan import Extraction, extract
from tune_model.extract.regions.group import Grouping
from tune_model.extract.task import all_tasks
from tune_model.package.contents import build_replay
from tune_model.package.verification.original import build_original
from tune_model.runtime.program import Form
from tune_model.runtime.tuned import ModelParts, TunedModel
from tune_model.tune.candidate import Candidate, Rejected
from tune_model.tune.choice import Tuning
from tune_model.tune.device import Bench, Passed
from tune_model.tune.families.aten import FAMILY as ATEN
from tune_model.tune.options import TuneOptions
from tune_model.tune.tuner import tune_with
from tune_model.tune.workshop import Workshop

REQUEST = small_models.decoder("llama")
PROMPTS = [[n % 100 + 3 for n in range(start, 16 * start, start)] + [2] for start in (3, 7)]


class FormTimes(RecordedDevice):
    """A device whose times follow from the form that is raced."""

    def __init__(self) -> None:
        super().__init__({})
        self.form: Form | None = None

    def open(self, bench: Bench) -> Passed | Rejected:
        self.form = bench.task.form
        return super().open(bench)

    def _us(self, candidate: Candidate) -> float:
        assert self.form is not None
        return self.form_us(self.form)

    def form_us(self, form: Form) -> float:
        raise NotImplementedError


class Residuals(FormTimes):
    """Every region takes 10 us; adding a residual takes a matmul or a norm so much longer."""

    def __init__(self, matmul: float, reduction: float) -> None:
        super().__init__()
        self.extra = {"matmul": matmul, "reduction": reduction}

    def form_us(self, form: Form) -> float:
        adds = any(c.op == "aten.add.Tensor" for c in form.body)
        return 10.0 + (self.extra.get(form.kind, 0.0) if adds else 0.0)


@pytest.fixture(scope="module")
def extraction() -> Extraction:
    return extract(REQUEST, widest=Grouping(sums_with_norms=True))


class Turning(FormTimes):
    """A region takes 10 us; a rotary embedding of its own (queries, keys) so much, both within the attention more."""

    def __init__(self, apart: float, within: float) -> None:
        super().__init__()
        self.apart = apart
        self.within = within

    def form_us(self, form: Form) -> float:
        if not any(c.op == "aten.cat.default" for c in form.body):
            return 10.0
        return 10.0 + self.within if form.kind == "attention" else self.apart


@pytest.mark.parametrize(("apart", "within", "together"), [(1.0, 1.5, True), (1.0, 2.5, False)])
def test_times_decide_where_heads_are_turned(tmp_path: Path, apart: float, within: float, together: bool):
    request = small_models.decoder("qwen3")
    found = extract(request, widest=Grouping(heads_with_attention=True))
    tuning = tune(found, tmp_path, Turning(apart, within))
    decode = next(p for p in tuning.plan.programs if p.name == "decode")
    turned = [f.kind == "attention" for f in decode.forms.values() if any(c.op == "aten.cat.default" for c in f.body)]
    assert any(turned) == together
    assert f"grouping chosen: {'decode: rotary' if together else 'as usual'}" in tuning.plan.notes[-1]
    original = build_original(request, None, torch.device("cpu"))
    texts = []
    for plan in (tuning, untuned(msgspec.structs.replace(found.plan, rivals=()))):
        parts = ModelParts(plan.plan.programs, found.constants, build_replay(plan), {})
        texts.append(TunedModel(parts, original, "cpu").complete(PROMPTS, 6))
    assert texts[0] == texts[1]


def tune(extraction: Extraction, folder: Path, device: RecordedDevice) -> Tuning:
    options = TuneOptions(folder / "records.sqlite", folder / "kernels")
    return tune_with(extraction.plan, Workshop((ATEN,), TARGET, device, options, lambda _: None))


def adds(tuning: Tuning) -> set[str]:
    """The kinds of regions that add residuals."""
    forms = [f for p in tuning.plan.programs for f in p.forms.values() if f.kind != "pointwise"]
    return {f.kind for f in forms if any(c.op == "aten.add.Tensor" for c in f.body)}


def greedy(extraction: Extraction, tuning: Tuning) -> list[list[int]]:
    parts = ModelParts(tuning.plan.programs, extraction.constants, build_replay(tuning), {})
    original = build_original(REQUEST, None, torch.device("cpu"))
    return TunedModel(parts, original, "cpu", strict=True).complete(PROMPTS, 6)


@pytest.mark.parametrize(("matmul", "reduction", "expected"), [(1.0, 9.0, "matmul"), (9.0, 1.0, "reduction")])
def test_times_decide_who_adds_residuals(
    extraction: Extraction, tmp_path: Path, matmul: float, reduction: float, expected: str
):
    device = Residuals(matmul, reduction)
    tuning = tune(extraction, tmp_path, device)
    assert adds(tuning) == {expected}
    assert tuning.plan.rivals == ()
    assert [choice.task for choice in tuning.choices] == [task.key for task in tuning.plan.tasks]
    # What both groupings have in common was raced once, and what only another one has when the rest was.
    opened = [key for kind, key in device.asked if kind == "open"]
    own = {task.key for task in extraction.plan.tasks}
    assert set(opened[: len(own)]) == own
    assert sorted(opened) == sorted(task.key for task in all_tasks(extraction.plan))
    assert tuning.plan.notes[-1].startswith("grouping chosen: ")
    again = tune(extraction, tmp_path, RecordedDevice({}))
    assert again.measured == 0
    assert without_times(again) == without_times(tuning)


def test_both_groupings_generate_the_same(extraction: Extraction, tmp_path: Path):
    made = []
    for name, device in (("a", Residuals(1.0, 9.0)), ("b", Residuals(9.0, 1.0))):
        made.append(greedy(extraction, tune(extraction, tmp_path / name, device)))
    assert made[0] == made[1]
    assert all(len(tokens) == 6 for tokens in made[0])


def test_races_that_were_not_run_leave_the_grouping_as_it_was(extraction: Extraction, tmp_path: Path):
    own = msgspec.structs.replace(extraction.plan, rivals=())
    shop = Workshop((ATEN,), TARGET, Residuals(9.0, 1.0), TuneOptions(tmp_path / "r", tmp_path / "k"), lambda _: None)
    plain = tune_with(own, shop)
    assert adds(plain) == {"matmul"}
    options = TuneOptions(tmp_path / "r", tmp_path / "k")
    shop = Workshop((ATEN,), TARGET, RecordedDevice({}, fail_open=True), options, lambda _: None)
    assert adds(tune_with(extraction.plan, shop)) == {"matmul"}
