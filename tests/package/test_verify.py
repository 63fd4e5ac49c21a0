from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import two_layers
from forge import Files, edit_json, write_folder

from tune_model.package.format.manifest import decode_manifest, encode_manifest, seal
from tune_model.package.verification.model import _compare
from tune_model.package.verify import Check, verify
from tune_model.package.write import write_artifact


def failed(checks: tuple[Check, ...]) -> list[str]:
    return [check.name for check in checks if check.outcome == "failed"]


def test_a_sound_artifact_passes(artifact_file: Path):
    seen: list[Check] = []
    report = verify(artifact_file, weights=two_layers.weights(), report=seen.append)
    assert report.passed
    assert tuple(seen) == report.checks
    names = [check.name for check in report.checks]
    assert names[0] == "files"
    assert "to run: machine" in names
    assert "kernel of matmul 1x8x8 f32 + relu at (1,): cpp_small(unroll=8)" in names
    assert "kernel of matmul 16x8x8 f32 + relu at (16,): aten" in names
    # The grid's ends, and a size beside it.
    assert names[-3:] == ["forward batch=1: y", "forward batch=16: y", "forward batch=7: y"]
    assert {check.outcome for check in report.checks} == {"passed"}


def test_weights_inside_are_compared(tmp_path: Path):
    path = write_artifact(tmp_path / "a.tuned", two_layers.contents(weights=two_layers.weights()))
    assert verify(path).passed


def test_a_damaged_file_is_a_failed_check(tmp_path: Path, files: Files):
    folder = write_folder(tmp_path / "a", {**files, "config.yaml": b"name: two_layers\n"})
    report = verify(folder)
    assert not report.passed
    (check,) = report.checks
    assert check.name.endswith("config.yaml: the SHA-256")


def test_another_machine_is_a_failed_check_and_nothing_runs(tmp_path: Path, files: Files):
    manifest = decode_manifest(files["manifest.json"], "")
    run = msgspec.structs.replace(manifest.must_match_to_run, isa=("made_up_2040",))
    sealed = seal(msgspec.structs.replace(manifest, must_match_to_run=run))
    report = verify(write_folder(tmp_path / "a", {**files, "manifest.json": encode_manifest(sealed)}))
    assert failed(report.checks) == ["to run: isa"]
    assert not any(check.name.startswith("kernel") for check in report.checks)


def test_a_slower_machine_is_noted(tmp_path: Path, files: Files):
    manifest = decode_manifest(files["manifest.json"], "")
    optimal = msgspec.structs.replace(manifest.must_match_to_stay_optimal, name="Another CPU")
    sealed = seal(msgspec.structs.replace(manifest, must_match_to_stay_optimal=optimal))
    folder = write_folder(tmp_path / "a", {**files, "manifest.json": encode_manifest(sealed)})
    report = verify(folder, weights=two_layers.weights())
    assert report.passed
    assert [c.name for c in report.checks if c.outcome == "noted"] == ["to stay optimal: name"]


def test_a_wrong_kernel_fails_itself_and_the_program(tmp_path: Path):
    """A kernel that forgets the relu: right shapes, wrong numbers."""
    code = two_layers.compiled(two_layers.SOURCE.replace("sum > 0 ? sum : 0", "sum"))
    path = write_artifact(tmp_path / "a.tuned", two_layers.contents(tuning=two_layers.tuning(code)))
    report = verify(path, weights=two_layers.weights())
    assert failed(report.checks) == [
        "kernel of matmul 1x8x8 f32 + relu at (1,): cpp_small(unroll=8)",
        "forward batch=1: y",
    ]


def test_a_kernel_that_leaves_a_gap_fails(tmp_path: Path):
    code = two_layers.compiled(two_layers.SOURCE.replace("j < 8; ++j) {", "j < 7; ++j) {"))
    path = write_artifact(tmp_path / "a.tuned", two_layers.contents(tuning=two_layers.tuning(code)))
    assert failed(verify(path, weights=two_layers.weights()).checks)[0].startswith("kernel of matmul 1x8x8")


def test_a_wrong_program_fails_the_program_alone(tmp_path: Path, files: Files):
    """Every kernel is right, but a constant of the program is not the model's."""
    path = write_artifact(tmp_path / "a.tuned", two_layers.contents(constants={"scale": torch.tensor(0.25)}))
    names = failed(verify(path, weights=two_layers.weights()).checks)
    assert names == ["forward batch=1: y", "forward batch=16: y", "forward batch=7: y"]


def test_weights_that_do_not_fit_are_said_so(artifact_file: Path):
    weights = {**two_layers.weights(), "w1": torch.zeros(3, 3)}
    report = verify(artifact_file, weights=weights)
    assert failed(report.checks) == ["program"]
    assert "w1" in report.checks[-1].seen


def test_an_operator_off_the_list_fails_before_anything_runs(tmp_path: Path, files: Files):
    def change(document: dict) -> None:
        document["steps"][2]["op"] = "aten.from_file.default"

    folder = write_folder(tmp_path / "a", edit_json(files, "programs/forward.json", change))
    report = verify(folder, weights=two_layers.weights())
    assert failed(report.checks) == ["operators"]
    assert report.checks[-1].name == "operators"


def test_without_the_original_the_program_is_skipped(tmp_path: Path, files: Files):
    request = msgspec.structs.replace(
        two_layers.contents().request,
        source=type(two_layers.contents().request.source)("no_such_module:model"),
    )
    report = verify(write_folder(tmp_path / "a", files), request=lambda _: request, weights=two_layers.weights())
    assert report.passed
    assert report.checks[-1].outcome == "skipped"
    assert "no_such_module" in report.checks[-1].seen


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("seen", "wanted", "passed"),
    [
        ([1.0, -INF], [1.0, -INF], True),
        ([1.0, NAN], [1.0, NAN], True),
        ([1.0, INF], [1.0, -INF], False),
        ([1.0, 2.0], [1.0, NAN], False),
        ([1.0, NAN], [1.0, 2.0], False),
        ([0.0, 0.0], [0.0, 0.0], True),
        ([0.0, 1.0], [0.0, 0.0], False),
        ([False, False], [False, False], True),
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1 + 2j], [1 - 2j], False),
        ([1 + 2j], [1 + 2j], True),
        ([1.0, 2.0], [1 + 1j, 2 + 2j], False),
        ([1 + 0j, 2 + 0j], [1.0, 2.0], False),
    ],
)
def test_outputs_without_a_direction_are_compared_too(seen: list[Any], wanted: list[Any], passed: bool):
    """Masked logits, zeros and booleans that are all false failed, however right they were."""
    check = _compare("logits", torch.tensor(seen), torch.tensor(wanted), "float32")
    assert (check.outcome == "passed") is passed, check
