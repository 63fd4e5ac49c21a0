from pathlib import Path

import pytest

from tune_model.tune.measuring.memory import available_bytes, limit_for_builds, limit_for_measuring

GIB = 1 << 30


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_smallest_of_what_is_told_counts(tmp_path: Path):
    files = {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   16777216 kB\n"}
    assert available_bytes(lay_out(tmp_path, files)) == 16 * GIB
    files = {"sys/fs/cgroup/memory.max": f"{8 * GIB}\n", "sys/fs/cgroup/memory.current": f"{GIB}\n"}
    assert available_bytes(lay_out(tmp_path, files)) == 7 * GIB


@pytest.mark.parametrize("text", ["max\n", "", "garbage"])
def test_a_control_group_without_a_limit_does_not_count(tmp_path: Path, text: str):
    files = {"proc/meminfo": "MemAvailable: 1024 kB\n", "sys/fs/cgroup/memory.max": text}
    assert available_bytes(lay_out(tmp_path, files | {"sys/fs/cgroup/memory.current": "5\n"})) == 1 << 20


def test_nothing_told_is_no_memory_but_a_limit_leaves_room_to_start(tmp_path: Path):
    assert available_bytes(tmp_path) == 0
    assert limit_for_builds() >= 4 * GIB
    assert limit_for_measuring() >= limit_for_builds()
