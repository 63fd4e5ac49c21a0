import threading
from pathlib import Path

import msgspec
import pytest
import torch
from small_programs import (
    F32,
    build_library,
    call,
    empty_replay,
    entry,
    f32,
    i64,
    linear_relu,
    softmax_program,
    softmax_reference,
    softmax_weights,
)

from tune_model.runtime.coverage import Coverage, NotTunedError
from tune_model.runtime.execution.executor import Executor, InputError
from tune_model.runtime.execution.invoke import ProgramError
from tune_model.runtime.kernel import Aligned, CpuLaunch, Kernel, Multiple, Within
from tune_model.runtime.program import (
    Apply,
    Call,
    Form,
    Input,
    Output,
    Parameter,
    Program,
    Ref,
    Symbol,
    TensorType,
    Transpose,
    fingerprint,
)
from tune_model.runtime.replay import Entry, Replay
from tune_model.runtime.weights.transforms import bind_weights

FORM = fingerprint(linear_relu())
WEIGHTS = softmax_weights()
CONSTANTS = {"one": torch.ones(1)}

SOURCE = """
#include <algorithm>
#include <cstdint>
extern "C" void linear_relu(void *const *pointers, const int64_t *sizes) {
  const float *x = (const float *)pointers[0], *w = (const float *)pointers[1], *b = (const float *)pointers[2];
  float *out = (float *)pointers[3];
  const int64_t m = sizes[0], n = sizes[1], k = sizes[2];
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < n; j++) {
      float sum = b[j];
      for (int64_t l = 0; l < k; l++) sum += x[i * k + l] * w[j * k + l];
      out[i * n + j] = std::max(sum, 0.0f);
    }
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    return build_library(SOURCE, tmp_path_factory.mktemp("library"))


def tuned_entry(code: str, dims: tuple[int, ...], *requires: Within | Multiple | Aligned) -> Entry:
    launch = CpuLaunch(code, "linear_relu", ("a0", "a1", "a2", "t1"), ("t1.size0", "t1.size1", "a0.size1"))
    return entry(Kernel((launch,), requires=requires), dims, f"cpp{dims}")


def executor(replay: Replay | None = None, **kwargs: object) -> Executor:
    program = softmax_program()
    weights = bind_weights([program], WEIGHTS, "cpu")
    code = kwargs.pop("code", {})
    return Executor(program, weights, CONSTANTS, replay or empty_replay(), code, "cpu", **kwargs)


def check(run: Executor, batch: int, length: int) -> None:
    x = torch.randn(batch, length, 8)
    out = run.run({"x": x})["out"]
    torch.testing.assert_close(out.double(), softmax_reference(x, WEIGHTS), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 7), (5, 1), (3, 4), (2, 0)])
def test_an_empty_table_runs_the_forms_own_operators(batch: int, length: int):
    run = executor()
    for _ in range(2):  # the first run of a plan is checked, later ones are not
        check(run, batch, length)
    assert run.coverage.totals() == {"exact": 0, "near": 0, "miss": 2}


def test_tuned_kernels_run_at_their_point_and_near_it(library: tuple[str, bytes]):
    replay = Replay({FORM: (tuned_entry(library[0], (12,)), tuned_entry(library[0], (100,)))})
    run = executor(replay, code=dict([library]))
    for batch, length in ((3, 4), (2, 50), (2, 0)):
        check(run, batch, length)
        check(run, batch, length)
    rows = {row.dims: row for row in run.coverage.rows()}
    assert {dims: (row.outcome, row.candidate, row.calls) for dims, row in rows.items()} == {
        (12,): ("exact", "cpp(12,)", 2),
        (100,): ("exact", "cpp(100,)", 2),
        (0,): ("near", "cpp(12,)", 2),
    }


def test_what_runs_is_the_nearest_legal_kernel(library: tuple[str, bytes]):
    replay = Replay(
        {
            FORM: (
                tuned_entry(library[0], (8,), Multiple("a0.size0", 8)),
                tuned_entry(library[0], (64,), Within("a0.size0", 1, 64)),
            )
        }
    )
    run = executor(replay, code=dict([library]))
    check(run, 3, 3)
    (row,) = run.coverage.rows()
    assert (row.outcome, row.candidate) == ("near", "cpp(64,)")
    assert row.reasons == ("cpp(8,) tuned at (8,): a0.size0 is 9; needs a multiple of 8",)
    check(run, 13, 5)
    missed = run.coverage.rows()[0]
    assert (missed.outcome, missed.tuned_at, len(missed.reasons)) == ("miss", (64,), 2)


def test_strict_refuses_what_is_not_tuned(library: tuple[str, bytes]):
    replay = Replay({FORM: (tuned_entry(library[0], (8,), Within("a0.size0", 1, 16)),)})
    run = executor(replay, code=dict([library]), strict=True)
    check(run, 2, 4)
    with pytest.raises(NotTunedError, match=r"linear\+relu .* at \(20,\): .*a0.size0 is 20; needs 1 to 16"):
        check(run, 4, 5)


def test_a_misaligned_weight_makes_a_kernel_illegal_not_wrong(library: tuple[str, bytes]):
    program = softmax_program()
    memory = torch.zeros(8 * 6 + 1)
    weights = bind_weights([program], WEIGHTS, "cpu")
    weights["w"] = memory[1:].view(6, 8).copy_(weights["w"])
    replay = Replay({FORM: (tuned_entry(library[0], (12,), Aligned("a1", 64)),)})
    run = Executor(program, weights, CONSTANTS, replay, dict([library]), "cpu")
    check(run, 3, 4)
    assert run.coverage.rows()[0].reasons == ("cpp(12,) tuned at (12,): a1 is not aligned to 64 bytes",)


OVER_CACHE = """
#include <cstdint>
extern "C" void add(void *const *pointers, const int64_t *sizes) {
  const float *cache = (const float *)pointers[0], *x = (const float *)pointers[1];
  for (int64_t i = 0; i < sizes[0]; i++) ((float *)pointers[2])[i] = cache[i] + x[i];
}
"""


def test_a_misaligned_cache_makes_a_kernel_illegal_not_wrong(tmp_path: Path):
    """Kernels are compiled for addresses that weights and activations get; a cache of the caller's may lie anywhere."""
    code, library = build_library(OVER_CACHE, tmp_path)
    form = Form(
        "pointwise",
        ("d0",),
        (Parameter("a0", f32("d0"), "cache"), Parameter("a1", f32("d0"))),
        (call("aten.add.Tensor", "@a0", "@a1", results=("t0",)),),
        (Parameter("t0", f32("d0")),),
    )
    key = fingerprint(form)
    kernel = Kernel((CpuLaunch(code, "add", ("a0", "a1", "t0"), ("a0.size0",)),), requires=(Aligned("a0", 64),))
    program = Program(
        "decode",
        (Symbol("n", 1, 64, "x", 0),),
        (Input("x", f32("n")), Input("cache", f32("n"), "cache")),
        (),
        (),
        {key: form},
        (Apply(key, ("cache", "x"), ("y",), ("n",)),),
        {"y": f32("n")},
        (Output("out", "y"),),
    )
    run = Executor(program, {}, {}, Replay({key: (entry(kernel, (4,)),)}), {code: library}, "cpu")
    memory = torch.arange(256.0)
    start = -memory.data_ptr() % 256 // 4
    for shift, outcome in ((0, "exact"), (4, "miss"), (1, "miss"), (16, "exact"), (0, "exact")):
        before = run.coverage.totals()
        cache = memory[start + shift : start + shift + 4]
        assert torch.equal(run.run({"x": torch.ones(4), "cache": cache})["out"], cache + 1)
        after = run.coverage.totals()
        assert [k for k in after if after[k] != before[k]] == [outcome]
    missed = run.coverage.rows()[0]
    assert (missed.outcome, missed.reasons) == ("miss", ("by_hand tuned at (4,): a0 is not aligned to 64 bytes",))


