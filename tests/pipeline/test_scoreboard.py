"""The final table, of a tuning made by hand: a C++ kernel that won, a library that stays, a task nobody measured."""

import io

import msgspec
import pytest
import two_layers
from rich.console import Console

from tune_model.pipeline.console import gain_text, size_text, time_text
from tune_model.pipeline.report.gather import gather
from tune_model.pipeline.report.source import from_contents
from tune_model.pipeline.scoreboard import print_scoreboard
from tune_model.tune.candidate import Candidate
from tune_model.tune.choice import Tuning, WholeStep


@pytest.fixture(scope="module")
def tuning() -> Tuning:
    return two_layers.contents().tuning


def cut_short(tuning: Tuning) -> Tuning:
    """The same with the library's task never measured."""
    won, kept = tuning.choices
    unseen = msgspec.structs.replace(
        kept, median_us=0.0, baseline_us=0.0, status="not searched", measurements=(), rejections=()
    )
    return msgspec.structs.replace(tuning, choices=(won, unseen))


def shown(tuning: Tuning) -> str:
    out = io.StringIO()
    facts = gather(from_contents(two_layers.contents(tuning=tuning)))
    print_scoreboard(facts, Console(file=out, width=160), repeated=tuning.repeated)
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
    assert row(text, "matmul 16x8x8")[1:] == ["aten", "3 us", "3 us", "-", "-", "66.7%", "no gain"]
    assert "2 tasks, 1 keep the library; weighted time of all tasks 12 us -> 9 us: 1.33x (1.29 to 1.38) faster" in text
    assert "rejected candidates: 2 unsupported" in text


def test_the_largest_share_comes_first(tuning: Tuning):
    text = shown(tuning)
    assert text.index("matmul 16x8x8") < text.index("matmul 1x8x8")


def test_the_tasks_of_a_step_are_added_up(tuning: Tuning):
    text = shown(tuning)
    assert row(text, "forward batch=1 ")[1:] == ["3 us", "6 us", "2.00x", "1.81 to 2.21", "3 us"]
    assert row(text, "forward batch=16")[1:] == ["6 us", "6 us", "1.00x", "1.00 to 1.00", "6 us"]


def test_steps_that_were_timed_as_one_have_a_table(tuning: Tuning):
    assert "steps timed as one" not in shown(tuning)
    step = WholeStep("forward", (("batch", 1),), 4.75, 9.25, 1.91, 1.99)
    text = shown(msgspec.structs.replace(tuning, steps=(step,)))
    after = text[text.index("steps timed as one") :]
    assert row(after, "forward batch=1 ")[1:] == ["4.75 us", "9.25 us", "1.95x", "1.91 to 1.99"]


def test_what_was_not_measured_shows_no_time_and_no_gain(tuning: Tuning):
    """It used to read `0 us` and `1.00x`, as if it had been found out."""
    text = shown(cut_short(tuning))
    assert row(text, "matmul 16x8x8")[1:] == ["aten", "-", "-", "-", "-", "-", "not searched"]
    assert "weighted time of the 1 measured 6 us -> 3 us: 2.00x (1.81 to 2.21) faster than with externs alone" in text


def test_a_run_that_measured_nothing_says_so(tuning: Tuning):
    blank = {"median_us": 0.0, "baseline_us": 0.0, "status": "not searched", "measurements": (), "rejections": ()}
    choices = tuple(msgspec.structs.replace(c, **blank) for c in tuning.choices)
    assert "2 tasks, none measured" in shown(msgspec.structs.replace(tuning, choices=choices))


def test_a_machine_too_busy_to_decide_is_said_plainly(tuning: Tuning):
    choices = tuple(msgspec.structs.replace(c, winner=Candidate("aten"), status="disturbed") for c in tuning.choices)
    text = shown(msgspec.structs.replace(tuning, choices=choices))
    assert "2 tasks, none decided: all keep the library" in text
    assert (
        "2 tasks keep the library because other processes disturbed their times; tune again with --recheck on an idle "
        "machine"
    ) in text


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
