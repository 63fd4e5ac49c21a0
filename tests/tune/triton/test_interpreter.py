import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import triton


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


@pytest.mark.skipif(
    version(triton.__version__) < (3, 7) and version(np.__version__) >= (2, 4),
    reason="this Triton's interpreter makes integers of one-element arrays, which this NumPy refuses",
)
def test_kernels_compute_the_right_values_in_the_interpreter():
    """Runs the tests of `interpreted/` in a process in which `@triton.jit` interprets."""
    folder = str(Path(__file__).parent / "interpreted")
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", folder]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
