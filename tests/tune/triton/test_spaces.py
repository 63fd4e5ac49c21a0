"""How many configurations a matmul has at each effort, that nearly all of them build, and why the others do not."""

from collections.abc import Iterator

import msgspec
import pytest
from devices import cuda_target
from product_forms import batched, linear
from recorded_best import BEST

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.program import Form
from tune_model.tune.building.built_file import build_candidate
from tune_model.tune.candidate import Built, Candidate, Config, Effort, Rejected
from tune_model.tune.families import families_for, family_named
from tune_model.tune.search.descent import neighbours

# (n, k) of merged weights: Llama-3-8B, Llama-3-70B of 8 ranks, Qwen3-8B, Mixtral, BERT-base, ViT-B/16; their rows m.
WEIGHTS = (
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (1280, 8192), (8192, 1024), (7168, 8192),
    (8192, 3584), (16032, 8192), (24576, 4096), (151936, 4096), (4096, 12288), (2304, 768), (768, 768), (3072, 768),
    (768, 3072), (30522, 768), (1000, 768),
)  # fmt: skip
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 257, 512, 1025, 2048, 8192)
SHAPES = [(m, n, k) for n, k in WEIGHTS for m in ROWS][::7]

HOPPER = cuda_target()
LEAST = {Effort.BALANCED: 40, Effort.THOROUGH: 200}


def candidates(form: Form, effort: Effort, arch: int = 90) -> Iterator[tuple[str, Config]]:
    """What would be raced on a GPU that is not here: everything but the library's own list."""
    task, target = Task(form, NumericRules()), cuda_target(arch)
    for family in families_for(target):
        if "matmul" in family.kinds and family.accepts(task, target) is None:
            yield from ((family.name, config) for config in dict.fromkeys(family.configurations(task, target, effort)))


@pytest.mark.parametrize("effort", list(LEAST))
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_ordinary_matmuls_have_as_many_candidates_as_promised(m: int, n: int, k: int, effort: Effort):
    assert len(list(candidates(linear(m, n, k), effort))) >= LEAST[effort]


@pytest.mark.parametrize("arch", [80, 89, 100])
@pytest.mark.parametrize("m", [1, 16, 257, 2048])
def test_other_generations_have_as_many(m: int, arch: int):
    for effort, least in LEAST.items():
        assert len(list(candidates(linear(m, 4096, 4096), effort, arch))) >= least


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_batched_and_float32_matmuls_have_enough_to_choose_from(dtype: str):
    assert len(list(candidates(batched(8, 128, 64, 128, dtype), Effort.THOROUGH))) >= 200
    assert len(list(candidates(linear(64, 1024, 1024, "float32"), Effort.THOROUGH))) >= 200


@pytest.mark.parametrize(("shape", "best"), BEST.items())
def test_the_best_of_a_recorded_exhaustive_race_is_in_the_list_or_a_short_climb_away(
    shape: tuple[int, int, int], best: Candidate
):
    task, family = Task(linear(*shape), NumericRules()), family_named(best.family)
    listed = set(family.configurations(task, HOPPER, Effort.BALANCED))
    space = list(dict.fromkeys(family.configurations(task, HOPPER, Effort.THOROUGH)))
    assert best.config in space
    reached, notches = {best.config}, 0
    while reached.isdisjoint(listed):
        notches += 1
        reached |= {near for config in reached for near in neighbours(config, space)}
    assert notches <= 3


@pytest.mark.parametrize("m", [1, 16, 128, 2048])
def test_nearly_all_of_a_thorough_space_is_legal(m: int):
    """Every fortieth: what the compiler alone can tell, shared memory and spills, is rarely hit."""
    task = Task(linear(m, 6144, 4096, tail="residual"), NumericRules())
    sample = list(candidates(task.form, Effort.THOROUGH))[::40]
    built = [build_candidate(task, Candidate(name, config), HOPPER) for name, config in sample]
    refused = [b for b in built if isinstance(b, Rejected)]
    assert {r.reason for r in refused} <= {"shared memory", "spills"}, refused
    assert len(refused) <= 0.1 * len(built) + 1


def first(family: str, form: Form, **changes: object) -> Built | Rejected:
    task = Task(form, NumericRules())
    config = family_named(family).start(task, HOPPER)
    changed = tuple((name, changes.get(name, value)) for name, value in config)
    return build_candidate(task, Candidate(family, changed), HOPPER)


def test_more_registers_than_a_multiprocessor_has_are_refused_with_the_numbers():
    task = Task(linear(16, 1024, 1024), NumericRules())
    small = msgspec.structs.replace(HOPPER, registers_per_sm=2048)
    family = family_named("triton_matmul")
    rejected = family.build(task, family.start(task, HOPPER), small)
    assert isinstance(rejected, Rejected)
    assert rejected.reason == "registers"
    assert "limit 2048 per multiprocessor" in rejected.detail


def test_spills_are_read_from_the_cubin_and_refused_with_the_numbers():
    rejected = first("triton_gemv", linear(1, 1024, 8192), block_n=8, block_k=8192, num_warps=1, stages=1)
    assert isinstance(rejected, Rejected)
    assert rejected.reason == "spills"
    assert "bytes of local memory per thread, limit 512" in rejected.detail


def test_a_product_that_fills_the_device_is_not_split():
    refused = family_named("triton_split_k").accepts(Task(linear(8192, 28672, 4096), NumericRules()), HOPPER)
    assert refused == Rejected("unsupported", "8192 x 28672 x 4096 fills the device unsplit")


@pytest.mark.parametrize(
    ("form", "why"), [(batched(4, 64, 64, 128, "bfloat16"), "batched"), (linear(64, 30, 100), "bytes apart")]
)
def test_what_cannot_be_divided_is_refused_before_anything_is_built(form: Form, why: str):
    refused = family_named("triton_persistent").accepts(Task(form, NumericRules()), HOPPER)
    assert isinstance(refused, Rejected)
    assert why in refused.detail
