"""Random regions against ATen and float64: the loop form itself, and as C++ in one library."""

import pytest
from cpp_kernels import Library, poisoned
from loop_interpreter import interpret
from region_trials import Trial, trial

from tune_model.runtime.replay import slot_sizes
from tune_model.tune.cpp.columns import Shape
from tune_model.tune.machine.cpu import probe_cpu


def regions(seeds: range) -> list[Trial]:
    found = [trial(seed) for seed in seeds]
    return [one for one in found if isinstance(one, Trial)]


def check_interpreted(one: Trial) -> None:
    outputs = [poisoned(r) for r in one.form.results]
    named = zip((*one.form.parameters, *one.form.results), (*one.inputs(), *outputs), strict=True)
    interpret(one.nest, {p.name: t for p, t in named}, slot_sizes(one.form))
    one.require(outputs)


def check_compiled(found: list[Trial]) -> None:
    library = Library({str(one.seed): one.nest for one in found}, probe_cpu(), Shape(2, "costly", 64))
    for one in found:
        one.require(library.run(str(one.seed), one.form, one.inputs()))


def test_nearly_all_are_lowered() -> None:
    assert len(regions(range(100))) == 100


def test_interpreted() -> None:
    for one in regions(range(40)):
        check_interpreted(one)


def test_compiled() -> None:
    check_compiled(regions(range(40)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1300, 30))
def test_many(seed: int) -> None:
    found = regions(range(seed, seed + 30))
    for one in found:
        check_interpreted(one)
    check_compiled(found)
