"""Bundles: several artifacts in one, each machine takes its own, nothing damaged or superfluous gets through."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
import two_layers

import tune_model
from tune_model.package.fingerprints import CpuSystem, CudaSystem, System
from tune_model.package.format.bundle import Bundle, PartFacts, encode_bundle, seal_bundle
from tune_model.package.format.wire import ArtifactError
from tune_model.package.merge import MergeError, merge_artifacts
from tune_model.package.output import OutputError
from tune_model.package.parts import (
    OtherMachineError,
    PartNameError,
    choose_part,
    named_part,
    native_part,
    part_for_device,
    part_name,
)
from tune_model.package.read import Artifact, open_artifact, open_parts
from tune_model.package.system import probe_system
from tune_model.package.verify import verify
from tune_model.package.write import write_artifact
from tune_model.runtime.kernel import Kernel
from tune_model.tune.target import CudaTarget

H200 = CudaTarget(90, "NVIDIA H200", 132, 50 << 20, 232448, 65536, 140 << 30, 1980, "580", "13.0", "2.11", "3.6")
H100 = msgspec.structs.replace(H200, name="NVIDIA H100 80GB HBM3")
A100 = msgspec.structs.replace(H200, arch=80, name="NVIDIA A100", sm_count=108, max_clock_mhz=1410)


def write_gpu(path: Path, target: CudaTarget, **changes: object) -> Path:
    """The two_layers model as if tuned on a GPU where the plain operators won."""
    tuning = two_layers.tuning(b"")
    plain = Kernel(two_layers.FORM.body)
    choices = tuple(msgspec.structs.replace(c, kernel=plain) for c in tuning.choices)
    tuning = msgspec.structs.replace(tuning, choices=choices, target=target, code={})
    return write_artifact(path, two_layers.contents(tuning=tuning, **changes))


@pytest.fixture(scope="module")
def singles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One artifact for this machine's CPU, with a kernel of its own, and three for GPUs."""
    folder = tmp_path_factory.mktemp("singles")
    made = {"cpu": write_artifact(folder / "cpu.tuned", two_layers.contents(weights=two_layers.weights()))}
    for name, target in {"h200": H200, "h100": H100, "a100": A100}.items():
        made[name] = write_gpu(folder / f"{name}.tuned", target, weights=two_layers.weights())
    return made


