import math

import pytest
from matmuls.summary import summarise


def table_row(m, ratio, high, owners=(), tbps=1.0):
    return {
        "shard": "rows",
        "row": f"{m} {ratio}",
        "m": m,
        "ratio": ratio,
        "ratio_high": high,
        "owners": list(owners),
        "tbps": tbps,
    }


def test_nothing_is_known_of_no_rows():
    assert summarise([]) == {}


def test_bands_are_geometric_means():
    rows = [table_row(1, 1.5, 1.6), table_row(16, 1.2, 1.3), table_row(32, 1.1, 1.2), table_row(128, 1.3, 1.4)]
    rows += [table_row(257, 1.0, 1.0), table_row(8192, 1.04, 0.99)]
    found = summarise(rows)
    assert found["geomean_m_le_16"] == pytest.approx(math.sqrt(1.5 * 1.2))
    assert found["geomean_m_32_128"] == pytest.approx(math.sqrt(1.1 * 1.3))
    assert found["geomean_m_gt_128"] == pytest.approx(math.sqrt(1.04))
    assert found["worst_vs_extern"] == 0.99


def test_rows_that_failed_count_nowhere():
    failed = {"shard": "rows", "row": "x", "failed": "RuntimeError: out of memory"}
    assert summarise([failed, table_row(1, 1.5, 1.6)])["worst_vs_extern"] == 1.6
    assert summarise([failed]) == {}


def test_bandwidths_are_llamas_with_one_row():
    rows = [
        table_row(1, 1.0, 1.0, ("Llama-3-8B head",), 4.4),
        table_row(2, 1.0, 1.0, ("Llama-3-8B head",), 4.0),
        table_row(1, 1.0, 1.0, ("Llama-3-8B o", "Qwen3-8B o"), 3.5),
        table_row(1, 1.0, 1.0, ("Qwen3-8B head",), 4.5),
    ]
    found = summarise(rows)
    assert (found["lm_head_tbps"], found["o_tbps"]) == (4.4, 3.5)
    assert "down_tbps" not in found


def test_max_autotune_share_counts_rows_not_surely_slower():
    rows = [{"shard": "max-autotune", "row": str(high), "ratio_high": high} for high in (1.2, 1.0, 0.99, 1.01)]
    found = summarise(rows)
    assert (found["share_ge_max_autotune"], found["worst_vs_max_autotune"]) == (0.75, 0.99)


def test_tuning_and_regret():
    rows = [
        {"shard": "llama-tuning", "row": "", "seconds": 80.0, "candidates_per_s": 20.0},
        {"shard": "regret", "row": "a", "regret": 0.013, "spread": 0.002},
        {"shard": "regret", "row": "b", "regret": 0.0, "spread": 0.011},
    ]
    assert summarise(rows) == {
        "tune_s_llama_8b": 80.0,
        "tune_candidates_per_s": 20.0,
        "regret_max": 0.013,
        "tuning_spread_max": 0.011,
    }
