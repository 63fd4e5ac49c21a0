import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tune_model.tune.measuring.contention import Contention


def test_the_waits_of_all_threads_add_up(tmp_path: Path):
    for thread, waited_ns in ((os.getpid(), 3_000), (99, 4_500)):
        (tmp_path / str(thread)).mkdir()
        (tmp_path / str(thread) / "schedstat").write_text(f"123456 {waited_ns} 7\n")
    (tmp_path / "ended").mkdir()
    assert Contention(tmp_path).waited_us() == 7.5


def test_switches_stand_in_where_the_kernel_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    contention = Contention(tmp_path)
    for switches in (3, 5):
        usage = SimpleNamespace(ru_nivcsw=switches)
        monkeypatch.setattr(resource, "getrusage", lambda _who, usage=usage: usage)
        assert contention.waited_us() == switches * 1000.0


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count waits")
def test_a_process_that_shares_the_core_is_seen():
    """Two that never rest get half a core each, whatever else runs; a tenth of that will do."""
    cores = os.sched_getaffinity(0)
    contention = Contention()

    def busy() -> float:
        before, began = contention.waited_us(), time.monotonic()
        while time.monotonic() - began < 0.5:
            pass
        return (contention.waited_us() - before) / 1e6 / (time.monotonic() - began)

    os.sched_setaffinity(0, {min(cores)})
    try:
        code = "print(1, flush=True)\nwhile True: pass"
        # On the same core, as it inherits it.
        spinner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        try:
            assert spinner.stdout is not None
            assert spinner.stdout.readline() == b"1\n"
            assert busy() > 0.05
        finally:
            spinner.kill()
            spinner.wait()
    finally:
        os.sched_setaffinity(0, cores)
