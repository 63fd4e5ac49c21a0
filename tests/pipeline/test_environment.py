import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest
import spinning

from tune_model.pipeline import cli
from tune_model.pipeline.environment import read_environment, unset_spinning
from tune_model.runtime.errors import TuneModelError


@pytest.mark.parametrize(
    ("variables", "cache"),
    [
        ({"XDG_CACHE_HOME": "/caches", "HOME": "/me"}, "/caches/tune-model"),
        ({"HOME": "/me"}, "/me/.cache/tune-model"),
        ({"XDG_CACHE_HOME": "", "HOME": "/me"}, "/me/.cache/tune-model"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/me"}, "/me/.cache/tune-model"),
        ({"HOME": ""}, f"{pwd.getpwuid(os.getuid()).pw_dir}/.cache/tune-model"),
        ({}, f"{pwd.getpwuid(os.getuid()).pw_dir}/.cache/tune-model"),
    ],
)
def test_the_cache_follows_the_xdg_rules(variables, cache):
    assert read_environment(variables).cache_dir == Path(cache)


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 9)
    with pytest.raises(TuneModelError, match="set XDG_CACHE_HOME, or give --records"):
        read_environment({})


SPINNING = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "infinity", "KMP_BLOCKTIME": "infinite"}


def test_only_what_makes_threads_spin_is_unset(monkeypatch: pytest.MonkeyPatch):
    for name, value in {**SPINNING, "OMP_NUM_THREADS": "2"}.items():
        monkeypatch.setenv(name, value)
    unset_spinning()
    unset_spinning()
    assert not set(SPINNING) & set(os.environ)
    assert os.environ["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize("command", ["tune", "retune"])
def test_commands_that_measure_unset_it_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str):
    for name, value in SPINNING.items():
        monkeypatch.setenv(name, value)
    nothing = tmp_path / "nothing.yaml"
    nothing.touch()
    assert cli.run([command, str(nothing)]) == 2
    assert not set(SPINNING) & set(os.environ)


AS_A_TUNER = """
from spinning import check_a_parallel_kernel
from tune_model.pipeline.environment import unset_spinning

if __name__ == "__main__":
    unset_spinning()
    print(check_a_parallel_kernel())
"""


def test_threads_that_wait_actively_cost_no_candidate(tmp_path: Path):
    """Every kernel that runs in parallel was rejected for the threads that OpenMP was told to let spin."""
    script = tmp_path / "as_a_tuner.py"
    script.write_text(AS_A_TUNER)
    support = str(Path(spinning.__file__).parent)
    environment = {**os.environ, **SPINNING, "PYTHONPATH": os.pathsep.join([support, *sys.path])}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "Passed\n"


def test_a_user_without_home_still_has_a_cache():
    assert read_environment({}).cache_dir.is_absolute()
