"""Keys follow every field of what they stand for, and nothing else."""

import enum
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tuning_fakes import TARGET, FakeFamily, linear_plan

from tune_model.extract.task import NumericRules, Task, task_key
from tune_model.runtime.program import (
    Call,
    Form,
    Items,
    Parameter,
    Real,
    Ref,
    Size,
    TensorType,
    TorchName,
    ValueRange,
)
from tune_model.tune.building import source as source_files
from tune_model.tune.building.source import digest_family, digest_measuring
from tune_model.tune.candidate import Candidate, Effort
from tune_model.tune.families import families_for
from tune_model.tune.families.aten import FAMILY as ATEN
from tune_model.tune.measuring.policy import policy_for
from tune_model.tune.records import identity
from tune_model.tune.records.identity import (
    FamilySource,
    build_key,
    confirmation_key,
    kindred_key,
    measurement_key,
    race_key,
    target_key,
)
from tune_model.tune.target import CpuTarget, CudaTarget, Target

SOURCE = FamilySource("gemv", 1, "abc")
CANDIDATE = Candidate("gemv", (("block", 64), ("hint", "first"), ("packed", False), ("share", 0.5)))
TASK_KEY = linear_plan(1).tasks[0].key
GPU = CudaTarget(90, "NVIDIA H200", 132, 60 << 20, 232448, 65536, 1 << 37, 1980, "580", "13.1", "2.11", "3.6")
TARGETS = [TARGET, GPU]

# Every kind of thing that a form can hold.
TASK = Task(
    Form(
        "attention",
        (),
        (
            Parameter("a0", TensorType("bfloat16", (8, 16), (32, 1))),
            Parameter("a1", TensorType("int64", (8,)), "activation", ValueRange(0, 7)),
            Parameter("a2", TensorType("bfloat16", (4, 16)), "weight"),
        ),
        (
            Call("aten.linear.default", (Ref("a0"), Ref("a2"), None), (("scale", 0.5), ("is_causal", True)), ("t0",)),
            Call("aten.view.default", (Ref("t0"), Items((Size("8"), -1, Real("inf")))), (), (None, "t1")),
            Call("aten.to.dtype", (Ref("t1"), TorchName("dtype", "float32")), results=("t2",)),
        ),
        (Parameter("t2", TensorType("float32", (8, 4))),),
    ),
    NumericRules(allow_tf32=True),
)


def variants(value: Any) -> Iterator[Any]:
    """Yield the value with one leaf changed, for every leaf."""
    match value:
        case msgspec.Struct():
            for field in value.__struct_fields__:
                for changed in variants(getattr(value, field)):
                    yield msgspec.structs.replace(value, **{field: changed})
        case tuple():
            yield (*value, "more") if not value or isinstance(value[0], str) else (*value, value[0])
            for place, item in enumerate(value):
                for changed in variants(item):
                    yield (*value[:place], changed, *value[place + 1 :])
        case enum.StrEnum():
            yield from (other for other in type(value) if other != value)
        case bool():
            yield not value
        case int() | float():
            yield 0 if value == math.inf else value + 1
        case str():
            yield value + "x"
        case None:
            yield 1
        case _:
            raise TypeError(value)


def names(values: list[Any]) -> set[str]:
    return {str(value) for value in values}


def test_the_walk_changes_every_leaf_once():
    assert len(list(variants(TASK))) > 60
    assert len(names(list(variants(TASK)))) == len(list(variants(TASK)))


def test_every_field_of_a_task_changes_its_key():
    keys = {task_key(TASK), *(task_key(changed) for changed in variants(TASK))}
    assert len(keys) == 1 + len(list(variants(TASK)))


def measurement(
    source: Any = SOURCE, task: Any = TASK_KEY, candidate: Any = CANDIDATE, target: Any = GPU, policy: Any = None
) -> str:
    return measurement_key(source, task, candidate, target, (policy or policy_for(GPU, 1 << 40)).key)


def build(source: Any = SOURCE, task: Any = TASK_KEY, candidate: Any = CANDIDATE) -> str:
    return build_key(source, task, candidate, GPU)


def race(
    sources: Any = (SOURCE,), task: Any = TASK_KEY, target: Any = GPU, policy: Any = None, effort: Any = Effort.QUICK
) -> str:
    return race_key(sources, task, target_key(target), (policy or policy_for(GPU, 1 << 40)).key, effort)


IDENTITIES = [
    (measurement, "source", SOURCE),
    (measurement, "task", TASK_KEY),
    (measurement, "candidate", CANDIDATE),
    (measurement, "target", GPU),
    (measurement, "target", TARGET),
    (measurement, "policy", policy_for(GPU, 1 << 40)),
    (measurement, "policy", policy_for(TARGET, 1 << 40)),
    (build, "source", SOURCE),
    (build, "task", TASK_KEY),
    (build, "candidate", CANDIDATE),
    (race, "sources", (SOURCE, FamilySource("other", 1, "abc"))),
    (race, "task", TASK_KEY),
    (race, "target", GPU),
    (race, "target", TARGET),
    (race, "policy", policy_for(GPU, 1 << 40)),
    (race, "effort", Effort.QUICK),
]


