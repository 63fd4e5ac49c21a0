"""Artifacts written by released versions still load: one for each schema version, kept in tests/data.

`python tests/package/test_kept_artifacts.py` writes the one of the current version, which is then never written again.
"""

import platform
import warnings
from pathlib import Path

import msgspec
import pytest
import torch
import two_layers

import tune_model
from tune_model.package.format.manifest import SCHEMA
from tune_model.package.inspect import describe
from tune_model.package.load import TunedForOtherMachineWarning
from tune_model.package.read import open_artifact
from tune_model.package.write import write_artifact
from tune_model.runtime.kernel import Kernel
from tune_model.tune.target import CpuTarget

DATA = Path(__file__).resolve().parent.parent / "data"


def write_current() -> Path:
    """The two_layers model without machine code, tuned on a CPU that nobody has, its weights inside."""
    tuning = two_layers.tuning(b"")
    plain = Kernel(two_layers.FORM.body)
    choices = tuple(msgspec.structs.replace(choice, kernel=plain) for choice in tuning.choices)
    target = CpuTarget("x86_64", (), "a CPU of long ago", 1, 1 << 20, 1 << 25, "g++", "2.11")
    tuning = msgspec.structs.replace(tuning, choices=choices, target=target, code={})
    contents = two_layers.contents(tuning=tuning, weights=two_layers.weights())
    return write_artifact(DATA / f"schema-{SCHEMA}.tuned", contents)


def test_there_is_one_for_every_version():
    assert sorted(path.name for path in DATA.glob("schema-*.tuned")) == [
        f"schema-{n}.tuned" for n in range(1, SCHEMA + 1)
    ]


@pytest.mark.parametrize("path", sorted(DATA.glob("schema-*.tuned")), ids=lambda path: path.name)
def test_it_opens_and_is_described(path: Path):
    facts = describe(open_artifact(path))
    assert facts.name == "handmade"
    assert facts.parameters == 144
    assert [task.label for task in facts.tasks] == ["matmul 16x8x8 f32 + relu", "matmul 1x8x8 f32 + relu"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the kept artifacts are for x86_64")
@pytest.mark.parametrize("path", sorted(DATA.glob("schema-*.tuned")), ids=lambda path: path.name)
def test_it_still_computes_the_same(path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TunedForOtherMachineWarning)
        tuned = tune_model.load(path)
    x = torch.linspace(-2, 2, 5 * two_layers.WIDTH).reshape(5, two_layers.WIDTH)
    assert torch.allclose(
        tuned(x).double(), two_layers.reference(x, open_artifact(path).weights()), rtol=1e-5, atol=1e-6
    )


if __name__ == "__main__":
    write_current()
