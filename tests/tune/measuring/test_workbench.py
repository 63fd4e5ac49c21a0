import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import two_layers
from attention_forms import decode_form
from form_builder import FormBuilder
from reliability_trials.hostile import compile_linear
from tuning_fakes import TARGET, linear_plan

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.kernel import CpuLaunch, Kernel, Multiple
from tune_model.runtime.program import Call, Items, Ref
from tune_model.tune.candidate import Built, Candidate, Rejected
from tune_model.tune.device import Bench, Device, Passed, Samples
from tune_model.tune.measuring.inputs import make_inputs
from tune_model.tune.measuring.policy import Policy, Rung
from tune_model.tune.measuring.workbench import Workbench
from tune_model.tune.measuring.worker import DeviceWorker

TASK = linear_plan(8).tasks[0].task
POLICY = Policy("test", 1, 8 * 2048, (Rung(200.0, 3),), Rung(200.0, 7))
COLD = Policy("test", 1, 1 << 40, (Rung(200.0, 3),), Rung(200.0, 7))
BASELINE = Built(Kernel(TASK.form.body), {})
BENCH = Bench(TASK, POLICY, BASELINE, 3)


def matmul(*calls: Call, layouts: tuple[tuple[str, str], ...] = ()) -> Built:
    return Built(Kernel(calls, layouts=layouts), {})


RIGHT = matmul(
    Call("aten.t.default", (Ref("a1"),), results=("x",)),
    Call("aten.mm.default", (Ref("a0"), Ref("x")), results=("t0",)),
)
WRONG = matmul(
    Call("aten.linear.default", (Ref("a0"), Ref("a1")), results=("x",)),
    Call("aten.mul.Tensor", (Ref("x"), 1.01), results=("t0",)),
)
RAISES = matmul(Call("aten.mm.default", (Ref("a0"), Ref("a1")), results=("t0",)))