def test_packed_weights_need_a_kernel_that_reads_them():
    program = softmax_program()
    packed = msgspec.structs.replace(program.weights[0], transforms=(Transpose(),))
    program = msgspec.structs.replace(program, weights=(packed, *program.weights[1:]))
    weights = bind_weights([program], WEIGHTS, "cpu")
    assert weights["w"].stride() == (1, 6)
    check(Executor(program, weights, CONSTANTS, empty_replay(), {}, "cpu"), 3, 4)


def test_inputs_with_odd_strides_and_offsets_are_read_right():
    run = executor()
    memory = torch.randn(9, 5, 3)
    x = memory[1:].permute(2, 1, 0)
    assert not x.is_contiguous()
    for _ in range(2):
        out = run.run({"x": x})["out"]
        torch.testing.assert_close(out.double(), softmax_reference(x, WEIGHTS), atol=1e-5, rtol=1e-5)


def test_inputs_that_are_negated_lazily_are_read_right(library: tuple[str, bytes]):
    """Kernels read memory, which holds the imaginary part of a conjugate before its sign is turned."""
    run = executor(Replay({FORM: (tuned_entry(library[0], (6,)),)}), code=dict([library]))
    x = torch.complex(torch.randn(2, 3, 8), torch.randn(2, 3, 8)).conj().imag
    assert x.is_neg()
    out = run.run({"x": x})["out"]
    torch.testing.assert_close(out.double(), softmax_reference(x, WEIGHTS), atol=1e-5, rtol=1e-5)


