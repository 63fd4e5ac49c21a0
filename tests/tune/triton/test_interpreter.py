import os
import subprocess
import sys
from pathlib import Path


def test_kernels_compute_the_right_values_in_the_interpreter():
    """Runs the tests of `interpreted/` in a process in which `@triton.jit` interprets."""
    folder = str(Path(__file__).parent / "interpreted")
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", folder]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
