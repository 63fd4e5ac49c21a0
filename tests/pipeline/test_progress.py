"""What a run shows while it goes on: lines for logs, a bar on a terminal, JSON for programs, and the time left."""

import io
import json

import pytest
from rich.console import Console

from tune_model.pipeline.progress import Eta, JsonReport, PlainReport, TerminalReport, make_report
from tune_model.tune.candidate import Candidate, Rejected
from tune_model.tune.events import (
    CandidateDone,
    ChoiceConfirmed,
    RecordsDamaged,
    TaskDone,
    TaskStarted,
    TuneFinished,
    TuneStarted,
)

ATEN, GEMV = Candidate("aten"), Candidate("cpp_gemv", (("rows", 8),))
RUN = (
    RecordsDamaged("store/records.sqlite.damaged-1", 12),
    TuneStarted(3, 4, 1, 8.0),
    TaskStarted(0, "k0", "matmul 1x8x8 f32", 2),
    CandidateDone("k0", ATEN, 4.0, 4.0, 4.0),
    CandidateDone("k0", GEMV, 2.0, 2.0, 4.0),
    TaskDone(0, "k0", GEMV, 2.0, 4.0, 1.25, replayed=False, status="tuned"),
    TaskStarted(1, "k1", "rms_norm 8x128 f32", 2),
    CandidateDone("k1", GEMV, 0.0, 4.0, 4.0, replayed=True, rejected=Rejected("wrong", "all zeros")),
    TaskDone(1, "k1", ATEN, 1500.0, 1500.0, 0.0, replayed=True, status="no gain"),
    TaskStarted(2, "k2", "mean 4x64 f32", 1),
    TaskDone(2, "k2", ATEN, 0.0, 0.0, 0.0, replayed=False, status="not searched"),
    ChoiceConfirmed(0, 1, "k0", GEMV, 1.01, held=False, detail="no faster when it was measured again"),
    TuneFinished(2, 3, 1.5, "budget"),
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_time_left_is_the_estimate_first_and_the_pace_later():
    clock = Clock()
    eta = Eta(clock)
    assert eta.remaining_s() == 0.0
    eta.start(candidates=10, estimate_s=100.0)
    clock.now += 10
    assert eta.remaining_s() == 90.0
    eta.step(replayed=True)
    assert eta.remaining_s() == 90.0, "what is replayed says nothing about the pace"
    for _ in range(8):
        eta.step(replayed=False)
    # Eight candidates took 10 s, so the last one takes 1.25 s; a ninth of the estimate is still believed.
    assert eta.remaining_s() == pytest.approx(8 / 9 * 1.25 + 1 / 9 * 90)
    eta.step(replayed=False)
    assert eta.remaining_s() == 0.0


def test_a_log_gets_one_line_per_task():
    out = io.StringIO()
    with PlainReport(Console(file=out, width=200)) as report:
        for event in RUN:
            report(event)
    lines = out.getvalue().splitlines()
    assert lines[0] == "records were damaged: set aside as store/records.sqlite.damaged-1, 12 rows rescued"
    assert lines[1] == "3 tasks (1 replayed from records), 4 candidates, about 8 s"
    assert lines[2].startswith("[1/3] matmul 1x8x8 f32: cpp_gemv(rows=8) 2 us, extern 4 us, 2.00x (tuned; 1.2 s; ")
    assert lines[3].startswith("[2/3] rms_norm 8x128 f32: aten 1.5 ms, extern 1.5 ms, 1.00x (no gain; replayed; ")
    assert lines[4] == "[3/3] mean 4x64 f32: not searched"
    assert lines[5] == "matmul 1x8x8 f32: cpp_gemv(rows=8) did not hold: no faster when it was measured again"
    assert lines[6:] == ["2 builds, 3 measurements in 1.5 s, stopped early: budget"]


def test_a_terminal_gets_a_bar_and_keeps_the_lines():
    out = io.StringIO()
    with TerminalReport(Console(file=out, width=200, force_terminal=True, highlight=False)) as report:
        for event in RUN:
            report(event)
            report.progress.refresh()
    shown = out.getvalue()
    assert "s left" in shown
    assert "cpp_gemv(rows=8)  best 2.00x of extern" in shown
    assert "measuring winners again, 1 of 1" in shown
    assert "[3/3] mean 4x64 f32: not searched" in shown


def test_a_program_gets_every_event_as_json(capsys: pytest.CaptureFixture[str]):
    with JsonReport() as report:
        for event in RUN:
            report(event)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["type"] for event in told] == [event.__struct_config__.tag for event in RUN]
    assert told[7]["rejected"] == {"reason": "wrong", "detail": "all zeros"}


def test_without_a_terminal_there_is_no_bar():
    assert isinstance(make_report(as_json=True), JsonReport)
    assert type(make_report(as_json=False)) is PlainReport