def test_a_result_in_another_layout_is_brought_into_the_declared_one():
    """The trace's layout and the device's may differ; the view after it is only legal for the declared one."""
    program = Program(
        "forward",
        (),
        (Input("x", f32(4, 3, strides=(1, 4))),),
        (),
        (),
        {},
        (
            call("aten.relu.default", "@x", results=("y",)),  # keeps the strides of x
            call("aten.view.default", "@y", (12,), results=("z",)),
        ),
        {"y": f32(4, 3), "z": f32(12)},
        (Output("z", "z"),),
    )
    run = Executor(program, {}, {}, empty_replay(), {}, "cpu")
    x = torch.randn(3, 4).T
    for _ in range(2):
        assert torch.equal(run.run({"x": x})["z"], torch.relu(x).reshape(12))
    assert torch.equal(run.run({"x": x.contiguous()})["z"], torch.relu(x).reshape(12))


BAD_INPUTS = [
    ({}, "missing: ['x']"),
    ({"x": torch.zeros(1, 2, 8), "y": torch.zeros(1)}, "unknown: ['y']"),
    ({"x": [1, 2]}, "is a list; expected a tensor"),
    ({"x": torch.zeros(1, 2, 8, dtype=torch.float64)}, "expected float32 of 3 dims"),
    ({"x": torch.zeros(2, 8)}, "expected float32 of 3 dims ['b', 's', 8]"),
    ({"x": torch.zeros(1, 2, 9)}, "has shape (1, 2, 9); expected (1, 2, 8)"),
    ({"x": torch.zeros(65, 2, 8)}, "has size 65 in dim 0; expected b from 1 to 64"),
    ({"x": torch.zeros(0, 2, 8)}, "has size 0 in dim 0; expected b from 1 to 64"),
    ({"x": torch.zeros(1, 2, 8, device="meta")}, "is on meta; expected cpu"),
]


@pytest.mark.parametrize(("inputs", "message"), BAD_INPUTS, ids=[m for _, m in BAD_INPUTS])
def test_bad_inputs_are_one_clear_error(inputs: dict[str, object], message: str):
    with pytest.raises(InputError) as caught:
        executor().run(inputs)
    assert message in str(caught.value)