@pytest.fixture(scope="module")
def bundle(singles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("bundle") / "both.tuned"
    merge_artifacts([singles["cpu"], singles["h200"]], place)
    return place


def gpu(target: CudaTarget, **changes: object) -> CudaSystem:
    """A machine as a probe would find it."""
    found = CudaSystem(
        target.arch, target.name, target.sm_count, target.torch, target.max_clock_mhz, target.driver_branch
    )
    return msgspec.structs.replace(found, **changes)


def taken(parts: tuple[Artifact, ...], *systems: System) -> str | None:
    number = choose_part([p.manifest for p in parts], systems).part
    return None if number is None else parts[number].manifest.target.name


def test_each_machine_takes_its_own_part(bundle: Path):
    parts = open_parts(bundle)
    here = probe_system("cpu")
    assert isinstance(here, CpuSystem)
    assert taken(parts, here) == here.name
    assert taken(parts, gpu(H200), here) == "NVIDIA H200"
    # A GPU that nothing here was built for: the CPU's part still runs.
    assert taken(parts, gpu(A100), here) == here.name
    assert taken(parts, gpu(A100)) is None


def test_parts_are_the_artifacts_they_were(bundle: Path, singles: dict[str, Path]):
    for part in open_parts(bundle):
        single = open_artifact(singles["h200" if part.manifest.target.name == "NVIDIA H200" else "cpu"])
        assert part.manifest == single.manifest
        assert {n: bytes(d) for n, d in part.files.items()} == {n: bytes(d) for n, d in single.files.items()}
        assert (part.programs, part.replay, part.code) == (single.programs, single.replay, single.code)
        assert list(part.records()) == list(single.records())


def test_loading_here_takes_the_part_for_this_cpu_and_computes(bundle: Path):
    x = torch.linspace(-2, 2, two_layers.WIDTH).reshape(1, two_layers.WIDTH)
    tuned = tune_model.load(bundle, device="cpu")
    assert torch.allclose(tuned(x).double(), two_layers.reference(x), rtol=1e-5, atol=1e-6)
    assert {row.candidate for row in tuned.coverage().rows()} == {"cpp_small(unroll=8)"}


def test_a_module_on_the_cpu_gets_the_cpus_part_even_beside_a_gpu(bundle: Path, monkeypatch: pytest.MonkeyPatch):
    """`attach` took the machine's preferred part, the GPU's, whatever device the module was on."""

    def probe(device: str | torch.device) -> System:
        return gpu(H200) if torch.device(device).type == "cuda" else probe_system(device)

    monkeypatch.setattr("tune_model.package.parts.probe_system", probe)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert native_part(open_parts(bundle)).manifest.target.name == "NVIDIA H200"
    model = two_layers.model().eval()
    attached = tune_model.attach(model, bundle)
    x = torch.linspace(-2, 2, two_layers.WIDTH).reshape(1, two_layers.WIDTH)
    with torch.no_grad():
        (y,) = model(x).values()
    assert torch.allclose(y.double(), two_layers.reference(x), rtol=1e-5, atol=1e-6)
    assert (attached.answered, attached.unmatched()) == (1, {})
    assert {row.candidate for row in attached.tuned.coverage().rows()} == {"cpp_small(unroll=8)"}


def test_verifying_a_bundle_verifies_this_machines_part(bundle: Path):
    report = verify(bundle, device="cpu")
    assert report.passed, report.checks
    assert any("cpp_small" in check.name for check in report.checks)


def test_of_several_that_run_the_one_measured_on_such_a_machine_is_taken(singles: dict[str, Path], tmp_path: Path):
    parts = merge_artifacts([singles[n] for n in ("a100", "h100", "cpu", "h200")], tmp_path / "all.tuned")
    assert [p.manifest.target.name for p in parts][:3] == ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA A100"]
    for target in (H200, H100, A100):
        assert taken(parts, gpu(target)) == target.name
    # Of the same architecture and tuned elsewhere, what differs least is taken: the name says more than the driver.
    assert taken(parts, gpu(H200, driver_branch="999")) == "NVIDIA H200"
    assert taken(parts, gpu(H100, driver_branch="999", torch="9.9")) == "NVIDIA H100 80GB HBM3"


def test_the_same_parts_give_the_same_bytes_in_any_order(singles: dict[str, Path], tmp_path: Path):
    paths = [singles["cpu"], singles["h200"], singles["a100"]]
    merge_artifacts(paths, tmp_path / "a.tuned")
    merge_artifacts(paths[::-1], tmp_path / "b.tuned")
    # A bundle adds its parts; what both have is taken once.
    merge_artifacts(paths[:2], tmp_path / "two.tuned")
    merge_artifacts([tmp_path / "two.tuned", paths[2], paths[0]], tmp_path / "c.tuned")
    first = (tmp_path / "a.tuned").read_bytes()
    assert first == (tmp_path / "b.tuned").read_bytes() == (tmp_path / "c.tuned").read_bytes()


def test_a_bundle_may_replace_what_it_was_made_of(singles: dict[str, Path], tmp_path: Path):
    place = Path(shutil.copy(singles["cpu"], tmp_path / "model.tuned"))
    merge_artifacts([place, singles["h200"]], place)
    merge_artifacts([place, singles["a100"]], place)
    assert len(open_parts(place)) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["model.tuned"]


def test_what_parts_share_is_stored_once(singles: dict[str, Path], bundle: Path):
    names = open_parts(bundle)[0].manifest.files
    shared = names["weights.safetensors"].sha256
    folder = bundle.parent / "unpacked"
    shutil.unpack_archive(bundle, folder, "zip")
    blobs = {p.name for p in (folder / "blobs").iterdir()}
    assert shared in blobs
    assert bundle.stat().st_size < sum(singles[n].stat().st_size for n in ("cpu", "h200"))


def test_a_folder_is_as_good(singles: dict[str, Path], tmp_path: Path):
    parts = merge_artifacts([singles["cpu"], singles["h200"]], f"{tmp_path}/both.tuned/")
    assert (tmp_path / "both.tuned" / "bundle.json").is_file()
    assert [p.manifest.digest for p in open_parts(tmp_path / "both.tuned")] == [p.manifest.digest for p in parts]
    # It can be replaced as an artifact can.
    merge_artifacts([singles["cpu"], singles["a100"]], f"{tmp_path}/both.tuned/")
    assert {p.manifest.target.name for p in open_parts(tmp_path / "both.tuned")} >= {"NVIDIA A100"}


def test_two_for_one_machine_are_refused(singles: dict[str, Path], tmp_path: Path):
    again = write_gpu(tmp_path / "again.tuned", H200)
    with pytest.raises(MergeError, match="for the same machine"):
        merge_artifacts([singles["h200"], again], tmp_path / "x.tuned")
    assert not (tmp_path / "x.tuned").exists()


def test_other_models_are_refused(singles: dict[str, Path], tmp_path: Path):
    other = write_gpu(tmp_path / "other.tuned", H200, name="another")
    with pytest.raises(MergeError, match=r"other\.tuned: \$\.name is 'another', but 'two-layers' in"):
        merge_artifacts([singles["cpu"], other], tmp_path / "x.tuned")


def test_a_place_that_is_taken_is_left_alone(singles: dict[str, Path], tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError):
        merge_artifacts([singles["cpu"], singles["h200"]], tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"


# ------------------------------------------------------------------------------------------------------------- choosing


def test_parts_have_names(bundle: Path):
    parts = open_parts(bundle)
    gpu_part = parts[0]
    assert part_name(gpu_part.manifest).startswith("sm_90 NVIDIA H200 (")
    for name in ("sm_90", "cuda", "h200", "H200", gpu_part.manifest.digest[:8]):
        assert named_part(name)(parts) is gpu_part
    assert named_part("cpu")(parts) is parts[1]


@pytest.mark.parametrize("name", ["sm_80", "", "no such", "h300"])
def test_a_name_of_no_part_lists_them(bundle: Path, name: str):
    with pytest.raises(PartNameError, match="sm_90 NVIDIA H200"):
        named_part(name)(open_parts(bundle))


def test_a_name_of_several_parts_is_refused(singles: dict[str, Path], tmp_path: Path):
    parts = merge_artifacts([singles["h100"], singles["h200"]], tmp_path / "two.tuned")
    with pytest.raises(PartNameError, match="2 parts are meant"):
        named_part("sm_90")(parts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_bundle_without_a_part_for_this_machine_says_why(singles: dict[str, Path], tmp_path: Path):
    parts = merge_artifacts([singles["h200"], singles["a100"]], tmp_path / "gpus.tuned")
    for attempt in (lambda: native_part(parts), lambda: part_for_device("cpu")(parts)):
        with pytest.raises(
            OtherMachineError, match=r"none of its 2 parts runs here: sm_90 NVIDIA H200 .*device is cpu"
        ):
            attempt()
    with pytest.raises(OtherMachineError):
        tune_model.load(tmp_path / "gpus.tuned", weights=two_layers.weights())
    failed = [c for c in verify(tmp_path / "gpus.tuned").checks if c.outcome == "failed"]
    assert [c.name for c in failed] == ["to run: part"]


# ------------------------------------------------------------------------------------------------------------- reading


@pytest.fixture
def folder(singles: dict[str, Path], tmp_path: Path) -> Path:
    merge_artifacts([singles["cpu"], singles["h200"]], f"{tmp_path}/b/")
    return tmp_path / "b"


def one_blob(folder: Path) -> Path:
    return min((folder / "blobs").iterdir())


def reseal(folder: Path, change: Callable[[Bundle], Bundle]) -> None:
    """Change the list and correct its digest, as a forger would."""
    bundle = msgspec.json.decode((folder / "bundle.json").read_bytes(), type=Bundle)
    (folder / "bundle.json").write_bytes(encode_bundle(seal_bundle(change(bundle))))


def drop_blob(folder: Path) -> None:
    one_blob(folder).unlink()


def flip_blob(folder: Path) -> None:
    data = bytearray(one_blob(folder).read_bytes())
    data[len(data) // 2] ^= 1
    one_blob(folder).write_bytes(data)


def add_blob(folder: Path) -> None:
    (folder / "blobs" / hashlib.sha256(b"more").hexdigest()).write_bytes(b"more")


def add_part(folder: Path) -> None:
    (folder / "parts" / f"{'0' * 64}.json").write_bytes(b"{}")


def add_artifacts_file(folder: Path) -> None:
    (folder / "replay.json").write_bytes(b"{}")


def drop_part(folder: Path) -> None:
    min((folder / "parts").iterdir()).unlink()


def swap_parts(folder: Path) -> None:
    a, b = sorted((folder / "parts").iterdir())
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)


def edit_list(folder: Path) -> None:
    text = (folder / "bundle.json").read_bytes()
    (folder / "bundle.json").write_bytes(text.replace(b"NVIDIA H200", b"NVIDIA H300"))


def forge_target(folder: Path) -> None:
    reseal(folder, lambda b: msgspec.structs.replace(b, parts=(PartFacts(b.parts[0].digest, "Other"), *b.parts[1:])))


def forge_name(folder: Path) -> None:
    reseal(folder, lambda b: msgspec.structs.replace(b, name="other"))


def twice(folder: Path) -> None:
    reseal(folder, lambda b: msgspec.structs.replace(b, parts=(*b.parts, b.parts[0])))


def no_parts(folder: Path) -> None:
    text = b'{"schema": 1, "tune_model": "x", "name": "x", "parts": [], "digest": ""}'
    (folder / "bundle.json").write_bytes(text)


def newer(folder: Path) -> None:
    reseal(folder, lambda b: msgspec.structs.replace(b, schema=2))


def no_json(folder: Path) -> None:
    (folder / "bundle.json").write_bytes(b"\xff{")


def unknown_field(folder: Path) -> None:
    text = (folder / "bundle.json").read_bytes()
    (folder / "bundle.json").write_bytes(text.replace(b'"schema"', b'"more": 1, "schema"'))


def link_blob(folder: Path) -> None:
    blob = one_blob(folder)
    blob.rename(folder.parent / "outside")
    blob.symlink_to(folder.parent / "outside")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_blob, "missing"),
        (flip_blob, "the SHA-256"),
        (add_blob, "listed by none"),
        (add_part, "not listed"),
        (add_artifacts_file, "not listed"),
        (drop_part, "missing"),
        (swap_parts, r"\$\.digest"),
        (edit_list, r"\$\.digest"),
        (forge_target, r"\$\.target\.name"),
        (forge_name, r"\$\.name"),
        (twice, "each part once"),
        (no_parts, r"\$\.parts"),
        (newer, r"\$\.schema is 2 \(written by"),
        (no_json, "JSON"),
        (unknown_field, "no such field"),
        (link_blob, "a link"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_damaged_or_superfluous_is_refused(folder: Path, damage: Callable[[Path], None], message: str):
    assert len(open_parts(folder)) == 2
    damage(folder)
    with pytest.raises(ArtifactError, match=message):
        open_parts(folder)


def test_an_artifact_takes_no_bundles_files(tmp_path: Path):
    place = write_artifact(f"{tmp_path}/a.tuned/", two_layers.contents())
    (place / "blobs").mkdir()
    (place / "blobs" / ("0" * 64)).write_bytes(b"")
    with pytest.raises(ArtifactError, match="listed in manifest"):
        open_artifact(place)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.97])
def test_a_flipped_bit_in_the_file_is_refused(bundle: Path, tmp_path: Path, share: float):
    data = bytearray(bundle.read_bytes())
    data[int(len(data) * share)] ^= 0x10
    broken = tmp_path / "broken.tuned"
    broken.write_bytes(data)
    with pytest.raises(ArtifactError):
        open_parts(broken)
