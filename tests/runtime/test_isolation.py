"""A server: no compiler, no tracer, nothing writable, and no child process."""

import os
import subprocess
import sys
from pathlib import Path

from small_programs import build_library

SOURCE = """
#include <algorithm>
#include <cstdint>
extern "C" void linear_relu(void *const *pointers, const int64_t *sizes) {
  const float *x = (const float *)pointers[0], *w = (const float *)pointers[1], *b = (const float *)pointers[2];
  float *out = (float *)pointers[3];
  const int64_t m = sizes[0], n = sizes[1], k = sizes[2];
#pragma omp parallel for
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < n; j++) {
      float sum = b[j];
      for (int64_t l = 0; l < k; l++) sum += x[i * k + l] * w[j * k + l];
      out[i * n + j] = std::max(sum, 0.0f);
    }
}
"""

SERVER = """
import os, sys
for name in ("triton", "transformers", "onnx", "torch._inductor"):
    sys.modules[name] = None
events = []
def watch(event, args):
    if event in {"os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system", "os.spawn", "subprocess.Popen"}:
        events.append((event, args))
sys.addaudithook(watch)
import torch
from pathlib import Path
from small_programs import (call, empty_replay, entry, language_greedy, language_model, language_weights, linear_relu,
                       softmax_program, softmax_reference, softmax_weights)
from tune_model.runtime.kernel import CpuLaunch, Kernel
from tune_model.runtime.program import fingerprint
from tune_model.runtime.replay import Replay
from tune_model.runtime.tuned import ModelParts, TunedModel

code, path = sys.argv[1:]
launch = CpuLaunch(code, "linear_relu", ("a0", "a1", "a2", "t1"), ("t1.size0", "t1.size1", "a0.size1"))
replay = Replay({fingerprint(linear_relu()): (entry(Kernel((launch,)), (12,)),)})
parts = ModelParts((softmax_program(),), {"one": torch.ones(1)}, replay, {code: Path(path).read_bytes()})
model = TunedModel(parts, softmax_weights(), "cpu", strict=True)
for batch, length in ((3, 4), (5, 6)):
    x = torch.randn(batch, length, 8)
    torch.testing.assert_close(model(x).double(), softmax_reference(x, softmax_weights()), atol=1e-5, rtol=1e-5)
assert model.coverage().totals() == {"exact": 1, "near": 1, "miss": 0}

weights = language_weights()
programs = (language_model("prefill"), language_model("decode"))
model = TunedModel(ModelParts(programs, {}, empty_replay(), {}), weights, "cpu")
assert model.complete([[3, 1, 4], [9]], 5) == [language_greedy(p, 5, weights) for p in ([3, 1, 4], [9])]

assert events == [], events
assert "torch._dynamo" not in sys.modules
children = Path(f"/proc/self/task/{os.getpid()}/children")
assert not children.exists() or not children.read_text().strip()
"""


def test_a_server_needs_no_compiler_starts_no_process_and_writes_nothing(tmp_path: Path):
    code, data = build_library(SOURCE, tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o500)
    (tmp_path / "kernel.bin").write_bytes(data)
    support = Path(__file__).resolve().parent.parent / "support"
    paths = os.pathsep.join([str(support), *(p for p in sys.path if p)])
    done = subprocess.run(
        [sys.executable, "-P", "-c", SERVER, code, str(tmp_path / "kernel.bin")],
        capture_output=True,
        text=True,
        check=False,
        cwd=home,
        env={"PATH": "", "HOME": str(home), "PYTHONPATH": paths, "TMPDIR": "/nonexistent"},
    )
    assert done.returncode == 0, done.stderr
    assert list(home.iterdir()) == []
