"""A tiny artifact's contents made by hand: two layers of linear + relu, one kernel in C++, one extern.

y = relu(x @ w.T + b) twice, then * scale     x: [batch, 8], batch 1 to 64, tuned at 1 and 16
"""

import hashlib
import subprocess
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from tune_model.extract.request import FactorySource, ModelInput, Phase, Request
from tune_model.extract.task import NumericRules, Plan, PlannedTask, Site, Skipped, Task, task_key
from tune_model.package.contents import ArtifactContents
from tune_model.package.system import probe_system
from tune_model.runtime.kernel import CpuLaunch, Kernel, Within
from tune_model.runtime.program import (
    Apply,
    Call,
    Constant,
    Form,
    Input,
    Output,
    Parameter,
    Program,
    Ref,
    Symbol,
    TensorType,
    Weight,
    bind_form,
    fingerprint,
)
from tune_model.tune.candidate import Candidate, Rejected
from tune_model.tune.choice import Choice, Measurement, Tuning
from tune_model.tune.target import CpuTarget

WIDTH = 8

SOURCE = """
#include <cstdint>
extern "C" void linear_relu(void *const *pointers, const int64_t *sizes) {
  const float *x = (const float *)pointers[0], *w = (const float *)pointers[1], *b = (const float *)pointers[2];
  float *y = (float *)pointers[3];
  for (int64_t i = 0; i < sizes[0]; ++i)
    for (int64_t j = 0; j < 8; ++j) {
      float sum = b[j];
      for (int64_t k = 0; k < 8; ++k) sum += x[i * 8 + k] * w[j * 8 + k];
      y[i * 8 + j] = sum > 0 ? sum : 0;
    }
}
"""

FORM = Form(
    kind="matmul",
    dims=("d0",),
    parameters=(
        Parameter("a0", TensorType("float32", ("d0", WIDTH))),
        Parameter("a1", TensorType("float32", (WIDTH, WIDTH)), "weight"),
        Parameter("a2", TensorType("float32", (WIDTH,)), "weight"),
    ),
    body=(
        Call("aten.linear.default", (Ref("a0"), Ref("a1"), Ref("a2")), results=("t0",)),
        Call("aten.relu.default", (Ref("t0"),), results=("t1",)),
    ),
    results=(Parameter("t1", TensorType("float32", ("d0", WIDTH))),),
)


@lru_cache
def compiled(text: str = SOURCE) -> bytes:
    """A kernel's source as a shared library."""
    with TemporaryDirectory() as folder:
        source, library = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        source.write_text(text)
        subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        return library.read_bytes()


def program() -> Program:
    value = TensorType("float32", ("batch", WIDTH))
    form = fingerprint(FORM)
    return Program(
        name="forward",
        symbols=(Symbol("batch", 1, 64, "x", 0),),
        inputs=(Input("x", value),),
        weights=tuple(
            Weight(name, TensorType("float32", shape), (name,))
            for name, shape in (("w0", (WIDTH, WIDTH)), ("b0", (WIDTH,)), ("w1", (WIDTH, WIDTH)), ("b1", (WIDTH,)))
        ),
        constants=(Constant("scale", TensorType("float32", ()), "scale"),),
        forms={form: FORM},
        steps=(
            Apply(form, ("x", "w0", "b0"), ("v0",), ("batch",)),
            Apply(form, ("v0", "w1", "b1"), ("v1",), ("batch",)),
            Call("aten.mul.Tensor", (Ref("v1"), Ref("scale")), results=("v2",)),
        ),
        values={"v0": value, "v1": value, "v2": value},
        outputs=(Output("y", "v2"),),
    )


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {w.name: torch.randn(w.type.shape, generator=generator) for w in program().weights}


def reference(x: Tensor, given: dict[str, Tensor] | None = None) -> Tensor:
    """What the model computes with these weights (its own by default), in float64."""
    w = {name: tensor.double() for name, tensor in (given or weights()).items()}
    hidden = torch.relu(x.double() @ w["w0"].T + w["b0"])
    return torch.relu(hidden @ w["w1"].T + w["b1"]) * 0.5


def target() -> CpuTarget:
    """This machine, with no instruction set beyond the compiler's default."""
    system = probe_system("cpu")
    return CpuTarget(system.machine, (), system.name, system.threads, 1 << 20, 1 << 25, "g++", system.torch)


def kernel(code: bytes) -> Kernel:
    launch = CpuLaunch(hashlib.sha256(code).hexdigest(), "linear_relu", ("a0", "a1", "a2", "t1"), ("a0.size0",))
    return Kernel((launch,), requires=(Within("a0.size1", WIDTH, WIDTH),))


def tuning(code: bytes) -> Tuning:
    form = fingerprint(FORM)
    planned, choices = [], []
    for rows in (1, 16):
        task = Task(bind_form(FORM, (rows,)), NumericRules())
        site = Site("forward", (("batch", rows),), form, (rows,), 2)
        planned.append(
            PlannedTask(task_key(task), f"matmul {rows}x8x8 f32 + relu", task, (site,), 2.0, 128 * rows, 640)
        )
        loops = Candidate("cpp_small", (("unroll", 8),))
        measurements = (
            Measurement(Candidate("aten"), 3.0, 2.9, 3.2, 9, "final"),
            Measurement(loops, 1.5, 1.4, 1.75, 9, "final", error=1e-7),
        )
        rejections = ((Candidate("mkl_packed"), Rejected("unsupported", "8 columns; needs 16")),)
        win = (
            (loops, kernel(code), 1.5, 3.0, 1.8, 2.2)
            if rows == 1
            else (Candidate("aten"), Kernel(FORM.body), 3.0, 3.0, 1.0, 1.0)
        )
        status = "tuned" if rows == 1 else "no gain"
        choices.append(Choice(task_key(task), *win, measurements, rejections, status))
    plan = Plan(
        (program(),), tuple(planned), (Skipped("forward", "aten.mul.Tensor", 1, "a lone operator"),), ("rung 1",)
    )
    return Tuning(plan, target(), tuple(choices), {hashlib.sha256(code).hexdigest(): code}, 2, 4, 1.0)


def contents(**changes: object) -> ArtifactContents:
    """All of it; `changes` replace fields of `ArtifactContents`."""
    request = Request(
        source=FactorySource("two_layers:model"),
        dtype="float32",
        task="forward",
        phases=(Phase("forward", {"batch": (1, 16)}),),
        inputs=(ModelInput("x", ("batch", WIDTH), "float32"),),
    )
    fields = {
        "name": "two-layers",
        "request": request,
        "tuning": tuning(compiled()),
        "constants": {"scale": torch.tensor(0.5)},
        "config_yaml": "name: two-layers\n",
        "architecture": "Sequential",
    }
    return ArtifactContents(**{**fields, **changes})


class Model(torch.nn.Module):
    """The model that the program was written from."""

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in weights().items():
            self.register_parameter(name, torch.nn.Parameter(tensor))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(torch.nn.functional.linear(x, self.w0, self.b0))
        return torch.relu(torch.nn.functional.linear(hidden, self.w1, self.b1)) * 0.5


def model() -> torch.nn.Module:
    """The factory that the artifact names."""
    return Model()
