import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
from attention_forms import decode_form
from devices import cuda_target
from form_builder import FormBuilder
from product_forms import batched, linear, matrices
from row_forms import gelu_chain, rms_norm

import tune_model
from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.expression import evaluate
from tune_model.runtime.kernel import Aligned, CudaLaunch, LibraryAlgorithm, Multiple, Null, Within
from tune_model.runtime.program import Form
from tune_model.runtime.replay import slot_sizes, unmet
from tune_model.tune.building.built_file import BuiltFile, build_candidate
from tune_model.tune.candidate import Built, Candidate, Config, Effort, Rejected
from tune_model.tune.families import family_named
from tune_model.tune.triton.cubin import read_usage
from tune_model.tune.triton.matmul_space import INDUCTOR

FORMS = {
    "triton_gemv": linear(1, 4096, 4096, tail="residual"),
    "triton_matmul": linear(16, 1024, 2048, tail="swiglu"),
    "triton_persistent": linear(128, 4096, 2048, tail="residual"),
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
        assert launch.arguments[-1] == Null()
    assert (launches[0].arguments[-2] == Null()) == (family != "triton_persistent")
    assert 0 < built.registers <= 255
    sizes = slot_sizes(FORMS[family])
    assert not [r for r in built.kernel.requires if unmet(r, sizes, {})]


@pytest.mark.parametrize(
    ("family", "arch"),
    [
        ("triton_matmul", 80),
        ("triton_gemv", 89),
        ("triton_matmul", 100),
        ("triton_rows", 100),
        ("triton_persistent", 100),
    ],
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
        "prefetch": False,
    }
    rejected = build("triton_matmul", 90, config)
    assert isinstance(rejected, Rejected)
    assert rejected.reason == "shared memory"
    assert "limit 232448" in rejected.detail


def test_a_compiler_failure_is_a_value_and_leaves_nothing_on_stderr(capfd: pytest.CaptureFixture[str]):
    config = {"block_n": 3, "block_k": 256, "num_warps": 4, "stages": 1, "unroll": 1, "layout": "plain"}
    config |= {"pdl": False, "prefetch": False}
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
from tune_model.tune.building.built_file import build_candidate
from tune_model.tune.candidate import Candidate
from tune_model.tune.target import CudaTarget
task, target = msgspec.json.decode(Path({str(request)!r}).read_bytes(), type=tuple[Task, CudaTarget])
build_candidate(task, Candidate("triton_gemv"), target, Path({str(there)!r}))
"""
    source = str(Path(tune_model.__file__).absolute().parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, env=environment)
    first, second = (msgspec.json.decode(path.read_bytes(), type=BuiltFile).built for path in (here, there))
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


def machine_code(cubin: bytes) -> str:
    """The instructions of a cubin as text."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


ALGORITHM = (
    ("layout", "plain"),
    *msgspec.structs.asdict(LibraryAlgorithm(66)).items(),
    ("workspace_bytes", 0),
    ("version", 130200),
)


@pytest.mark.parametrize(
    ("family", "config", "tail"),
    [
        ("cublaslt", ALGORITHM, "residual"),
        ("cublaslt", ALGORITHM, "swiglu"),
        ("triton_epilogue", None, "residual"),
        ("triton_epilogue", None, "swiglu"),
        ("library_halves", None, "swiglu"),
    ],
)
def test_what_follows_a_library_product_is_read_sixteen_bytes_at_a_time(family: str, config: Config | None, tail: str):
    """Its mask was not known to change at multiples of 16 elements, so every element was an access."""
    task, target = Task(linear(2048, 4096, 4096, tail=tail), NumericRules()), cuda_target()
    built = family_named(family).build(task, config or family_named(family).start(task, target), target)
    assert isinstance(built, Built), built
    (code,) = built.code.values()
    widths = set(re.findall(r"\b(?:LDG|STG)\.E\.?([\w.]*)", machine_code(code)))
    assert widths == {"128"}


def test_bytes_that_are_no_cubin_are_named():
    with pytest.raises(ValueError, match="not a 64-bit ELF"):
        read_usage(b"PK\x03\x04" + bytes(100))


@pytest.mark.parametrize(
    ("m", "families"),
    [
        (1, ("triton_gemv", "triton_matmul", "triton_split_k")),
        (16, ("triton_matmul", "triton_persistent", "triton_split_k")),
        (2048, ("triton_matmul", "triton_persistent")),
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


@pytest.mark.parametrize("m", [200, 2048])
def test_inductors_tiles_are_inside_the_space(m: int):
    """All but the one that needs more shared memory than the device has."""
    task = Task(linear(m, 6144, 4096), NumericRules())
    tiles = {
        tuple(dict(c)[k] for k in ("block_m", "block_n", "block_k", "num_stages", "num_warps"))
        for c in family_named("triton_matmul").configurations(task, cuda_target(), Effort.THOROUGH)
        if dict(c)["group_m"] == 8 and not dict(c)["swap"] and not dict(c)["pdl"]
    }
    assert set(INDUCTOR) - tiles == {(128, 128, 128, 4, 8)}


def descriptor_modes(m: int) -> list[list[Config]]:
    """The configurations that the space offers of every mode: one for each tile."""
    task = Task(linear(m, 4096, 2048, tail="residual"), NumericRules())
    modes: dict[tuple, list[Config]] = {}
    for config in family_named("triton_persistent").configurations(task, cuda_target(), Effort.THOROUGH):
        values = dict(config)
        mode = tuple(values[name] for name in ("programs", "subtiles", "store", "layout", "swap"))
        modes.setdefault((*mode, values["split_k"] > 1, values["last_adds"]), []).append(config)
    return list(modes.values())


@pytest.mark.parametrize("m", [16, 2048])
@pytest.mark.parametrize("arch", [90, 100])
def test_every_mode_of_the_descriptor_kernel_compiles(arch: int, m: int):
    task = Task(linear(m, 4096, 2048, tail="residual"), NumericRules())
    modes = descriptor_modes(m)
    assert len(modes) >= 5
    for configs in modes:
        for config in configs:
            built = build_candidate(task, Candidate("triton_persistent", config), cuda_target(arch))
            if isinstance(built, Built):
                break
            assert built.reason == "shared memory", (config, built)
        else:
            pytest.fail(f"no tile compiles in the mode of {configs[0]}")


@pytest.mark.parametrize("arch", [90, 100])
def test_two_halves_joined_compile_and_hopper_multiplies_both_at_once(arch: int):
    task = Task(linear(2048, 4096, 2048, tail="swiglu"), NumericRules())
    family = family_named("triton_persistent")
    joined = [c for c in family.configurations(task, cuda_target(arch), Effort.THOROUGH) if dict(c)["joined"]]
    assert len(joined) > 20
    assert {dict(config)["layout"] for config in joined} == {"plain"}
    for config in joined[:24:6]:
        built = build_candidate(task, Candidate(family.name, config), cuda_target(arch))
        assert isinstance(built, Built), (config, built)
        if arch == 90:
            (cubin,) = built.code.values()
            wide = 2 * int(dict(config)["block_n"])
            assert f"HGMMA.64x{wide}x16" in machine_code(cubin)


def test_descriptors_get_scratch_memory_for_every_program():
    built = build("triton_persistent", 90)
    assert isinstance(built, Built)
    launch = next(s for s in built.kernel.steps if isinstance(s, CudaLaunch))
    scratch = launch.arguments[-2]
    (workspace,) = [w for w in built.kernel.workspaces if w.name == scratch.slot]
    for rows in (1, 128, 5000):
        sizes = slot_sizes(linear(rows, 4096, 2048, tail="residual"))
        programs = evaluate(launch.grid[0], sizes)
        size_bytes = evaluate(workspace.size, sizes)
        assert workspace.dtype == "uint8"
        assert size_bytes >= programs * 128 * 2  # two descriptors of 128 bytes
        assert size_bytes % programs == 0


def test_a_program_counts_itself_as_arrived_once():
    """Else sums begin before all parts are there; kernels with specialised warps had two groups of them that did."""
    task = Task(linear(16, 4096, 2048, tail="residual"), NumericRules())
    firsts = [configs[0] for configs in descriptor_modes(16)]
    adding = [c for c in firsts if dict(c)["split_k"] > 1 and dict(c)["last_adds"] and dict(c)["layout"] == "plain"]
    assert len(adding) >= 2
    for config in adding:
        built = build_candidate(task, Candidate("triton_persistent", config), cuda_target())
        assert isinstance(built, Built), built
        (cubin,) = built.code.values()
        assert machine_code(cubin).count("ATOMG.E.ADD") == 1, config


@pytest.mark.parametrize("arch", [80, 89])
def test_older_devices_have_no_descriptors(arch: int):
    task = Task(FORMS["triton_persistent"], NumericRules())
    refused = family_named("triton_persistent").accepts(task, cuda_target(arch))
    assert refused == Rejected("unsupported", f"sm_{arch} has no tensor descriptors; from sm_90 on")


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (linear(64, 64, 100), "200 bytes apart"),
        (linear(64, 64, 128, "float32"), "without tf32"),
        (linear(3, 64, 128), "3 rows"),
        (matrices(64, 64, 128, (1, 64), None, "bfloat16"), "stride"),
        (batched(2, 64, 64, 128, "bfloat16"), "batched"),
    ],
)
def test_what_cannot_be_described_is_refused_with_the_numbers(form: Form, why: str):
    refused = family_named("triton_persistent").accepts(Task(form, NumericRules()), cuda_target())
    assert isinstance(refused, Rejected)
    assert why in refused.detail


def test_a_stride_that_other_calls_may_have_is_demanded_in_multiples_of_16_bytes():
    """Rows of a slice of a merged projection: their distance is the caller's."""
    b = FormBuilder("matmul")
    x = b.input((64, 128), "bfloat16", (128 * 3 + 8, 1))
    form = b.form(b.call("linear.default", x, b.input((64, 128), "bfloat16", role="weight")))
    task = Task(form, NumericRules())
    family = family_named("triton_persistent")
    built = family.build(task, family.start(task, cuda_target()), cuda_target())
    assert isinstance(built, Built)
    slots = slot_sizes(form)
    assert not [p for r in built.kernel.requires if (p := unmet(r, slots, {}))]
    odd = slots | {"a0.stride0": 128 * 3 + 4}
    assert [p for r in built.kernel.requires if (p := unmet(r, odd, {}))]
    assert [p for r in built.kernel.requires if (p := unmet(r, slots, {"a0": 8}))]


@pytest.mark.parametrize("arch", [80, 89, 90, 100])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("b", [None, (1, 64)])
@pytest.mark.parametrize("a", [None, (1, 32)])
def test_all_four_orders_of_the_operands_compile(
    a: tuple[int, int] | None, b: tuple[int, int] | None, dtype: str, arch: int
):
    rules = NumericRules(allow_tf32=a is None)
    task = Task(matrices(32, 96, 64, a, b, dtype), rules)
    family = family_named("triton_matmul")
    built = family.build(task, family.start(task, cuda_target(arch)), cuda_target(arch))
    assert isinstance(built, Built), built


@pytest.mark.parametrize("arch", [80, 89, 90, 100])
def test_batches_and_halves_compile(arch: int):
    for form, name in (
        (batched(4, 32, 64, 64, "bfloat16"), "triton_matmul"),
        (batched(4, 1, 64, 64, "float16"), "triton_gemv"),
        (batched(4, 16, 64, 2048, "bfloat16"), "triton_split_k"),
        (linear(16, 512, 256, tail="swiglu"), "library_halves"),
    ):
        task, target = Task(form, NumericRules()), cuda_target(arch)
        built = family_named(name).build(task, family_named(name).start(task, target), target)
        assert isinstance(built, Built), built