@pytest.mark.parametrize(("key", "argument", "value"), IDENTITIES, ids=[f"{k.__name__} {a}" for k, a, _ in IDENTITIES])
def test_every_field_of_an_identity_changes_the_key(key: Any, argument: str, value: Any):
    changed = list(variants(value))
    keys = {key(**{argument: value}), *(key(**{argument: other}) for other in changed)}
    assert changed
    assert len(keys) == 1 + len(names(changed))


def test_a_confirmation_depends_on_both_that_were_compared():
    assert len({confirmation_key("a", "b"), confirmation_key("a2", "b"), confirmation_key("a", "b2")}) == 3


def test_keys_of_different_kinds_never_meet():
    assert len({measurement(), build(), race(), target_key(GPU), confirmation_key("a", "b")}) == 5


def test_code_depends_on_what_shapes_it_and_not_on_names():
    def key(**changes: object) -> str:
        return build_key(SOURCE, TASK_KEY, CANDIDATE, msgspec.structs.replace(GPU, **changes))

    assert key() == key(driver_branch="570") == key(name="NVIDIA H100") == key(cublas="12.9")
    assert len({key(), key(arch=100), key(triton="3.9"), key(shared_bytes=1), key(sm_count=1)}) == 5


LIBRARIES = {
    "aten": {"cublas", "torch"},
    "triton_gemv": {"triton"},
    "cublaslt": {"cublas", "triton"},
    "never heard of": {"cublas", "torch", "triton"},
}


@pytest.mark.parametrize(("family", "used"), LIBRARIES.items())
def test_times_hold_while_the_libraries_they_depend_on_do(family: str, used: set[str]):
    """After a cuBLAS update the externs are timed again, and Triton's kernels are not."""
    source = FamilySource(family, 1, "abc")
    before = measurement(source=source)
    moved = {
        field
        for field in GPU.__struct_fields__
        if measurement(
            source=source, target=msgspec.structs.replace(GPU, **{field: next(variants(getattr(GPU, field)))})
        )
        != before
    }
    assert moved == set(GPU.__struct_fields__) - {"cublas", "torch", "triton"} | used


@pytest.mark.parametrize("target", TARGETS, ids=["cpu", "cuda"])
def test_every_family_says_which_libraries_it_depends_on(target: Target):
    """One that is not listed works, but is timed again whenever any library changes. These two call the library too."""
    unlisted = {family.name for family in families_for(target)} - identity._USED.keys()
    assert unlisted <= {"triton_epilogue", "cpp_epilogue"}


@pytest.mark.parametrize("target", TARGETS, ids=["cpu", "cuda"])
def test_machines_that_can_run_the_same_code_are_kindred(target: Target):
    def key(of: Target, **changes: Any) -> str:
        found = {"sources": (SOURCE,), "task": TASK_KEY, "policy": "p/1", "effort": Effort.QUICK} | changes
        return kindred_key(target=of, **found)

    must_match = {"machine", "isa"} if isinstance(target, CpuTarget) else {"arch"}
    for field in target.__struct_fields__:
        other = msgspec.structs.replace(target, **{field: next(variants(getattr(target, field)))})
        assert (key(other) == key(target)) == (field not in must_match), field
    keys = [key(target), key(target, sources=()), key(target, task="x"), key(target, policy="p/2")]
    assert len({*keys, key(target, effort=Effort.BALANCED), key(GPU if target is TARGET else TARGET)}) == 6


def test_a_field_that_no_key_accounts_for_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(identity._SHAPES_CODE, "CpuTarget", {"machine"})
    with pytest.raises(TypeError, match="isa"):
        target_key(TARGET)


WORKBENCH = "tune_model.tune.measuring.workbench"
STEP_BENCH = "tune_model.tune.measuring.step_bench"


@pytest.mark.parametrize(
    ("measuring", "module"),
    [
        (WORKBENCH, "tune_model.runtime.attention"),
        (WORKBENCH, "tune_model.runtime.execution.binding"),
        (WORKBENCH, "tune_model.runtime.operators.allowed"),
        (WORKBENCH, "tune_model.tune.measuring.reference"),
        (STEP_BENCH, "tune_model.runtime.execution.executor"),
        (STEP_BENCH, "tune_model.runtime.execution.graphs"),
    ],
)
def test_times_depend_on_the_code_that_takes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measuring: str, module: str
):
    """A mend in the runtime left the times and verdicts of the code before it valid."""
    before = digest_measuring(measuring)
    assert digest_measuring(measuring) == before
    file_of = source_files._file_of
    found = file_of(module)
    assert found is not None
    mended = tmp_path / "mended.py"
    mended.write_text(found.read_text() + "\nMENDED = True\n")
    monkeypatch.setattr(source_files, "_file_of", lambda name: mended if name == module else file_of(name))
    assert digest_measuring(measuring) != before


def test_a_module_without_a_file_is_no_measuring_code():
    with pytest.raises(TypeError, match=r"nowhere has no source file"):
        digest_measuring("tune_model.nowhere")


def test_the_source_digest_follows_imports_and_ignores_places(tmp_path: Path):
    found = digest_family(ATEN)
    assert found == digest_family(ATEN)
    assert (found.name, found.version) == ("aten", 1)
    assert digest_family(FakeFamily("x", ((),))).digest != found.digest
    assert not set(CpuTarget.__struct_fields__) & {"host", "path", "user"}
