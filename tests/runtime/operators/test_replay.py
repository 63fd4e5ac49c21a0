"""Single operators of other people's code on tuned kernels: right values, right counts, hands off everything else."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_programs import build_library, call, entry, f32
from torch import Tensor, nn
from torch.nn import functional

from tune_model.runtime.kernel import CpuLaunch, Kernel, Within
from tune_model.runtime.operators import replay
from tune_model.runtime.operators.calls import Asked
from tune_model.runtime.operators.replay import OperatorReplay
from tune_model.runtime.program import Apply, Form, Input, Output, Parameter, Program, Symbol, fingerprint
from tune_model.runtime.replay import Replay
from tune_model.runtime.tuned import ModelParts, TunedModel

K, N = 8, 6

LINEAR = Form(
    "matmul",
    ("d0",),
    (Parameter("a0", f32("d0", K)), Parameter("a1", f32(N, K), "weight")),
    (call("aten.linear.default", "@a0", "@a1", results=("t0",)),),
    (Parameter("t0", f32("d0", N)),),
)
BIASED = Form(
    "matmul",
    ("d0",),
    (Parameter("a0", f32("d0", K)), Parameter("a1", f32(N, K), "weight"), Parameter("a2", f32(N), "weight")),
    (call("aten.linear.default", "@a0", "@a1", "@a2", results=("t0",)),),
    (Parameter("t0", f32("d0", N)),),
)
NORM = Form(
    "reduction",
    ("d0",),
    (Parameter("a0", f32("d0", K)), Parameter("a1", f32(K), "weight")),
    (call("aten.rms_norm.default", "@a0", (K,), "@a1", 1e-5, results=("t0",)),),
    (Parameter("t0", f32("d0", K)),),
)
LAYER_NORM = Form(
    "reduction",
    ("d0",),
    (Parameter("a0", f32("d0", K)), Parameter("a1", f32(K), "weight"), Parameter("a2", f32(K), "weight")),
    (call("aten.layer_norm.default", "@a0", (K,), "@a1", "@a2", results=("t0",)),),
    (Parameter("t0", f32("d0", K)),),
)
SOFTMAX = Form(
    "reduction",
    ("d0", "d1"),
    (Parameter("a0", f32("d0", "d1")),),
    (call("aten.softmax.int", "@a0", -1, results=("t0",)),),
    (Parameter("t0", f32("d0", "d1")),),
)
ATTENTION = Form(
    "attention",
    ("d0", "d1"),
    tuple(Parameter(f"a{i}", f32("d0", 2, "d1", 4, strides=("d1*8", 4, 8, 1))) for i in range(3)),
    (call("aten.scaled_dot_product_attention.default", "@a0", "@a1", "@a2", is_causal=True, results=("t0",)),),
    (Parameter("t0", f32("d0", 2, "d1", 4, strides=("d1*8", 4, 8, 1))),),
)
FUSED = Form(
    "matmul",
    ("d0",),
    (Parameter("a0", f32("d0", 4)), Parameter("a1", f32(N, 4), "weight")),
    (
        call("aten.linear.default", "@a0", "@a1", results=("t0",)),
        call("aten.relu.default", "@t0", results=("t1",)),
    ),
    (Parameter("t1", f32("d0", N)),),
)

# Twice the product: nobody can take its result for torch's own.
SOURCE = """
#include <cstdint>
extern "C" void twice(void *const *p, const int64_t *s) {
  const float *x = (const float *)p[0], *w = (const float *)p[1];
  float *y = (float *)p[2];
  for (int64_t i = 0; i < s[0]; ++i)
    for (int64_t j = 0; j < 6; ++j) {
      y[i * 6 + j] = 0;
      for (int64_t k = 0; k < 8; ++k) y[i * 6 + j] += 2 * x[i * 8 + k] * w[j * 8 + k];
    }
}
"""


def model(folder: Path) -> TunedModel:
    sha, code = build_library(SOURCE, folder)
    launch = CpuLaunch(sha, "twice", ("a0", "a1", "t0"), ("a0.size0",))
    few = Kernel((launch,), requires=(Within("a0.size0", 1, 100),))
    forms = {fingerprint(f): f for f in (LINEAR, BIASED, NORM, LAYER_NORM, SOFTMAX, ATTENTION, FUSED)}
    program = Program(
        "forward",
        (Symbol("n", 1, 64, "x", 0),),
        (Input("x", f32("n", K)), Input("w", f32(N, K))),
        (),
        (),
        forms,
        (Apply(fingerprint(LINEAR), ("x", "w"), ("y",), ("n",)),),
        {"y": f32("n", N)},
        (Output("y", "y"),),
    )
    plain = [f for f in forms.values() if f is not LINEAR]
    table = Replay(
        {
            fingerprint(LINEAR): (entry(few, (4,), "twice"),),
            **{fingerprint(f): (entry(Kernel(f.body), (4,) * len(f.dims), "aten"),) for f in plain},
        }
    )
    return TunedModel(ModelParts((program,), {}, table, {sha: code}), {}, "cpu")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> TunedModel:
    return model(tmp_path_factory.mktemp("kernels"))


def outcomes(tuned: TunedModel) -> dict[str, int]:
    """Calls of single operators so far, by label and outcome."""
    rows = [row for row in tuned.coverage().rows() if row.program == "operators"]
    made: dict[str, int] = {}
    for row in rows:
        made[f"{row.label} {row.outcome}"] = made.get(f"{row.label} {row.outcome}", 0) + row.calls
    return made


def changed(tuned: TunedModel, work: Callable[[], None]) -> dict[str, int]:
    before = outcomes(tuned)
    with torch.no_grad(), tuned.operators():
        work()
    return {key: n - before.get(key, 0) for key, n in outcomes(tuned).items() if n != before.get(key, 0)}


X, W, B = torch.randn(2, 2, K), torch.randn(N, K), torch.randn(N)

LINEARS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "functional.linear": functional.linear,
    "a weight by name": lambda x, w: functional.linear(x, weight=w),
    "@": lambda x, w: x @ w.t(),
    "torch.matmul": lambda x, w: torch.matmul(x, w.T),
    "mm": lambda x, w: x.view(-1, K).mm(w.t()).view(2, 2, N),
    "torch.mm": lambda x, w: torch.mm(x.view(-1, K), w.t()).view(2, 2, N),
}


@pytest.mark.parametrize("spelling", LINEARS)
def test_products_run_on_the_tuned_kernel_however_they_are_spelled(tuned: TunedModel, spelling: str):
    made: list[Tensor] = []
    counts = changed(tuned, lambda: made.append(LINEARS[spelling](X, W)))
    torch.testing.assert_close(made[0], 2 * (X @ W.T))
    assert counts == {"matmul linear exact": 1}


def test_a_module_of_layers(tuned: TunedModel):
    layer = nn.Linear(K, N, bias=False)
    made: list[Tensor] = []
    assert changed(tuned, lambda: made.append(layer(X))) == {"matmul linear exact": 1}
    torch.testing.assert_close(made[0], 2 * (X @ layer.weight.detach().T))


OTHERS: dict[str, Callable[[], Tensor]] = {
    "matmul linear": lambda: functional.linear(X, W, B),
    "reduction rms_norm": lambda: functional.rms_norm(X, (K,), torch.ones(K), 1e-5),
    "reduction layer_norm": lambda: functional.layer_norm(X, (K,), torch.ones(K), torch.zeros(K)),
    "reduction softmax": lambda: torch.softmax(X, -1),
    "attention scaled_dot_product_attention": lambda: functional.scaled_dot_product_attention(
        *(torch.arange(32.0).view(1, 4, 2, 4).transpose(1, 2) for _ in range(3)), is_causal=True
    ),
}


@pytest.mark.parametrize("label", OTHERS)
def test_other_operators(tuned: TunedModel, label: str):
    made: list[Tensor] = []
    (count,) = changed(tuned, lambda: made.append(OTHERS[label]())).items()
    assert count in {(f"{label} exact", 1), (f"{label} near", 1)}
    torch.testing.assert_close(made[0], OTHERS[label]())
    assert made[0].shape == OTHERS[label]().shape


MISSES: dict[str, Callable[[], object]] = {
    "sizes of no form": lambda: functional.linear(torch.randn(2, 5), torch.randn(3, 5)),
    "a form that is more than the operator": lambda: functional.linear(torch.randn(2, 4), torch.randn(N, 4)),
    "another epsilon": lambda: functional.rms_norm(X, (K,), torch.ones(K), 1e-6),
    "another dtype": lambda: functional.linear(X.double(), W.double()),
    "a weight with gaps": lambda: functional.linear(X, torch.randn(N, 2 * K)[:, ::2]),
    "attention that is not causal": lambda: functional.scaled_dot_product_attention(
        *(torch.randn(1, 4, 2, 4).transpose(1, 2) for _ in range(3))
    ),
    "more rows than the kernel takes": lambda: functional.linear(torch.randn(101, K), W),
}


@pytest.mark.parametrize("what", MISSES)
def test_calls_that_do_not_fit_run_as_they_would_and_are_counted(tuned: TunedModel, what: str):
    counts = changed(tuned, MISSES[what])
    assert [key.rsplit(" ", 1)[1] for key in counts] == ["miss"]


def test_calls_that_are_none_of_ours_are_left_alone(tuned: TunedModel):
    def work() -> None:
        strided = torch.randn(4, 4, K).transpose(0, 1)
        torch.testing.assert_close(functional.linear(strided, W), strided @ W.T)
        torch.softmax(X, 0)
        functional.layer_norm(X, X.shape[1:])
        functional.softmax(X, -1, dtype=torch.float64)
        torch.matmul(X, torch.randn(2, K, 3))
        with pytest.raises(RuntimeError):
            functional.linear(X, torch.randn(3, 3, 3))

    assert changed(tuned, work) == {}


def test_autograd_is_not_disturbed(tuned: TunedModel):
    layer = nn.Linear(K, N, bias=False)
    with tuned.operators():
        layer(X).sum().backward()
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, X.sum((0, 1)).expand(N, K))


def test_autocast_is_left_alone(tuned: TunedModel):
    """Under autocast a linear layer gave float32, and what followed it ran in another dtype than it would have."""

    def work() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            assert functional.linear(X, W).dtype == torch.bfloat16
            assert (X @ W.T).dtype == torch.bfloat16

    assert changed(tuned, work) == {}


def test_only_the_thread_that_asks_and_only_while_it_asks(tuned: TunedModel):
    seen: list[Tensor] = []
    with torch.no_grad(), tuned.operators():
        thread = threading.Thread(target=lambda: seen.append(functional.linear(X, W)))
        thread.start()
        thread.join()
        inside = functional.linear(X, W)
    outside = functional.linear(X, W)
    torch.testing.assert_close(seen[0], X @ W.T)
    torch.testing.assert_close(inside, 2 * (X @ W.T))
    torch.testing.assert_close(outside, X @ W.T)


def test_a_misaligned_weight_is_another_call(tuned: TunedModel):
    memory = torch.randn(N * K + 1)
    shifted = memory[1:].view(N, K)
    made: list[Tensor] = []
    changed(tuned, lambda: made.append(functional.linear(X, shifted)))
    torch.testing.assert_close(made[0], 2 * (X @ shifted.T))


def test_a_call_that_is_forgotten_before_it_is_counted_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Calls were counted after the lock: one that another thread pushed out in between was added to nothing."""
    tuned = model(tmp_path)
    monkeypatch.setattr(replay, "_KNOWN_AT_MOST", 1)
    find = OperatorReplay._find
    others: list[threading.Thread] = []
    made: list[Tensor] = []

    def work() -> None:
        with torch.no_grad(), tuned.operators():
            functional.linear(X[0], W)

    def found_and_pushed_out(self: OperatorReplay, asked: Asked) -> object:
        known = find(self, asked)
        if not others:
            others.append(threading.Thread(target=work))
            others[0].start()
            others[0].join()
        return known

    monkeypatch.setattr(OperatorReplay, "_find", found_and_pushed_out)
    counts = changed(tuned, lambda: made.append(functional.linear(X, W)))
    assert counts == {"matmul linear exact": 1, "matmul linear near": 1}
