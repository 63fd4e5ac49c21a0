import pytest
from row_forms import rms_norm

from tune_model.tune.families.triton_rows import rows_of
from tune_model.tune.loops.ir import LoopNest
from tune_model.tune.triton.row_source import row_function


def lines_of(rows: int, columns: int) -> list[str]:
    form = rms_norm(rows, columns)
    nest = rows_of(form)
    assert isinstance(nest, LoopNest)
    return row_function(nest, form, 1, columns).source.splitlines()


def test_everything_is_asked_for_before_a_reduction_waits():
    lines = lines_of(64, 1024)
    loads = [number for number, line in enumerate(lines) if "tl.load(" in line]
    assert len(loads) == 3
    assert max(loads) < min(number for number, line in enumerate(lines) if "tl.sum(" in line)


@pytest.mark.parametrize(("rows", "passing"), [(64, False), (10000, True), (65536, False)])
def test_what_is_read_once_makes_room_for_results_that_a_cache_can_hold(rows: int, passing: bool):
    x, residual, weight = [line for line in lines_of(rows, 1024) if "tl.load(" in line]
    assert ("evict_first" in x) == ("evict_first" in residual) == passing
    assert "evict" not in weight
