import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import two_layers
from forge import files_of

from tune_model.extract.request import TransformersSource
from tune_model.package.format.wire import ArtifactError
from tune_model.package.output import OutputError, check_output
from tune_model.package.read import open_artifact
from tune_model.package.write import write_artifact

BERT = '{"model_type": "bert", "architectures": ["Bert"], "_name_or_path": "/somewhere"}'


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_written_is_what_is_read(tmp_path: Path):
    contents = two_layers.contents()
    artifact = open_artifact(write_artifact(tmp_path / "a.tuned", contents))
    assert artifact.programs == {"forward": two_layers.program()}
    assert artifact.code == contents.tuning.code
    (entries,) = artifact.replay.forms.values()
    assert [entry.dims for entry in entries] == [(1,), (16,)]
    assert [entry.candidate for entry in entries] == ["cpp_small(unroll=8)", "aten"]
    assert [entry.kernel for entry in entries] == [choice.kernel for choice in contents.tuning.choices]
    assert torch.equal(artifact.constants()["scale"], torch.tensor(0.5))
    assert artifact.weights() is None
    assert artifact.config() == "name: two-layers\n"
    assert artifact.manifest.request == contents.request
    assert artifact.manifest.model.parameters == 2 * (64 + 8)


def test_equal_contents_give_equal_bytes(tmp_path: Path):
    (tmp_path / "other").mkdir()
    first = write_artifact(tmp_path / "a.tuned", two_layers.contents()).read_bytes()
    second = write_artifact(tmp_path / "other" / "b.tuned", two_layers.contents()).read_bytes()
    assert first == second
    folder = write_artifact(f"{tmp_path}/folder.tuned/", two_layers.contents())
    assert folder.is_dir()
    assert files_of(folder) == files_of(tmp_path / "a.tuned")


def test_a_path_says_what_is_written(tmp_path: Path):
    assert write_artifact(f"{tmp_path}/a/", two_layers.contents()).is_dir()
    assert write_artifact(tmp_path / "b", two_layers.contents()).is_file()
    assert write_artifact(tmp_path / "c", two_layers.contents(), "folder").is_dir()


def test_an_artifact_is_replaced(tmp_path: Path):
    for path in (str(tmp_path / "file.tuned"), f"{tmp_path}/folder.tuned/"):
        write_artifact(path, two_layers.contents())
        write_artifact(path, two_layers.contents(config_yaml="name: newer\n"))
        assert open_artifact(path).config() == "name: newer\n"
    assert names(tmp_path) == ["file.tuned", "folder.tuned"]


def test_embedded_weights_come_back(tmp_path: Path):
    weights = {**two_layers.weights(), "unused": torch.zeros(3)}
    for path in (str(tmp_path / "a.tuned"), f"{tmp_path}/b.tuned/"):
        artifact = open_artifact(write_artifact(path, two_layers.contents(weights=weights)))
        assert artifact.manifest.weights == "embed"
        back = artifact.weights()
        assert back is not None
        assert back.keys() == two_layers.weights().keys()
        assert all(torch.equal(back[name], weights[name]) for name in back)
        assert all(tensor.data_ptr() % 4 == 0 for tensor in back.values())


def test_a_model_folder_becomes_its_configuration(tmp_path: Path):
    """The same model in another place gives the same bytes, and no path ends up inside."""
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "config.json").write_text(BERT)
        request = two_layers.contents().request
        moved = {name: getattr(request, name) for name in request.__struct_fields__}
        moved["source"] = TransformersSource(folder=str(tmp_path / place))
        contents = two_layers.contents(request=type(request)(**moved), architecture=None)
        write_artifact(tmp_path / f"{place}.tuned", contents)
    assert (tmp_path / "here.tuned").read_bytes() == (tmp_path / "there.tuned").read_bytes()
    manifest = open_artifact(tmp_path / "here.tuned").manifest
    assert manifest.request.source == TransformersSource(config={"model_type": "bert", "architectures": ["Bert"]})
    assert manifest.model.architecture == "Bert"


def test_contents_that_do_not_fit_leave_nothing(tmp_path: Path):
    with pytest.raises(ArtifactError, match="constant 'scale'"):
        write_artifact(tmp_path / "a.tuned", two_layers.contents(constants={"scale": torch.zeros(2)}))
    assert names(tmp_path) == []


OTHER_THINGS = {
    "a file where a folder is needed": ("file/a.tuned", "Not a directory"),
    "a folder that does not exist": ("missing/a.tuned", "No such file"),
    "a folder in the way of a file": ("folder", "is a folder; .* end the path in a slash"),
    "a file in the way of a folder": ("file/", "is not a folder"),
    "a file that is no artifact": ("file", "is a file but no artifact"),
    "a folder of other things": ("folder/", "is a folder of other things"),
    "a link": ("link", "is a link"),
    "a name that is too long": ("x" * 240, "File name too long"),
    "nothing": ("..", "names no file"),
}


@pytest.mark.parametrize(("path", "problem"), OTHER_THINGS.values(), ids=OTHER_THINGS)
def test_a_place_that_cannot_take_an_artifact(tmp_path: Path, path: str, problem: str):
    """Refused before tuning and at writing alike; what is there stays as it is, and nothing is added."""
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("precious")
    (tmp_path / "link").symlink_to("file")
    before = names(tmp_path)
    with pytest.raises(OutputError, match=problem):
        check_output(f"{tmp_path}/{path}")
    with pytest.raises(OutputError, match=problem):
        write_artifact(f"{tmp_path}/{path}", two_layers.contents())
    assert names(tmp_path) == before
    assert (tmp_path / "file").read_text() == "precious"
    assert (tmp_path / "folder" / "notes.txt").read_text() == "precious"


def test_the_check_before_tuning_leaves_nothing(tmp_path: Path):
    assert check_output(f"{tmp_path}/a.tuned/") == tmp_path / "a.tuned"
    assert names(tmp_path) == []


@pytest.mark.parametrize("path", ["a.tuned", "a.tuned/"])
def test_a_file_system_that_takes_no_more_leaves_the_old_artifact(tmp_path: Path, path: str):
    """A limit on file sizes fails writes as a full disk does, for root too, on every file system."""
    write_artifact(f"{tmp_path}/{path}", two_layers.contents())
    before = files_of(tmp_path / "a.tuned")
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, old[1]))
    try:
        with pytest.raises(OutputError, match="cannot be written: File too large"):
            write_artifact(f"{tmp_path}/{path}", two_layers.contents(report_html="x" * (2 << 20)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert names(tmp_path) == ["a.tuned"]
    assert files_of(tmp_path / "a.tuned") == before


@pytest.mark.parametrize("path", ["a.tuned", "a.tuned/"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, path: str):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        with pytest.raises(OutputError, match="No space left on device"):
            write_artifact(f"{tmp_path}/{path}", two_layers.contents(report_html="x" * (1 << 20)))
        assert names(tmp_path) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_read_only_folder_is_refused(tmp_path: Path):
    tmp_path.chmod(0o555)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("permission bits do not bind this user")
        with pytest.raises(OutputError, match="Permission denied"):
            check_output(tmp_path / "a.tuned")
    finally:
        tmp_path.chmod(0o755)


def test_writing_needs_no_triton_transformers_or_onnx(tmp_path: Path):
    code = f"""
import sys
for name in ("triton", "transformers", "onnx", "torch._inductor"): sys.modules[name] = None
sys.path.insert(0, {str(Path(two_layers.__file__).parent)!r})
import two_layers
from tune_model.package.write import write_artifact
write_artifact({str(tmp_path / "a.tuned")!r}, two_layers.contents())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