@pytest.fixture(params=["here", "in a process"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    bench: Device = Workbench(TARGET) if request.param == "here" else DeviceWorker(TARGET)
    yield bench
    bench.close()


def test_candidates_are_checked_timed_and_compared(device: Device):
    opened = device.open(BENCH)
    assert isinstance(opened, Passed)
    assert 0 < opened.error < 1e-6
    good, bad = Candidate("good"), Candidate("bad")
    assert isinstance(device.check(good, RIGHT), Passed)
    wrong = device.check(bad, WRONG)
    assert isinstance(wrong, Rejected)
    assert wrong.reason == "wrong"
    assert "0.01" in wrong.detail
    alone = device.time(good, RIGHT, POLICY.rungs[0])
    assert isinstance(alone, Samples)
    assert len(alone.us) == 3
    assert all(0.1 < us < 1e5 for us in alone.us)
    pair = device.compare(((Candidate("aten"), BASELINE), (good, RIGHT)), POLICY.final)
    assert isinstance(pair, tuple)
    rounds = {len(s.us) for s in pair if isinstance(s, Samples)}
    assert len(rounds) == 1  # pairs; fewer than asked for where others use the machine
    assert POLICY.final.least <= rounds.pop() <= 7


def test_what_a_candidate_raises_is_its_own_problem(device: Device):
    device.open(BENCH)
    raised = device.check(Candidate("raises"), RAISES)
    assert isinstance(raised, Rejected)
    assert raised.reason == "launch"
    assert "RuntimeError" in raised.detail
    assert isinstance(device.check(Candidate("good"), RIGHT), Passed)
    results = device.compare(((Candidate("aten"), BASELINE), (Candidate("raises"), RAISES)), POLICY.final)
    assert isinstance(results, tuple)
    assert isinstance(results[1], Rejected)
    assert not isinstance(results[0], Rejected)


def late(call: int) -> Built:
    """A right kernel that writes behind its result at one of its calls."""
    body = f"static int calls; product(x, w, y, m, n, k); if (++calls == {call}) y[m * n + 3] = 1;"
    built = compile_linear(TASK, TARGET, body)
    assert isinstance(built, Built)
    return built


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_one_that_writes_astray_late_in_a_comparison_costs_only_itself():
    """All candidates of the comparison were blamed, the extern too, which failed the task for good."""
    extern, good = (Candidate("aten"), BASELINE), (Candidate("good"), RIGHT)
    here = Workbench(TARGET)
    here.open(BENCH)
    blamed = here.compare((extern, good, (Candidate("late"), late(50))), POLICY.final)
    assert isinstance(blamed, Rejected)  # of nobody: all their calls lie behind it
    assert (blamed.reason, here.broken) == ("stray write", True)
    worker = DeviceWorker(TARGET)
    try:
        worker.open(BENCH)
        found = worker.compare((extern, good, (Candidate("late"), late(50))), POLICY.final)
        assert isinstance(found, tuple)
        assert [type(one) for one in found] == [Samples, Samples, Rejected]
        rest = worker.compare((extern, good), POLICY.final)
        assert isinstance(rest, tuple)
        assert all(isinstance(one, Samples) and one.us for one in rest)
    finally:
        worker.close()


@pytest.mark.parametrize("layout", ["transposed", "mkldnn"])
def test_weights_are_given_in_the_layout_that_is_asked_for(layout: str):
    bench = Workbench(TARGET)
    bench.open(BENCH)
    call = Call("aten.linear.default", (Ref("a0"), Ref("a1")), results=("t0",))
    if layout == "mkldnn":
        arguments = (Ref("a0"), Ref("a1"), None, "none", Items(()), "")
        call = Call("mkldnn._linear_pointwise.default", arguments, results=("t0",))
    found = bench.check(Candidate("x"), matmul(call, layouts=(("a1", layout),)))
    assert isinstance(found, Passed), found


def test_a_kernel_whose_requirement_fails_for_its_own_task_is_out():
    bench = Workbench(TARGET)
    bench.open(BENCH)
    built = msgspec.structs.replace(
        RIGHT, kernel=msgspec.structs.replace(RIGHT.kernel, requires=(Multiple("a0.size0", 16),))
    )
    found = bench.check(Candidate("x"), built)
    assert found == Rejected(
        "unsupported", "its own requirement does not hold for the task: a0.size0 is 8; needs a multiple of 16"
    )


def test_a_baseline_that_raises_fails_the_task():
    bench = Workbench(TARGET)
    found = bench.open(msgspec.structs.replace(BENCH, baseline=RAISES))
    assert isinstance(found, Rejected)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_unwritten_elements_of_a_library_are_seen(tmp_path: Path):
    source = tmp_path / "half.cpp"
    source.write_text(
        "#include <cstdint>\n"
        'extern "C" void run(void *const *p, const int64_t *s) {\n'
        "  auto a = (const float *)p[0], w = (const float *)p[1]; auto o = (float *)p[2];\n"
        "  for (int64_t i = 0; i < s[0] - s[3]; i++) for (int64_t j = 0; j < s[1]; j++) {\n"
        "    float t = 0; for (int64_t k = 0; k < s[2]; k++) t += a[i*s[2]+k] * w[j*s[2]+k]; o[i*s[1]+j] = t; }\n"
        "}\n"
    )
    subprocess.run(["g++", "-O2", "-shared", "-fPIC", str(source), "-o", str(tmp_path / "half.so")], check=True)
    code = (tmp_path / "half.so").read_bytes()
    name = hashlib.sha256(code).hexdigest()
    bench = Workbench(TARGET)
    bench.open(BENCH)

    def found(skipped: int) -> Passed | Rejected:
        sizes = ("a0.size0", "a1.size0", "a0.size1", skipped)
        kernel = Kernel((CpuLaunch(name, "run", ("a0", "a1", "t0"), sizes),))
        return bench.check(Candidate("x", (("skipped", skipped),)), Built(kernel, {name: code}))

    assert isinstance(found(0), Passed)
    unwritten = found(1)
    assert isinstance(unwritten, Rejected)
    assert "inf" in unwritten.detail


def test_booleans_that_the_candidate_before_wrote_are_not_taken_for_this_ones():
    b = FormBuilder("pointwise")
    form = b.form(b.call("gt.Tensor", b.input((64,)), b.input((64,))))

    def library(body: str) -> Built:
        source = 'extern "C" void entry(void *const *p, const long *) {' + body + "}"
        code = two_layers.compiled(source)
        name = hashlib.sha256(code).hexdigest()
        return Built(Kernel((CpuLaunch(name, "entry", ("a0", "a1", "t0")),)), {name: code})

    right = library(
        "auto a = (float *)p[0], b = (float *)p[1]; for (int i = 0; i < 64; i++) ((bool *)p[2])[i] = a[i] > b[i];"
    )
    bench = Workbench(TARGET)
    bench.open(Bench(Task(form, NumericRules()), POLICY, Built(Kernel(form.body), {}), 3))
    assert isinstance(bench.check(Candidate("right"), right), Passed)
    idle = bench.check(Candidate("idle"), library(""))
    assert isinstance(idle, Rejected)
    assert idle.reason == "wrong"


def test_inputs_that_do_not_fit_are_taken_in_fewer_copies(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []

    def scarce(form, device, seed, copies):  # type: ignore[no-untyped-def]
        asked.append(copies)
        if copies > 2:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")
        return make_inputs(form, device, seed, copies)

    monkeypatch.setattr("tune_model.tune.measuring.workbench.make_inputs", scarce)
    bench = Workbench(TARGET)
    assert isinstance(bench.open(msgspec.structs.replace(BENCH, policy=COLD)), Passed)
    assert asked == [128, 32, 8, 2]
    assert isinstance(bench.time(Candidate("aten"), BASELINE, COLD.rungs[0]), Samples)


def test_a_task_without_memory_for_one_copy_says_so(monkeypatch: pytest.MonkeyPatch):
    def none(form, device, seed, copies):  # type: ignore[no-untyped-def]
        raise MemoryError("tried to allocate 1 TB")

    monkeypatch.setattr("tune_model.tune.measuring.workbench.make_inputs", none)
    refused = Workbench(TARGET).open(BENCH)
    assert refused == Rejected("out of memory", "MemoryError: tried to allocate 1 TB")


def test_an_error_that_is_not_about_memory_is_not_tried_again(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []

    def broken(form, device, seed, copies):  # type: ignore[no-untyped-def]
        asked.append(copies)
        raise RuntimeError("no such operator")

    monkeypatch.setattr("tune_model.tune.measuring.workbench.make_inputs", broken)
    refused = Workbench(TARGET).open(msgspec.structs.replace(BENCH, policy=COLD))
    assert isinstance(refused, Rejected)
    assert refused.reason == "launch"
    assert len(asked) == 1


def test_timing_may_write_caches_and_checking_again_still_passes():
    """Caches are inputs that every call writes; they were once taken for inputs that a candidate had spoiled."""
    task = Task(decode_form(dtype="float32"), NumericRules())
    body = Built(Kernel(task.form.body), {})
    bench = Workbench(TARGET)
    assert isinstance(bench.open(Bench(task, COLD, body, 5)), Passed)
    twin, extern = Candidate("twin"), Candidate("aten")
    for _ in range(2):
        assert isinstance(bench.check(twin, body), Passed)
        assert isinstance(bench.time(twin, body, COLD.rungs[0]), Samples)
    found = bench.compare(((extern, body), (twin, body)), COLD.final)
    assert [type(samples) for samples in found] == [Samples, Samples]
    assert not bench.broken


def test_a_kernel_that_writes_behind_a_cache_is_found():
    task = Task(decode_form(dtype="float32"), NumericRules())
    body = Built(Kernel(task.form.body), {})
    source = (
        'extern "C" void entry(void *const *p, const long *s) { ((float *)p[0])[s[0] * s[1] * s[2] * s[3] + 1] = 1; }'
    )
    library = two_layers.compiled(source)
    name = hashlib.sha256(library).hexdigest()
    sizes = tuple(f"a0.size{axis}" for axis in range(4))
    stray = Built(Kernel((CpuLaunch(name, "entry", ("a0",), sizes), *task.form.body)), {name: library})
    bench = Workbench(TARGET)
    assert isinstance(bench.open(Bench(task, POLICY, body, 5)), Passed)
    rejected = bench.check(Candidate("stray"), stray)
    assert isinstance(rejected, Rejected)
    assert (rejected.reason, rejected.detail) == ("stray write", "wrote 4 bytes behind a0, the nearest 5 away from it")
    assert bench.broken