def test_hints_are_checked():
    program = softmax_program()
    program = msgspec.structs.replace(program, symbols=(*program.symbols, Symbol("context", 1, 8, default=2)))
    run = Executor(program, bind_weights([program], WEIGHTS, "cpu"), CONSTANTS, empty_replay(), {}, "cpu")
    x = {"x": torch.zeros(1, 2, 8)}
    run.run(x)
    run.run(x, {"context": 8})
    with pytest.raises(InputError, match="hint 'context' is 9; expected context from 1 to 8"):
        run.run(x, {"context": 9})
    with pytest.raises(InputError, match="no symbol 'contxt'"):
        run.run(x, {"contxt": 1})


def one_step(*steps: Call | Apply, values: dict[str, TensorType], outputs: str = "y") -> Program:
    return Program("forward", (), (Input("x", f32(2)),), (), (), {}, steps, values, (Output("y", outputs),))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (one_step(Call("aten.neg.default", (Ref("z"),), (), ("y",)), values={"y": f32(2)}), "'z' before it is made"),
        (one_step(Call("aten.neg.default", (Ref("x"),), (), ("y",)), values={}), "no type for value 'y'"),
        (
            one_step(Call("aten.neg.default", (Ref("x"),), (), ("y",)), values={"y": f32(3)}),
            "expected torch.float32 (3,)",
        ),
        (
            one_step(Call("aten.neg.default", (Ref("x"),), (), ("y",)), values={"y": i64(2)}),
            "expected torch.int64 (2,)",
        ),
        (
            one_step(Call("aten.neg.default", (Ref("x"),), (), ("y",)), values={"y": f32(1, 2)}),
            "expected torch.float32 (1, 2)",
        ),
        (one_step(Apply("nothing", ("x",), ("y",), ()), values={"y": f32(2)}), "form 'nothing', which it does not"),
        (one_step(values={}, outputs="gone"), "uses value 'gone' before it is made"),
        (
            one_step(
                call("aten.expand.default", "@x", (2, 2), results=("y",)),
                values={"y": f32(2, 2)},
            ),
            "with strides (0, 1); expected (2, 1)",
        ),
    ],
)
def test_malformed_programs_are_refused(program: Program, message: str):
    with pytest.raises(ProgramError) as caught:
        Executor(program, {}, {}, empty_replay(), {}, "cpu").run({"x": torch.zeros(2)})
    assert message in str(caught.value)


def test_missing_weights_and_constants_are_refused():
    program = softmax_program()
    weights = bind_weights([program], WEIGHTS, "cpu")
    for bad_weights, constants, message in (
        ({"w": weights["w"]}, CONSTANTS, "weight 'bias' (from fc.bias) is not bound"),
        ({**weights, "bias": torch.zeros(7)}, CONSTANTS, "expected torch.float32 (6,)"),
        (weights, {}, "constant 'one' is missing"),
        (weights, {"one": torch.zeros(2)}, "constant 'one' is torch.float32 (2,)"),
    ):
        with pytest.raises(ProgramError) as caught:
            Executor(program, bad_weights, constants, empty_replay(), {}, "cpu")
        assert message in str(caught.value)


def test_values_are_freed_after_their_last_use():
    """A chain of 50 large values never holds more than a few of them."""
    size = 1 << 20
    steps = [call("aten.add.Scalar", f"@v{i}" if i else "@x", 1.0, results=(f"v{i + 1}",)) for i in range(50)]
    values = {f"v{i + 1}": TensorType(F32, (size,)) for i in range(50)}
    program = Program("forward", (), (Input("x", f32(size)),), (), (), {}, tuple(steps), values, (Output("y", "v50"),))
    run = Executor(program, {}, {}, empty_replay(), {}, "cpu")
    x = torch.zeros(size)
    for _ in range(2):
        with torch.profiler.profile(profile_memory=True) as profile:
            out = run.run({"x": x})["y"]
        live = peak = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                peak = max(peak, live)
        assert float(out[0]) == 50.0
        assert peak <= 3 * 4 * size


def test_threads_share_an_executor(library: tuple[str, bytes]):
    run = executor(Replay({FORM: (tuned_entry(library[0], (12,)),)}), code=dict([library]))
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(20):
                check(run, 1 + (seed + i) % 4, 1 + i % 5)
        except BaseException as error:  # noqa: BLE001 (a thread's failure must reach the test)
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sum(run.coverage.totals().values()) == 80


