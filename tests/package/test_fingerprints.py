import msgspec
import pytest

from tune_model.package.fingerprints import (
    LAUNCH_ABI,
    CpuSystem,
    CudaSystem,
    ToRun,
    compatibility,
    to_run,
    to_stay_optimal,
)
from tune_model.tune.target import CpuTarget, CudaTarget

H200 = CudaTarget(90, "NVIDIA H200", 132, 60 << 20, 232448, 65536, 141 << 30, 1980, "580", "13.1", "2.11", "3.6")
EPYC = CpuTarget("x86_64", ("avx2", "avx512f", "fma"), "AMD EPYC 9554", 2, 1 << 20, 1 << 25, "g++ 12.2", "2.13")

SAME_GPU = CudaSystem(90, "NVIDIA H200", 132, "2.11", 1980, "580")
SAME_CPU = CpuSystem("x86_64", frozenset({"avx", "avx2", "avx512f", "fma", "sse2"}), "AMD EPYC 9554", 2, "2.13")

UNKNOWN = msgspec.structs.replace(SAME_GPU, max_clock_mhz=None, driver_branch=None)
H100 = msgspec.structs.replace(SAME_GPU, name="NVIDIA H100", sm_count=114)
GPU_CASES = {
    "the same": (SAME_GPU, True, True, []),
    "clocks and driver unknown": (
        msgspec.structs.replace(SAME_GPU, max_clock_mhz=None, driver_branch=None),
        True,
        True,
        [],
    ),
    "another architecture": (msgspec.structs.replace(SAME_GPU, arch=80), False, False, ["arch"]),
    "a newer architecture": (msgspec.structs.replace(SAME_GPU, arch=100), False, False, ["arch"]),
    "another model": (
        msgspec.structs.replace(SAME_GPU, name="NVIDIA H100", sm_count=114),
        True,
        False,
        ["name", "sm_count"],
    ),
    "another driver": (msgspec.structs.replace(SAME_GPU, driver_branch="590"), True, False, ["driver_branch"]),
    "another torch": (msgspec.structs.replace(SAME_GPU, torch="2.12"), True, False, ["torch"]),
    "no GPU": (SAME_CPU, False, False, ["device"]),
}
CPU_CASES = {
    "the same": (SAME_CPU, True, True, []),
    "more instruction sets": (msgspec.structs.replace(SAME_CPU, isa=SAME_CPU.isa | {"amx_tile"}), True, True, []),
    "an older CPU": (msgspec.structs.replace(SAME_CPU, isa=frozenset({"avx2", "fma"})), False, False, ["isa"]),
    "another machine": (msgspec.structs.replace(SAME_CPU, machine="aarch64"), False, False, ["machine"]),
    "other threads": (msgspec.structs.replace(SAME_CPU, threads=64), True, False, ["threads"]),
    "a GPU": (SAME_GPU, False, False, ["device"]),
}


@pytest.mark.parametrize(("system", "runs", "optimal", "fields"), GPU_CASES.values(), ids=GPU_CASES)
def test_an_artifact_tuned_on_a_gpu(system, runs, optimal, fields):
    decision = compatibility(to_run(H200, has_code=True), to_stay_optimal(H200), system)
    assert (decision.runs, decision.optimal, [c.field for c in decision.mismatches]) == (runs, optimal, fields)


@pytest.mark.parametrize(("system", "runs", "optimal", "fields"), CPU_CASES.values(), ids=CPU_CASES)
def test_an_artifact_tuned_on_a_cpu(system, runs, optimal, fields):
    decision = compatibility(to_run(EPYC, has_code=True), to_stay_optimal(EPYC), system)
    assert (decision.runs, decision.optimal, [c.field for c in decision.mismatches]) == (runs, optimal, fields)


def test_the_missing_instruction_sets_are_named():
    old = msgspec.structs.replace(SAME_CPU, isa=frozenset({"avx2"}))
    (isa,) = compatibility(to_run(EPYC, has_code=True), to_stay_optimal(EPYC), old).mismatches
    assert (isa.expected, isa.found) == ("avx2 avx512f fma", "none of avx512f fma")


def test_no_machine_code_needs_no_instruction_set():
    old = msgspec.structs.replace(SAME_CPU, isa=frozenset())
    assert compatibility(to_run(EPYC, has_code=False), to_stay_optimal(EPYC), old).runs


def test_another_way_to_launch_kernels_is_refused():
    run = msgspec.structs.replace(to_run(H200, has_code=True), launch_abi=LAUNCH_ABI + 1)
    decision = compatibility(run, to_stay_optimal(H200), SAME_GPU)
    assert [c.field for c in decision.mismatches] == ["launch_abi"]
    assert not decision.runs


@pytest.mark.parametrize("field", ["arch", "launch_abi"])
def test_what_must_match_to_run_is_never_unknown_on_a_gpu(field: str):
    """A manifest that expected 0 ran everywhere, whatever its kernels take for arguments."""
    run = msgspec.structs.replace(to_run(H200, has_code=True), **{field: 0})
    assert not compatibility(run, to_stay_optimal(H200), SAME_GPU).runs
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.json.decode(msgspec.json.encode(run), type=ToRun)


@pytest.mark.parametrize(("field", "value"), [("machine", ""), ("machine", "unknown"), ("launch_abi", 0)])
def test_what_must_match_to_run_is_never_unknown_on_a_cpu(field: str, value: object):
    run = msgspec.structs.replace(to_run(EPYC, has_code=True), **{field: value})
    assert not compatibility(run, to_stay_optimal(EPYC), SAME_CPU).runs
    if not value:
        with pytest.raises(msgspec.ValidationError, match=field):
            msgspec.json.decode(msgspec.json.encode(run), type=ToRun)


def test_what_was_unknown_when_tuning_may_be_anything_where_only_speed_depends_on_it():
    blind = msgspec.structs.replace(H200, max_clock_mhz=0, driver_branch="unknown")
    assert compatibility(to_run(blind, has_code=True), to_stay_optimal(blind), SAME_GPU).optimal


def test_every_comparison_is_in_the_trace():
    decision = compatibility(to_run(H200, has_code=True), to_stay_optimal(H200), SAME_GPU)
    assert [(c.to, c.field) for c in decision.comparisons] == [
        ("run", "launch_abi"),
        ("run", "arch"),
        ("stay optimal", "name"),
        ("stay optimal", "sm_count"),
        ("stay optimal", "max_clock_mhz"),
        ("stay optimal", "driver_branch"),
        ("stay optimal", "torch"),
    ]
