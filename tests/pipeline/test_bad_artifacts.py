"""Artifacts, weights and devices that cannot be used, through every command that opens an artifact.

The others refuse with one line and exit code 2. To `verify` a damaged or foreign artifact is a failed check:
it prints the check and exits with 4; only what was asked wrongly (no artifact, no such device, no weights) is an error.
"""

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import two_layers
from command_line import refusal, tree
from forge import files_of, remade, write_folder
from safetensors.torch import save_file

from tune_model.package.fingerprints import CudaToRun, CudaToStayOptimal
from tune_model.package.format.manifest import decode_manifest
from tune_model.package.write import write_artifact
from tune_model.pipeline import cli


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sound artifact in the current folder."""
    monkeypatch.chdir(tmp_path)
    return write_artifact(tmp_path / "a.tuned", two_layers.contents())


def flip(artifact: Path) -> None:
    """Change one bit in the machine code."""
    content = bytearray(artifact.read_bytes())
    content[content.index(b"\x7fELF") + 1000] ^= 1
    artifact.write_bytes(content)


def make_folder(artifact: Path, files: dict[str, bytes]) -> None:
    artifact.unlink()
    artifact.mkdir()
    write_folder(artifact, files)


# What happens to the artifact, and what is said of it: field, what is there, what should be.
DAMAGE: dict[str, tuple[Callable[[Path], object], tuple[str, str, str]]] = {
    "a flipped bit": (flip, (r"kernels/\w{64}.so: the SHA-256", r"\w{64}", r"\w{64}: copy the artifact again")),
    "cut off": (
        lambda a: a.write_bytes(a.read_bytes()[:5000]),
        ("the file", "cut off after 5000 bytes", "a whole artifact: copy it again"),
    ),
    "a text": (
        lambda a: a.write_bytes(b"hello"),
        ("the file", "5 bytes of another kind", "an artifact that tune-model wrote"),
    ),
    "nothing": (
        lambda a: a.write_bytes(b""),
        ("the file", "0 bytes of another kind", "an artifact that tune-model wrote"),
    ),
    "an empty folder": (
        lambda a: make_folder(a, {}),
        ("the list of files", "without manifest.json", "one with manifest.json, as tune-model writes"),
    ),
    "a folder with a file missing": (
        lambda a: make_folder(a, {k: v for k, v in files_of(a).items() if k != "replay.json"}),
        ("replay.json: the file", "missing", "present, manifest.json lists it"),
    ),
    "a folder of something else": (
        lambda a: make_folder(a, {"model.safetensors": b""}),
        ("model.safetensors: the name", "another", "one that an artifact's files have"),
    ),
}


@pytest.mark.parametrize("command", ["inspect", "bench", "report", "retune"])
@pytest.mark.parametrize(("damage", "says"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_refused(artifact, capsys, command, damage, says):
    damage(artifact)
    error = refusal([command, "a.tuned"], artifact.parent, capsys)
    assert re.fullmatch("a.tuned: {} is {}; expected {}".format(*says), error)


@pytest.mark.parametrize(("damage", "says"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_a_failed_check(artifact, capsys, damage, says):
    damage(artifact)
    before = tree(artifact.parent)
    assert cli.run(["verify", "a.tuned"]) == 4
    shown = capsys.readouterr()
    assert re.match(r"failed  files: a.tuned: {}: {} \(expected {}\)\na.tuned: 1 failed".format(*says), shown.out)
    assert not shown.err
    assert tree(artifact.parent) == before


@pytest.mark.parametrize(("damage", "says"), DAMAGE.values(), ids=DAMAGE)
def test_damage_of_one_of_several_is_refused(artifact, capsys, damage, says):
    write_artifact(artifact.parent / "b.tuned", two_layers.contents())
    damage(artifact)
    expected = "a.tuned: {} is {}; expected {}".format(*says)
    assert re.fullmatch(expected, refusal(["diff", "b.tuned", "a.tuned"], artifact.parent, capsys))
    merge = ["merge", "b.tuned", "a.tuned", "-o", "both.tuned"]
    assert re.fullmatch(expected, refusal(merge, artifact.parent, capsys))


def to_other_cpu(artifact: Path) -> None:
    files = files_of(artifact)
    run = decode_manifest(files["manifest.json"], "").must_match_to_run
    make_folder(artifact, remade(files, must_match_to_run=msgspec.structs.replace(run, isa=("made_up_2040",))))


def to_gpu(artifact: Path) -> None:
    optimal = CudaToStayOptimal("NVIDIA H999", 200, 2000, "999", "9.9")
    make_folder(
        artifact,
        remade(files_of(artifact), must_match_to_run=CudaToRun(999, 1), must_match_to_stay_optimal=optimal),
    )


def test_an_artifact_from_another_machine(artifact, capsys):
    to_other_cpu(artifact)
    error = refusal(["bench", "a.tuned"], artifact.parent, capsys)
    assert error == (
        "a.tuned: was tuned for another machine: isa is none of made_up_2040, expected made_up_2040; load it "
        "there, or tune again here"
    )
    assert cli.run(["verify", "a.tuned"]) == 4
    shown = capsys.readouterr().out
    assert "failed  to run: isa: none of made_up_2040 (expected made_up_2040)" in shown
    assert "kernel of" not in shown, "nothing of it may run"
    assert cli.run(["inspect", "a.tuned"]) == 0, "looking needs no machine"


def test_an_artifact_for_a_gpu_that_is_not_there(artifact, capsys):
    to_gpu(artifact)
    error = refusal(["bench", "a.tuned", "--device", "cuda:99"], artifact.parent, capsys)
    assert re.match(r"device 'cuda:99' is not there: torch .* sees \d+ NVIDIA GPUs; an artifact tuned for", error)
    error = refusal(["bench", "a.tuned", "--device", "cpu"], artifact.parent, capsys)
    assert "device is cpu, expected cuda" in error


def test_an_artifact_tuned_elsewhere_runs_and_warns_in_one_line(artifact, capsys):
    files = files_of(artifact)
    optimal = decode_manifest(files["manifest.json"], "").must_match_to_stay_optimal
    other = msgspec.structs.replace(optimal, name="Another CPU")
    make_folder(artifact, remade(files, must_match_to_stay_optimal=other))
    assert cli.run(["bench", "a.tuned", "--no-compile", "--rounds", "6", "--only", "forward batch=16"]) == 0
    shown = capsys.readouterr().err
    assert re.fullmatch(r"warning: a.tuned: was tuned on another machine: name is .*expected Another CPU.*\n", shown)


@pytest.mark.parametrize("command", ["inspect", "verify", "bench", "report", "retune"])
def test_an_artifact_that_is_not_there(artifact, capsys, command):
    error = refusal([command, "gone.tuned"], artifact.parent, capsys)
    assert error.startswith("Invalid value for 'ARTIFACT': gone.tuned does not exist; expected an artifact that tune-m")


WEIGHTS = {
    "nothing": ("gone", r".*gone does not exist; expected a file or folder of the model"),
    "an empty folder": ("empty", r".*empty: holds no safetensors file"),
    "a folder of garbage": ("garbage", r".*garbage/model.safetensors: not a safetensors file"),
    "a file of another kind": ("notes.txt", r".*notes.txt: not a safetensors file"),
    "an unknown package": (
        "package:no_package/x",
        "'package:no_package/x': no Python package 'no_package' is",
    ),
    "a package inside one": (
        "package:no_package.x/y",
        ".*no Python package 'no_package.x' is installed; expected",
    ),
    "a package's name that is none": ("package:../x", r".*no Python package '\.\.' is installed"),
    "a package without a name": ("package:", ".*no Python package '' is installed"),
}


@pytest.mark.parametrize("command", ["verify", "bench"])
@pytest.mark.parametrize(("path", "says"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights_that_cannot_be_read(artifact, capsys, command, path, says):
    here = artifact.parent
    (here / "empty").mkdir()
    (here / "garbage").mkdir()
    (here / "garbage" / "model.safetensors").write_bytes(b"garbage" * 100)
    (here / "notes.txt").write_text("precious notes")
    error = refusal([command, "a.tuned", "--weights", path], here, capsys)
    assert re.match(f"Invalid value for '--weights': {says}", error)


def test_weights_of_another_model(artifact, capsys):
    save_file({"other": two_layers.weights()["w0"]}, "other.safetensors")
    error = refusal(["bench", "a.tuned", "--weights", "other.safetensors"], artifact.parent, capsys)
    assert error.startswith("the weights do not fit the model: ")
    assert '"w0"' in error
    assert cli.run(["verify", "a.tuned", "--weights", "other.safetensors"]) == 4
    assert "failed  program: WeightError: the weights do not fit the model: " in capsys.readouterr().out


ASKED_WRONGLY = {
    "a device of no kind": (("--device", "toaster"), "device is 'toaster'; expected cpu, cuda or cuda:N"),
    "a point of another model": (("--only", "decode"), "--only matches no point; there are: forward batch=1; forward"),
    "no rounds": (("--rounds", "0"), "Invalid value for '--rounds': 0 is not in the range 6<=x<=10000."),
    "a result that is none": (
        ("--save", "notes.txt"),
        "notes.txt: JSON is malformed.*; expected a benchmark",
    ),
    "a result in a folder's place": (
        ("--save", "folder"),
        "folder: Is a directory; expected a benchmark",
    ),
    "a result inside a file": (
        ("--save", "notes.txt/x.json"),
        "notes.txt/x.json: .*notes.txt is not a folder",
    ),
}


@pytest.mark.parametrize(("options", "says"), ASKED_WRONGLY.values(), ids=ASKED_WRONGLY)
def test_a_benchmark_asked_for_wrongly_times_nothing(artifact, capsys, options, says):
    (artifact.parent / "folder").mkdir()
    (artifact.parent / "notes.txt").write_text("precious")
    assert re.match(says, refusal(["bench", "a.tuned", *options], artifact.parent, capsys))
