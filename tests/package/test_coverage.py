"""What an artifact has, asked beforehand: the same answer that the runtime gives when it is called."""

import dataclasses
from pathlib import Path

import msgspec
import pytest
import torch
import two_layers
from settled_tuning import settled

import tune_model
from tune_model.package.coverage import Asked, PointCoverage, cover
from tune_model.package.read import Artifact, open_artifact
from tune_model.package.write import write_artifact
from tune_model.runtime.execution import dispatch
from tune_model.runtime.kernel import Kernel, LibraryAlgorithm, LibraryMatmul, Within


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Tuned at 1 and 16 rows; the kernel that won at 1 row is legal up to 8 rows only, the plain one anywhere."""
    tuning = two_layers.tuning(two_layers.compiled())
    first, second = tuning.choices
    few = msgspec.structs.replace(first.kernel, requires=(*first.kernel.requires, Within("a0.size0", 1, 8)))
    some = msgspec.structs.replace(second.kernel, requires=(Within("a0.size0", 1, 32),))
    choices = (msgspec.structs.replace(first, kernel=few), msgspec.structs.replace(second, kernel=some))
    contents = two_layers.contents(tuning=msgspec.structs.replace(tuning, choices=choices))
    return open_artifact(write_artifact(tmp_path_factory.mktemp("coverage") / "a.tuned", contents))


def at(artifact: Artifact, *batches: int) -> list[PointCoverage]:
    return list(cover(artifact, [Asked("forward", {"batch": batch}) for batch in batches]))


def test_tuned_sizes_are_covered(artifact: Artifact):
    for point in at(artifact, 1, 16):
        assert point.covered
        assert (point.exact, point.near, point.miss) == (2, 0, 0)


@pytest.mark.parametrize(("installed", "covered"), [(130200, True), (None, True), (130100, False)])
def test_a_library_that_is_not_here_is_taken_for_the_one_tuned_with(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch, installed: int | None, covered: bool
):
    """A release pipeline asks on a machine without a GPU; another version would run something else."""
    call = LibraryMatmul("a0", "a1", "t0", "a0.size0", 8, 8, 8, 8, "float32", LibraryAlgorithm(66), 130200)
    forms = {
        form: tuple(msgspec.structs.replace(entry, kernel=Kernel((call,))) for entry in entries)
        for form, entries in artifact.replay.forms.items()
    }
    changed = dataclasses.replace(artifact, replay=msgspec.structs.replace(artifact.replay, forms=forms))
    monkeypatch.setattr(dispatch, "installed_version", lambda: installed)
    (point,) = at(changed, 16)
    assert point.covered == covered
    assert dispatch.fits(Kernel((call,)), {}) == (installed == 130200)


def test_a_size_in_between_is_near_and_names_where_it_comes_from(artifact: Artifact):
    (point,) = at(artifact, 3)
    assert not point.covered
    assert (point.exact, point.near, point.miss, point.nearest) == (0, 2, 0, "forward batch=1")
    (lacking,) = point.lacking
    assert (lacking.outcome, lacking.steps, lacking.candidate) == ("near", 2, "cpp_small(unroll=8)")
    # Twelve is nearer to sixteen.
    assert at(artifact, 12)[0].nearest == "forward batch=16"


def test_a_size_that_no_kernel_may_run_is_plain_with_the_reason(artifact: Artifact):
    (point,) = at(artifact, 50)
    assert (point.exact, point.near, point.miss, point.nearest) == (0, 0, 2, "forward batch=16")
    assert point.lacking[0].reasons[0] == "aten tuned at (16,): a0.size0 is 50; needs 1 to 32"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (Asked("forward", {"batch": 65}), "batch is 65; the program takes 1 to 64"),
        (Asked("forward", {}), "no value for batch"),
        (Asked("decode", {"batch": 1}), "there is no program 'decode'"),
    ],
)
def test_what_the_program_does_not_take_is_said(artifact: Artifact, asked: Asked, message: str):
    (point,) = cover(artifact, [asked])
    assert point.refused == message
    assert not point.covered


def test_the_runtime_finds_the_same(artifact: Artifact):
    tuned = tune_model.load(artifact.path, weights=two_layers.weights(), device="cpu")
    batches = [1, 2, 3, 5, 7, 8, 9, 12, 16, 20, 31, 33, 50, 64]
    for batch in batches:
        tuned(torch.zeros(batch, two_layers.WIDTH))
    ran = {p.sizes["batch"]: (p.exact, p.near, p.miss) for p in tuned.coverage().points()}
    assert ran == {p.sizes["batch"]: (p.exact, p.near, p.miss) for p in at(artifact, *batches)}
    assert {outcome for counts in ran.values() for outcome, n in zip("enm", counts, strict=True) if n} == {*"enm"}


def test_packed_weights_are_looked_up_as_packed(tmp_path: Path):
    """A kernel for plain weights does not count where the weights are packed, and the reverse."""
    tuning = settled(("a1", "mkldnn"))
    first, second = tuning.choices
    packed = msgspec.structs.replace(first.kernel, layouts=(("a1", "mkldnn"),))
    tuning = msgspec.structs.replace(tuning, choices=(msgspec.structs.replace(first, kernel=packed), second))
    artifact = open_artifact(write_artifact(tmp_path / "a.tuned", two_layers.contents(tuning=tuning)))
    one, sixteen = at(artifact, 1, 16)
    assert one.covered
    assert (sixteen.near, sixteen.miss) == (2, 0)
    assert sixteen.nearest == "forward batch=1"
