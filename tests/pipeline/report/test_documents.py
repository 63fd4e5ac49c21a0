"""The three forms of a report: the same facts, and nothing from an artifact becomes markup."""

import html
import re
from html.parser import HTMLParser

import msgspec
import pytest
from two_layers import contents

from tune_model.extract.task import Skipped
from tune_model.package.contents import ArtifactContents
from tune_model.pipeline.commands.report import render
from tune_model.pipeline.report.facts import Missing, ReportFacts, StepTime
from tune_model.pipeline.report.gather import gather
from tune_model.pipeline.report.plots.scale import log_scale
from tune_model.pipeline.report.source import from_contents
from tune_model.tune.candidate import Candidate
from tune_model.tune.choice import WholeStep

STEPS = {"forward batch=1": [StepTime("tuned", 1.0, 0.9, 1.1), StepTime("eager", 2.5, 2.4, 2.6)]}
MISSING = (Missing("forward", "batch=3", 12, 24, 0, "batch=1"),)


WHOLE = (
    WholeStep("forward", (("batch", 1),), 4.75, 9.25, 1.91, 1.99),
    WholeStep("forward", (("batch", 16),), 7.25, 7.5, 1.01, 1.06),
)


def with_steps() -> ArtifactContents:
    base = contents()
    return contents(tuning=msgspec.structs.replace(base.tuning, steps=WHOLE))


@pytest.fixture(scope="module")
def facts() -> ReportFacts:
    return gather(from_contents(with_steps()), steps=STEPS, missing=MISSING)


def text_of(page: str) -> str:
    bare = re.sub(r"<(style|script).*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(bare).split())


def test_json_is_the_facts(facts: ReportFacts):
    assert msgspec.json.decode(render(facts, "json"), type=ReportFacts) == facts


@pytest.mark.parametrize("format_", ["html", "md"])
def test_every_form_says_the_same(facts: ReportFacts, format_: str):
    text = text_of(render(facts, "html")) if format_ == "html" else render(facts, "md").replace("\\", "")
    for said in (
        "two-layers",
        facts.target,
        "1.33x",
        "matmul 1x8x8 f32 + relu",
        "cpp_small(unroll=8)",
        "1.80 to 2.20",
        "no gain",
        "8 columns; needs 16",
        "a lone operator",
        "batch=16",
        "rung 1",
        "0.900 to 1.100",
        "2.50x",
        "batch=3",
        "g++",
        "gain 1.03x (forward batch=16: 7.25 us instead of 7.5 us, 95 % interval 1.01 to 1.06) to 1.95x (forward",
        "1.91 to 1.99",
        "weights 576 B, workspace 1.02 kB; together 1.6 kB",
        "1.75 us",  # what the step takes beyond its tasks
    ):
        assert said in text, said


@pytest.mark.parametrize("format_", ["html", "md"])
def test_disturbed_times_are_shown_and_nothing_made_of_them(format_: str):
    """They used to stand there as `1.00x` and `0 % of roof`, as if that had been found out."""
    base = contents().tuning
    busy = tuple(msgspec.structs.replace(c, winner=Candidate("aten"), status="disturbed") for c in base.choices)
    made = gather(from_contents(contents(tuning=msgspec.structs.replace(base, choices=busy))))
    text = text_of(render(made, "html")) if format_ == "html" else render(made, "md").replace("\\", "")
    assert "1.00x" not in text.partition("Races")[0].partition("Scoreboard")[2]
    assert "with --recheck on an idle machine" in text
    assert "Nothing was timed well enough to say what this machine can do" in text


class Structure(HTMLParser):
    """Checks nesting, and gathers what a page would load."""

    void = frozenset({"meta", "input", "br", "link", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        names = dict(attrs)
        self.loads += [v for k in ("src", "href", "data", "action") if (v := names.get(k)) and not v.startswith("#")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        return None


def test_the_page_is_whole_and_loads_nothing(facts: ReportFacts):
    page = render(facts, "html")
    structure = Structure()
    structure.feed(page)
    assert structure.open == []
    assert structure.loads == []
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_names_from_an_artifact_are_text_not_markup():
    evil = '<script>alert("x")</script> | `a`'
    plan = contents().tuning.plan
    tasks = tuple(msgspec.structs.replace(t, label=evil) for t in plan.tasks)
    changed = msgspec.structs.replace(plan, tasks=tasks, notes=(evil,), skipped=(Skipped("forward", evil, 1, evil),))
    facts = gather(from_contents(contents(tuning=msgspec.structs.replace(contents().tuning, plan=changed))))
    page = render(facts, "html")
    structure = Structure()
    structure.feed(page)
    assert structure.scripts == 1
    assert "<script>alert" not in page
    lines = render(facts, "md").splitlines()
    rows = [line for line in lines if "alert" in line and line.startswith("|")]
    header = next(line for line in lines if line.startswith("| task |"))
    assert rows
    assert rows[0].replace("\\|", "").count("|") == header.count("|")
    assert all("<script" not in line.replace("\\<", "") for line in lines)


def test_equal_facts_give_equal_bytes(facts: ReportFacts):
    again = gather(from_contents(with_steps()), steps=STEPS, missing=MISSING)
    for format_ in ("html", "md", "json"):
        assert render(facts, format_) == render(again, format_)


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ((1.0, 1000.0), [1.0, 10.0, 100.0, 1000.0]),
        ((300.0, 500.0), [300.0, 400.0, 500.0]),
        ((4.0, 40.0), [5.0, 10.0, 20.0]),
        ((7.0,), [6.0, 8.0]),
        ((), [1.0, 2.0, 5.0, 10.0]),
    ],
)
def test_axes_have_round_ticks_inside(values: tuple[float, ...], ticks: list[float]):
    scale = log_scale(values, 0.0, 100.0)
    assert scale.ticks() == ticks
    places = [scale.place(t) for t in ticks]
    assert places == sorted(places)
    assert all(0 <= place <= 100 for place in places)
    assert scale.place(1e30) == 100.0
