import json
import shutil
import warnings
from pathlib import Path

import msgspec
import pytest
import torch
import two_layers
from forge import Files, edit_json, rehash, remade, write_folder
from safetensors.torch import save_file

import tune_model
from tune_model.package.format.manifest import decode_manifest
from tune_model.package.load import (
    OtherMachineError,
    TunedForOtherMachineWarning,
    WeightsNeededError,
    WritableByAllWarning,
)
from tune_model.package.system import DeviceError
from tune_model.package.write import write_artifact
from tune_model.runtime.coverage import NotTunedError
from tune_model.runtime.operators.allowed import OperatorError
from tune_model.runtime.weights.transforms import WeightError


def error_of(output: torch.Tensor, x: torch.Tensor) -> float:
    reference = two_layers.reference(x)
    return float((output.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("rows", [1, 3, 16, 64])
def test_a_loaded_model_computes_what_the_model_computes(artifact_file: Path, rows: int):
    """At tuned points (a C++ kernel at 1, torch's operators at 16) and between them."""
    tuned = tune_model.load(artifact_file, weights=two_layers.weights())
    x = torch.randn(rows, two_layers.WIDTH)
    assert error_of(tuned(x), x) < 1e-6


def test_what_ran_is_counted(artifact_file: Path):
    tuned = tune_model.load(artifact_file, weights=two_layers.weights())
    tuned(torch.randn(1, two_layers.WIDTH))
    tuned(torch.randn(2, two_layers.WIDTH))
    assert tuned.coverage().totals() == {"exact": 2, "near": 2, "miss": 0}
    assert {row.candidate for row in tuned.coverage().rows()} == {"cpp_small(unroll=8)"}


@pytest.mark.parametrize("kind", ["state dict", "module", "file", "folder", "embedded"])
def test_weights_from_everywhere(tmp_path: Path, artifact_file: Path, kind: str):
    weights: object = two_layers.weights()
    if kind == "module":
        module = torch.nn.Module()
        for name, tensor in two_layers.weights().items():
            module.register_parameter(name, torch.nn.Parameter(tensor))
        weights = module
    elif kind in {"file", "folder"}:
        save_file(two_layers.weights(), tmp_path / "model.safetensors")
        weights = tmp_path / "model.safetensors" if kind == "file" else tmp_path
    elif kind == "embedded":
        artifact_file = write_artifact(tmp_path / "e.tuned", two_layers.contents(weights=two_layers.weights()))
        weights = None
    x = torch.randn(1, two_layers.WIDTH)
    assert error_of(tune_model.load(artifact_file, weights=weights)(x), x) < 1e-6


def test_weights_are_needed(artifact_file: Path):
    with pytest.raises(WeightsNeededError, match="pass weights="):
        tune_model.load(artifact_file)


def test_weights_must_fit(artifact_file: Path):
    with pytest.raises(WeightError, match="w1"):
        tune_model.load(artifact_file, weights={n: t for n, t in two_layers.weights().items() if n != "w1"})


def test_weights_must_be_dense(artifact_file: Path):
    """A sparse tensor ended in a bare error of torch's, from the middle of loading."""
    weights = two_layers.weights()
    tuned = tune_model.load(artifact_file, weights=weights)
    x = torch.randn(1, two_layers.WIDTH)
    sparse = {**weights, "w1": weights["w1"].to_sparse()}
    says = (
        r"weight 'w1' is a tensor of layout torch\.sparse_coo; expected a dense tensor \(torch\.strided\) of torch\.fl"
    )
    with pytest.raises(WeightError, match=says):
        tune_model.load(artifact_file, weights=sparse)
    with pytest.raises(WeightError, match=says):
        tuned.reload_weights(sparse)
    assert error_of(tuned(x), x) < 1e-6


def test_an_artifact_for_a_gpu_is_refused_without_one(artifact_file: Path):
    with pytest.raises(DeviceError, match="is not there"):
        tune_model.load(artifact_file, weights=two_layers.weights(), device="cuda:99")


REFUSED = {
    "an instruction set this CPU lacks": ({"isa": ("avx2", "made_up_2040")}, "isa is none of made_up_2040"),
    "another machine": ({"machine": "riscv64"}, "machine is .*, expected riscv64"),
    "another way to launch": ({"launch_abi": 9}, "launch_abi is 1, expected 9"),
}


@pytest.mark.parametrize(("changes", "problem"), REFUSED.values(), ids=REFUSED)
def test_a_machine_that_cannot_run_it_is_refused(tmp_path: Path, files: Files, changes: dict, problem: str):
    run = msgspec.structs.replace(decode_manifest(files["manifest.json"], "").must_match_to_run, **changes)
    folder = write_folder(tmp_path / "a", remade(files, must_match_to_run=run))
    with pytest.raises(OtherMachineError, match=problem) as caught:
        tune_model.load(folder, weights=two_layers.weights())
    assert [c.field for c in caught.value.comparisons if c.to == "run"] == ["launch_abi", "machine", "isa"]


def test_a_machine_it_was_not_tuned_on_is_warned_about(tmp_path: Path, files: Files):
    optimal = decode_manifest(files["manifest.json"], "").must_match_to_stay_optimal
    other = msgspec.structs.replace(optimal, name="Another CPU", threads=333)
    folder = write_folder(tmp_path / "a", remade(files, must_match_to_stay_optimal=other))
    with pytest.warns(TunedForOtherMachineWarning, match=r"name is .*, expected Another CPU, threads is .*") as caught:
        tuned = tune_model.load(folder, weights=two_layers.weights())
    assert caught[0].filename == __file__
    x = torch.randn(1, two_layers.WIDTH)
    assert error_of(tuned(x), x) < 1e-6


def test_the_machine_it_was_tuned_on_gets_no_warning(artifact_file: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tune_model.load(artifact_file, weights=two_layers.weights())


@pytest.mark.parametrize("what", [".", "kernels", "replay.json", "programs/forward.json", ".."])
def test_an_artifact_that_everyone_can_change_is_warned_about(tmp_path: Path, files: Files, what: str):
    folder = write_folder(tmp_path / "inside" / "a", files)
    (folder / what).chmod(0o777)
    with pytest.warns(WritableByAllWarning, match="chmod o-w"):
        tune_model.load(folder, weights=two_layers.weights())


def test_a_folder_in_which_everyone_keeps_their_own_is_fine(tmp_path: Path, artifact_file: Path):
    """Such as /tmp: the sticky bit keeps others from replacing a file."""
    tmp_path.chmod(0o1777)
    place = shutil.copy(artifact_file, tmp_path / "a.tuned")
    with warnings.catch_warnings():
        warnings.simplefilter("error", WritableByAllWarning)
        tune_model.load(place, weights=two_layers.weights())


HOSTILE_OPERATORS = [
    "aten.from_file.default",
    "os.system",
    "aten.resize_.default",
    "tune_model.load",
    "prims.add.default",
]


@pytest.mark.parametrize("op", HOSTILE_OPERATORS)
@pytest.mark.parametrize("place", ["a step", "a kernel"])
def test_operators_that_no_program_may_call(tmp_path: Path, files: Files, op: str, place: str):
    """Refused before anything runs, wherever the name is hidden."""

    def change(document: dict) -> None:
        if place == "a step":
            document["steps"][2]["op"] = op
        else:
            next(iter(document["forms"].values()))[1]["kernel"]["steps"][0]["op"] = op

    member = "programs/forward.json" if place == "a step" else "replay.json"
    folder = write_folder(tmp_path / "a", edit_json(files, member, change))
    with pytest.raises(OperatorError, match=op.replace(".", r"\.")):
        tune_model.load(folder, weights=two_layers.weights())


def test_strict_refuses_what_is_not_tuned(tmp_path: Path, files: Files):
    document = json.loads(files["replay.json"])
    (entries,) = document["forms"].values()
    entries.pop()  # the fallback at 16 rows; what is left serves any number of rows
    entries[0]["kernel"]["requires"].append({"type": "within", "expression": "a0.size0", "low": 1, "high": 1})
    folder = write_folder(tmp_path / "a", rehash({**files, "replay.json": json.dumps(document).encode()}))
    tuned = tune_model.load(folder, weights=two_layers.weights(), strict=True)
    tuned(torch.randn(1, two_layers.WIDTH))
    with pytest.raises(NotTunedError):
        tuned(torch.randn(2, two_layers.WIDTH))
