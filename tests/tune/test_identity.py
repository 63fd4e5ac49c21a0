from pathlib import Path

import msgspec
import pytest
from tuning_fakes import TARGET, FakeFamily, linear_plan

from tune_model.tune.candidate import Candidate, Effort
from tune_model.tune.families.aten import FAMILY as ATEN
from tune_model.tune.identity import FamilySource, build_key, measurement_key, race_key, target_key
from tune_model.tune.source import digest_family
from tune_model.tune.target import CpuTarget, CudaTarget, Target

SOURCE = FamilySource("gemv", 1, "abc")
CANDIDATE = Candidate("gemv", (("block", 64),))
TASK = linear_plan(1).tasks[0].key
GPU = CudaTarget(90, "NVIDIA H200", 132, 60 << 20, 232448, 65536, 1 << 37, 1980, "580", "13.1", "2.11", "3.6")


def changed(value: object) -> object:
    match value:
        case int():
            return value + 1
        case str():
            return value + "x"
        case tuple():
            return (*value, "x")
    raise TypeError(value)


@pytest.mark.parametrize("target", [TARGET, GPU], ids=["cpu", "cuda"])
def test_every_field_of_a_target_changes_its_key(target: Target):
    keys = {target_key(target)}
    for field in target.__struct_fields__:
        keys.add(target_key(msgspec.structs.replace(target, **{field: changed(getattr(target, field))})))
    assert len(keys) == 1 + len(target.__struct_fields__)


def test_code_depends_on_what_shapes_it_and_not_on_names():
    def key(**changes: object) -> str:
        return build_key(SOURCE, TASK, CANDIDATE, msgspec.structs.replace(GPU, **changes))

    assert key() == key(driver_branch="570") == key(name="NVIDIA H100") == key(cublas="12.9")
    assert len({key(), key(arch=100), key(triton="3.9"), key(shared_bytes=1), key(sm_count=1)}) == 5


def test_everything_else_a_measurement_depends_on_changes_its_key():
    base = (SOURCE, TASK, CANDIDATE, "target", "policy/1")
    variants = [
        base,
        (FamilySource("gemv", 2, "abc"), *base[1:]),
        (FamilySource("gemv", 1, "abd"), *base[1:]),
        (SOURCE, "other", *base[2:]),
        (SOURCE, TASK, Candidate("gemv", (("block", 65),)), *base[3:]),
        (*base[:3], "target2", "policy/1"),
        (*base[:4], "policy/2"),
    ]
    assert len({measurement_key(*v) for v in variants}) == len(variants)
    races = [
        race_key((SOURCE,), TASK, "t", "p", Effort.QUICK),
        race_key((SOURCE, SOURCE), TASK, "t", "p", Effort.QUICK),
        race_key((SOURCE,), TASK, "t", "p", Effort.BALANCED),
    ]
    assert len(set(races)) == 3


def test_a_field_that_no_key_accounts_for_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(
        __import__("tune_model.tune.identity", fromlist=["_SHAPES_CODE"])._SHAPES_CODE, "CpuTarget", {"machine"}
    )
    with pytest.raises(TypeError, match="isa"):
        target_key(TARGET)


def test_the_source_digest_follows_imports_and_ignores_places(tmp_path: Path):
    found = digest_family(ATEN)
    assert found == digest_family(ATEN)
    assert (found.name, found.version) == ("aten", 1)
    assert digest_family(FakeFamily("x", ((),))).digest != found.digest
    assert not set(CpuTarget.__struct_fields__) & {"host", "path", "user"}