def test_plans_are_bounded_and_counts_survive_them():
    coverage = Coverage()
    run = executor(coverage=coverage)
    for batch in range(1, 9):
        for length in range(20):
            run.run({"x": torch.zeros(batch, length, 8)})
    assert len(run._plans) <= 128
    assert coverage.totals()["miss"] == 160


def test_outputs_need_no_gradients_and_may_be_used_in_training():
    run = executor()
    x = torch.zeros(1, 2, 8, requires_grad=True)
    out = run.run({"x": x})["out"]
    assert not out.requires_grad
    head = torch.ones(2, requires_grad=True)
    (out @ head).sum().backward()
    assert head.grad is not None


def test_a_chain_of_forms_shares_views_and_skips_needless_work(library: tuple[str, bytes]):
    """Collapsed rows pass from kernel to kernel: one allocation and one launch each, and one view for the caller."""
    form = linear_relu(8, 8)
    key = fingerprint(form)
    weights = {"w": torch.randn(8, 8), "bias": torch.randn(8)}
    program = softmax_program(8, 8)
    program = msgspec.structs.replace(
        program,
        forms={key: form},
        constants=(),
        steps=tuple(Apply(key, (f"v{i}" if i else "x", "w", "bias"), (f"v{i + 1}",), ("b*s",)) for i in range(4)),
        values={f"v{i + 1}": f32("b", "s", 8) for i in range(4)},
        outputs=(Output("out", "v4"), Output("middle", "v2")),
    )
    for kernels in ((), (tuned_entry(library[0], (6,), Aligned("a0", 32)),)):
        run = Executor(program, weights, {}, Replay({key: kernels}), dict([library]), "cpu")
        x = torch.randn(2, 3, 8)
        expected, middle = x.double(), x.double()
        for i in range(4):
            expected = torch.relu(expected @ weights["w"].double().T + weights["bias"].double())
            middle = expected if i == 1 else middle
        for _ in range(2):
            outputs = run.run({"x": x})
            torch.testing.assert_close(outputs["out"].double(), expected, atol=1e-4, rtol=1e-5)
            torch.testing.assert_close(outputs["middle"].double(), middle, atol=1e-4, rtol=1e-5)
    (plan,) = run._plans.values()
    assert plan._steps is not None
    # The input is checked for alignment (with its view), v2 is made for the caller, the others for the next kernel.
    assert len(plan._steps) == 2 + 4 * 2


def test_a_value_that_several_steps_read_in_several_shapes_lives_until_the_last():
    form = linear_relu(8, 8)
    key = fingerprint(form)
    weights = {"w": torch.randn(8, 8), "bias": torch.zeros(8)}
    program = msgspec.structs.replace(
        softmax_program(8, 8),
        forms={key: form},
        constants=(),
        steps=(
            call("aten.neg.default", "@x", results=("y",)),
            Apply(key, ("y", "w", "bias"), ("z",), ("b*s",)),
            call("aten.add.Tensor", "@y", "@z", results=("u",)),
            Apply(key, ("u", "w", "bias"), ("v",), ("b*s",)),
            Apply(key, ("y", "w", "bias"), ("q",), ("b*s",)),
            call("aten.cat.default", ("@v", "@q", "@u"), 1, results=("out",)),
        ),
        values={n: f32("b", "s", 8) for n in ("y", "z", "u", "v", "q")} | {"out": f32("b", "3*s", 8)},
        outputs=(Output("out", "out"),),
    )
    run = Executor(program, weights, {}, empty_replay(), {}, "cpu")
    x = torch.randn(2, 3, 8)

    def layer(value: torch.Tensor) -> torch.Tensor:
        return torch.relu(value @ weights["w"].double().T)

    y = -x.double()
    u = y + layer(y)
    for _ in range(2):
        out = run.run({"x": x})["out"]
        torch.testing.assert_close(out.double(), torch.cat([layer(u), layer(y), u], 1), atol=1e-4, rtol=1e-5)
