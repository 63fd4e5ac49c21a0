import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tune_model.tune.measuring.contention import Contention


def test_the_waits_of_all_threads_add_up(tmp_path: Path):
    for thread, waited_ns in ((os.getpid(), 3_000), (99, 4_500)):
        (tmp_path / str(thread)).mkdir()
        (tmp_path / str(thread) / "schedstat").write_text(f"123456 {waited_ns} 7\n")
    (tmp_path / "ended").mkdir()
    assert Contention(tmp_path).waited_us() == 7.5


def test_switches_stand_in_where_the_kernel_does_not_count(tmp_path: Path):
    before = Contention(tmp_path).waited_us()
    assert before % 1000 == 0
    assert Contention(tmp_path).waited_us() >= before


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count waits")
def test_a_process_that_shares_the_core_is_seen():
    cores = os.sched_getaffinity(0)
    contention = Contention()

    def busy() -> float:
        before, end = contention.waited_us(), time.monotonic() + 0.3
        while time.monotonic() < end:
            pass
        return (contention.waited_us() - before) / 3e5

    os.sched_setaffinity(0, {min(cores)})
    try:
        spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # on the same core, as it inherits it
        try:
            assert busy() > 0.1
        finally:
            spinner.kill()
            spinner.wait()
    finally:
        os.sched_setaffinity(0, cores)
