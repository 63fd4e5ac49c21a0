import pytest
from devices import cuda_target

from tune_model.tune.candidate import Effort
from tune_model.tune.triton.row_space import Geometry, row_space, split_space

SIZES = (1, 2, 3, 7, 64, 100, 4096, 131072)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("width", SIZES)
def test_every_shape_has_a_start(rows: int, width: int, across: bool):
    shape = Geometry(rows, width, across, 2)
    for effort in Effort:
        configs = list(row_space(shape, cuda_target(), effort))
        assert configs
        assert len(set(configs)) == len(configs)
        assert len({tuple(name for name, _ in config) for config in configs}) == 1
    assert len(list(row_space(shape, cuda_target(), Effort.BALANCED))) <= 400


def test_a_few_long_rows_are_shared_by_enough_programs():
    target = cuda_target()
    for rows, width in ((1, 128256), (4, 262144), (16, 131072)):
        configs = list(split_space(Geometry(rows, width, False, 2), target, Effort.BALANCED))
        programs = {rows * min(int(c["splits"]), -(-width // int(c["block"]))) for c in map(dict, configs)}
        assert max(programs) >= 0.9 * target.sm_count
        first = dict(configs[0])
        assert 0.9 * target.sm_count <= rows * int(first["splits"]) <= 4 * target.sm_count


def test_halves_and_floats_get_as_many_bytes_per_thread():
    """Sixteen bytes per thread and load: twice as many elements of half the size."""
    firsts = []
    for item_bytes in (2, 4):
        first = dict(next(row_space(Geometry(2048, 4096, False, item_bytes), cuda_target(), Effort.QUICK)))
        firsts.append(first["block"] * item_bytes / first["num_warps"])
    assert firsts[0] == firsts[1]
