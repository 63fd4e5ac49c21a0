import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
from attention_forms import decode_form
from devices import cuda_target
from product_forms import linear
from row_forms import gelu_chain, rms_norm

import tune_model
from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.kernel import Aligned, CudaLaunch, Multiple, Null, Within
from tune_model.runtime.replay import slot_sizes, unmet
from tune_model.tune.built_file import build_candidate, read_built
from tune_model.tune.candidate import Built, Candidate, Effort, Rejected
from tune_model.tune.families import family_named
from tune_model.tune.triton.cubin import read_usage
from tune_model.tune.triton.matmul_space import INDUCTOR

FORMS = {
    "triton_gemv": linear(1, 4096, 4096, tail="residual"),
    "triton_matmul": linear(16, 1024, 2048, tail="swiglu"),
    "triton_split_k": linear(16, 1024, 2048, tail="bias"),
    "triton_rows": rms_norm(16, 4096),
    "triton_pointwise": gelu_chain(16, 4096),
    "triton_decode_attention": decode_form(heads=32, kv_heads=8, head_dim=128, dtype="bfloat16"),
}


def build(family: str, arch: int, config: dict | None = None) -> Built | Rejected:
    task = Task(FORMS[family], NumericRules())
    return build_candidate(task, Candidate(family, tuple((config or {}).items())), cuda_target(arch))


@pytest.mark.parametrize("family", FORMS)
def test_every_family_compiles_for_hopper_and_states_its_launch(family: str):
    built = build(family, 90)
    assert isinstance(built, Built), built
    launches = [s for s in built.kernel.steps if isinstance(s, CudaLaunch)]
    assert launches
    for launch in launches:
        assert launch.code in built.code
        assert launch.entry.encode() in built.code[launch.code]
        assert launch.arguments[-2:] == (Null(), Null())
    assert 0 < built.registers <= 255
    sizes = slot_sizes(FORMS[family])
    assert not [r for r in built.kernel.requires if unmet(r, sizes, {})]


@pytest.mark.parametrize(
    ("family", "arch"), [("triton_matmul", 80), ("triton_gemv", 89), ("triton_matmul", 100), ("triton_rows", 100)]
)
def test_other_generations_compile(family: str, arch: int):
    assert isinstance(build(family, arch), Built)


def test_a_tile_that_needs_too_much_shared_memory_is_rejected_with_the_numbers():
    config = {
        "block_m": 16,
        "block_n": 128,
        "block_k": 128,
        "group_m": 8,
        "num_warps": 8,
        "num_stages": 8,
        "swap": False,
        "layout": "plain",
        "pdl": False,
    }
    rejected = build("triton_matmul", 90, config)
    assert isinstance(rejected, Rejected)
    assert rejected.reason == "shared memory"
    assert "limit 232448" in rejected.detail


def test_a_compiler_failure_is_a_value_and_leaves_nothing_on_stderr(capfd: pytest.CaptureFixture[str]):
    config = {"block_n": 3, "block_k": 256, "num_warps": 4, "stages": 1, "unroll": 1, "layout": "plain", "pdl": False}
    rejected = build("triton_gemv", 90, config)
    assert isinstance(rejected, Rejected)
    assert rejected.reason == "compiler"
    assert "power of 2" in rejected.detail
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("family", FORMS)
def test_a_kernel_launched_early_waits_itself(family: str):
    task = Task(FORMS[family], NumericRules())
    configs = family_named(family).configurations(task, cuda_target(), Effort.QUICK)
    early = next(c for c in configs if ("pdl", True) in c)
    built = build(family, 90, dict(early))
    assert isinstance(built, Built), built
    assert all(s.programmatic for s in built.kernel.steps if isinstance(s, CudaLaunch))
    older = family_named(family).configurations(task, cuda_target(80), Effort.THOROUGH)
    assert not [c for c in older if ("pdl", True) in c]


def test_a_wrong_call_says_what_was_refused():
    form = linear(5, 64, 64)
    rejected = build_candidate(Task(form, NumericRules()), Candidate("triton_gemv"), cuda_target())
    assert rejected == Rejected("unsupported", "triton_gemv: 5 rows; expected at most 4")


