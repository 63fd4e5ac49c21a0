from tuning_fakes import TARGET, FakeFamily, Refusing, linear_plan

from tune_model.tune.candidate import Effort
from tune_model.tune.estimate import estimate, estimate_seconds, program_bytes
from tune_model.tune.families.aten import FAMILY as ATEN
from tune_model.tune.machine.cuda import offline_cuda
from tune_model.tune.search.descent import expected_climbs, expected_count


def test_candidates_are_those_of_the_families_that_accept():
    families = (ATEN, FakeFamily("a", tuple((("n", n),) for n in range(7))), Refusing("b", ((),)))
    found = estimate(linear_plan(1, 8), TARGET, families, Effort.BALANCED, 2)
    assert [t.candidates for t in found.tasks] == [8, 8]
    assert found.seconds == estimate_seconds(TARGET, 2, 16, 2) > 0


def test_builds_overlap_on_a_gpu_only():
    gpu = offline_cuda(90)
    assert estimate_seconds(gpu, 1, 160, 16) < estimate_seconds(gpu, 1, 160, 1)
    assert estimate_seconds(gpu, 10, 0, 1) == estimate_seconds(gpu, 10, 0, 16)


def test_a_program_reads_all_its_weights():
    assert program_bytes(linear_plan(1)) == {"forward": 32 * 16 * 4}


def test_of_a_climbed_space_a_part_is_timed():
    assert expected_count("matmul", 400, builds_ahead=True) == 400
    assert expected_count("reduction", 12, builds_ahead=True) == 12
    assert expected_count("reduction", 400, builds_ahead=True) < 50


def test_climbs_after_a_race_of_matmuls_count_where_builds_run_ahead():
    families = (ATEN, FakeFamily("a", tuple((("n", n),) for n in range(7))))
    gpu = offline_cuda(90)
    for effort, more in ((Effort.QUICK, 0), (Effort.BALANCED, 24)):
        found = estimate(linear_plan(1, 8), gpu, families, effort, 2)
        assert [t.candidates for t in found.tasks] == [8, 8]
        assert found.seconds == estimate_seconds(gpu, 2, 2 * (8 + more), 2)
        assert expected_climbs("matmul", effort, builds_ahead=False) == 0
    assert expected_climbs("reduction", Effort.THOROUGH, builds_ahead=True) == 0
