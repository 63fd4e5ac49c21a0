"""A bundle written by each version of the bundle format still opens: kept in tests/data, never written again.

`python tests/package/test_kept_bundles.py` writes the one of the current version.
"""

from pathlib import Path

import msgspec
import pytest
import two_layers

from tune_model.package.format.bundle import BUNDLE_SCHEMA
from tune_model.package.merge import merge_artifacts
from tune_model.package.parts import named_part
from tune_model.package.read import open_artifact, open_parts
from tune_model.package.write import write_artifact
from tune_model.runtime.kernel import Kernel
from tune_model.tune.target import CpuTarget, CudaTarget, Target

DATA = Path(__file__).resolve().parent.parent / "data"
TARGETS: dict[str, Target] = {
    "a CPU of long ago": CpuTarget("x86_64", (), "a CPU of long ago", 1, 1 << 20, 1 << 25, "g++", "2.11"),
    "a GPU of long ago": CudaTarget(
        90, "a GPU of long ago", 132, 50 << 20, 232448, 65536, 140 << 30, 1980, "580", "13.0", "2.11", "3.6"
    ),
}


def write_current(folder: Path) -> None:
    """The two_layers model without machine code, as if tuned on machines that nobody has."""
    tuning = two_layers.tuning(b"")
    plain = Kernel(two_layers.FORM.body)
    choices = tuple(msgspec.structs.replace(choice, kernel=plain) for choice in tuning.choices)
    singles = []
    for name, target in TARGETS.items():
        tuned = msgspec.structs.replace(tuning, choices=choices, target=target, code={})
        contents = two_layers.contents(tuning=tuned, weights=two_layers.weights())
        singles.append(write_artifact(folder / f"{name}.tuned", contents))
    merge_artifacts(singles, DATA / f"bundle-{BUNDLE_SCHEMA}.tuned")


def test_there_is_one_for_every_version():
    kept = sorted(path.name for path in DATA.glob("bundle-*.tuned"))
    assert kept == [f"bundle-{n}.tuned" for n in range(1, BUNDLE_SCHEMA + 1)]


@pytest.mark.parametrize("path", sorted(DATA.glob("bundle-*.tuned")), ids=lambda path: path.name)
def test_its_parts_open(path: Path):
    parts = open_parts(path)
    assert {part.manifest.target.name for part in parts} == TARGETS.keys()
    gpu = open_artifact(path, named_part("sm_90"))
    assert gpu.manifest.target.name == "a GPU of long ago"
    assert [len(list(part.records())) for part in parts] == [6, 6]
    assert set(gpu.weights() or ()) == set(two_layers.weights())


if __name__ == "__main__":
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as temporary:
        write_current(Path(temporary))
