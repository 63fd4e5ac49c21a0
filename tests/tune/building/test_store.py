import hashlib
from pathlib import Path

import pytest

from tune_model.runtime.kernel import CpuLaunch, Kernel
from tune_model.tune.building.store import KernelStore, StoreError
from tune_model.tune.candidate import Built, Rejected

CODE = b"machine code"
NAME = hashlib.sha256(CODE).hexdigest()
BUILT = Built(Kernel((CpuLaunch(NAME, "run", ("a0", "t0")),)), {NAME: CODE}, 40, 0, 0.5)


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    return KernelStore(tmp_path / "kernels")


def test_what_was_put_is_found_by_another_process(store: KernelStore):
    store.put("aa11", BUILT)
    store.put("bb22", Rejected("shared memory", "needs 2, limit 1"))
    again = KernelStore(store.folder)
    assert again.get("aa11") == BUILT
    assert again.get("bb22") == Rejected("shared memory", "needs 2, limit 1")
    assert again.get("cc33") is None


def test_equal_code_is_stored_once(store: KernelStore):
    store.put("aa11", BUILT)
    store.put("bb22", BUILT)
    assert [p.name for p in (store.folder / "objects").rglob("*") if p.is_file()] == [NAME]


@pytest.mark.parametrize("damage", [b"", b"machine codf", b"machine code and more"])
def test_damaged_code_is_a_miss_and_can_be_put_again(store: KernelStore, damage: bytes):
    store.put("aa11", BUILT)
    (store.folder / "objects" / NAME[:2] / NAME).write_bytes(damage)
    assert store.get("aa11") is None
    store.put("aa11", BUILT)
    assert store.get("aa11") == BUILT


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"type":"built"}', b"\xff\xfe"])
def test_a_damaged_index_entry_is_a_miss(store: KernelStore, damage: bytes):
    store.put("aa11", BUILT)
    (store.folder / "index" / "aa" / "aa11.json").write_bytes(damage)
    assert store.get("aa11") is None


def test_a_file_in_the_way_is_one_clear_error_and_leaves_nothing(tmp_path: Path):
    (tmp_path / "kernels").write_text("in the way")
    with pytest.raises(StoreError, match="kernels: cannot write built kernels"):
        KernelStore(tmp_path / "kernels").put("aa11", BUILT)
    assert [p.name for p in tmp_path.iterdir()] == ["kernels"]
