"""The final table, of a tuning made by hand: a C++ kernel that won, a library that stays, a task nobody measured."""

import io

import handmade
import msgspec
import pytest
from rich.console import Console

from tune_model.pipeline.console import gain_text, size_text, time_text
from tune_model.pipeline.scoreboard import print_scoreboard, scores, step_gain
from tune_model.tune.choice import Tuning


@pytest.fixture(scope="module")
def tuning() -> Tuning:
    return handmade.contents().tuning


def cut_short(tuning: Tuning) -> Tuning:
    """The same with the library's task never measured."""
    won, kept = tuning.choices
    unseen = msgspec.structs.replace(
        kept, median_us=0.0, baseline_us=0.0, status="not searched", measurements=(), rejections=()
    )
    return msgspec.structs.replace(tuning, choices=(won, unseen))


def shown(tuning: Tuning) -> str:
    out = io.StringIO()
    print_scoreboard(tuning, Console(file=out, width=160))
    return out.getvalue()


def row(text: str, label: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if label in line]
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_rows_say_winner_times_interval_and_share(tuning: Tuning):
    text = shown(tuning)
    assert row(text, "matmul 1x8x8")[1:] == [
        "cpp_small(unroll=8)",
        "1.5 us",
        "3 us",
        "2.00x",
        "1.80 to 2.20",
        "33.3%",
        "tuned",
    ]
    assert row(text, "matmul 16x8x8")[1:] == ["aten", "3 us", "3 us", "1.00x", "1.00 to 1.00", "66.7%", "no gain"]
    assert "2 tasks, 1 keep the library; weighted time of all tasks 1.33x faster than with externs alone" in text
    assert "rejected candidates: 2 unsupported" in text


def test_the_largest_share_comes_first(tuning: Tuning):
    assert [round(score.share, 3) for score in scores(tuning)] == [0.667, 0.333]
    assert step_gain(tuning) == pytest.approx(6.0 / 4.5)


def test_what_was_not_measured_shows_no_time_and_no_gain(tuning: Tuning):
    """It used to read `0 us` and `1.00x`, as if it had been found out."""
    text = shown(cut_short(tuning))
    assert row(text, "matmul 16x8x8")[1:] == ["aten", "-", "-", "-", "-", "-", "not searched"]
    assert "weighted time of the 1 measured 2.00x faster than with externs alone" in text


def test_numbers_for_people():
    assert [time_text(us) for us in (0.0, 0.5, 14.21, 3570.0, 12.1e6)] == [
        "-",
        "0.5 us",
        "14.2 us",
        "3.57 ms",
        "12.1 s",
    ]
    assert [size_text(size) for size in (0, 999, 7.3e6, 2e12, 3e15)] == ["0 B", "999 B", "7.3 MB", "2 TB", "3e+03 TB"]
    assert [gain_text(3.0, 1.5), gain_text(1.0, 0.0)] == ["2.00x", "-"]