def test_what_the_compiler_was_promised_is_demanded_of_every_call():
    """A residual whose rows are not multiples of 16 elements, or an address that is not, must not reach the kernel."""
    built = build("triton_gemv", 90)
    assert isinstance(built, Built)
    demands = built.kernel.requires
    assert {r.slot for r in demands if isinstance(r, Aligned)} >= {"a0", "a1", "a2", "t1"}
    assert Multiple("a0.stride0", 16) in demands or Within("a0.stride0", 4096, 4096) in demands
    longer = slot_sizes(linear(2, 4096, 4096, tail="residual"))
    assert [p for r in demands if (p := unmet(r, longer, {}))], "one row was promised"
    wider = slot_sizes(linear(1, 4096, 8192, tail="residual"))
    assert [p for r in demands if (p := unmet(r, wider, {}))], "K is compiled in"


def test_tiles_serve_any_number_of_rows():
    built = build("triton_matmul", 90)
    assert isinstance(built, Built)
    for rows in (1, 15, 300):
        sizes = slot_sizes(linear(rows, 1024, 2048, tail="swiglu"))
        assert not [p for r in built.kernel.requires if (p := unmet(r, sizes, {}))]


def test_the_same_candidate_gives_the_same_bytes_in_another_process_and_folder(tmp_path):
    here = tmp_path / "here.json"
    task = Task(FORMS["triton_gemv"], NumericRules())
    build_candidate(task, Candidate("triton_gemv"), cuda_target(), here)
    request = tmp_path / "task.json"
    request.write_bytes(msgspec.json.encode((task, cuda_target())))
    there = tmp_path / "there.json"
    program = f"""
import msgspec
from pathlib import Path
from tune_model.extract.task import Task
from tune_model.tune.built_file import build_candidate
from tune_model.tune.candidate import Candidate
from tune_model.tune.target import CudaTarget
task, target = msgspec.json.decode(Path({str(request)!r}).read_bytes(), type=tuple[Task, CudaTarget])
build_candidate(task, Candidate("triton_gemv"), target, Path({str(there)!r}))
"""
    source = str(Path(tune_model.__file__).absolute().parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, env=environment)
    first, second = read_built(here).built, read_built(there).built
    assert first.code == second.code
    assert first.kernel == second.kernel


def test_registers_and_spills_are_those_that_the_toolkit_prints():
    from triton import knobs

    built = build("triton_rows", 90)
    assert isinstance(built, Built)
    (cubin,) = built.code.values()
    tool = knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    usage = read_usage(cubin)
    assert f"REG:{usage.registers} STACK:{usage.local_bytes} " in said.stdout + said.stderr


def test_bytes_that_are_no_cubin_are_named():
    with pytest.raises(ValueError, match="not a 64-bit ELF"):
        read_usage(b"PK\x03\x04" + bytes(100))


@pytest.mark.parametrize(
    ("m", "families"),
    [
        (1, ("triton_gemv", "triton_matmul", "triton_split_k")),
        (16, ("triton_matmul", "triton_split_k")),
        (2048, ("triton_matmul",)),
    ],
)
def test_the_space_is_as_large_as_promised_and_starts_with_the_start(m: int, families: tuple[str, ...]):
    task = Task(linear(m, 6144, 4096), NumericRules())
    for effort, least in ((Effort.QUICK, 8), (Effort.BALANCED, 40), (Effort.THOROUGH, 200)):
        total = 0
        for name in families:
            configs = list(family_named(name).configurations(task, cuda_target(), effort))
            assert len(set(configs)) == len(configs)
            assert configs[0] == family_named(name).start(task, cuda_target())
            total += len(configs)
        assert total >= least


def test_inductors_tiles_are_inside_the_space():
    """All but the one that needs more shared memory than the device has."""
    task = Task(linear(2048, 6144, 4096), NumericRules())
    tiles = {
        tuple(dict(c)[k] for k in ("block_m", "block_n", "block_k", "num_stages", "num_warps"))
        for c in family_named("triton_matmul").configurations(task, cuda_target(), Effort.THOROUGH)
        if dict(c)["group_m"] == 8 and not dict(c)["swap"] and not dict(c)["pdl"]
    }
    assert set(INDUCTOR) - tiles == {(128, 128, 128, 4, 8)}
