"""The page in a real browser: on a desk, on a phone, in the dark. Pictures are left in build/screenshots.

Skipped where there is no Chromium, except in continuous integration, which installs it.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from chromium import Chromium, View, find_chromium, pixels
from recorded_llama import llama_contents
from reported import with_report
from two_layers import contents

from tune_model.package.contents import ArtifactContents
from tune_model.pipeline.report.gather import gather
from tune_model.pipeline.report.html import render_html
from tune_model.pipeline.report.source import from_contents
from tune_model.tune.choice import WholeStep

VIEWS = {
    "desktop": View(1280, 900),
    "phone": View(390, 844, 2.0, mobile=True),
    "narrow": View(320, 640, 2.0, mobile=True),
    "dark": View(1280, 900, dark=True),
    "phone-dark": View(390, 844, 2.0, mobile=True, dark=True),
}
DESKTOP = VIEWS["desktop"]

# Elements that reach past the window's right edge, unless something around them scrolls by itself.
OVERHANG = """
[...document.querySelectorAll('body *')].filter(e => {
  const box = e.getBoundingClientRect();
  if (!box.width || box.right <= innerWidth + 0.5) return false;
  for (let p = e.parentElement; p; p = p.parentElement)
    if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(p).overflowX) && p !== document.body) return false;
  return true;
}).map(e => e.tagName + '.' + e.className + ' ' + e.textContent.slice(0, 40))
"""
PLOTS = """
[...document.querySelectorAll('svg[role=img]')].filter(e => e.checkVisibility()).map(e => e.getBoundingClientRect())
  .map(b => ({x: b.left + scrollX, y: b.top + scrollY, width: b.width, height: b.height}))
"""
SHARES = "[...document.querySelectorAll('#tasks tbody tr')].map(r => Number(r.cells[4].dataset.value))"
LABELS = "[...document.querySelectorAll('#tasks tbody tr')].filter(r => !r.hidden).map(r => r.cells[0].dataset.value)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    binary = find_chromium()
    if binary is None:
        if os.environ.get("CI"):
            pytest.fail("no Chromium; continuous integration installs it (apt-get install chromium)")
        pytest.skip("no Chromium here (Debian: apt-get install chromium)")
    with Chromium(binary) as running:
        yield running


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> dict[str, Path]:
    """A small report, and one of a real size."""
    folder = tmp_path_factory.mktemp("reports")
    made = {"small": contents(), "llama-3-8b": llama_contents(repository)}
    for name, content in made.items():
        page = with_report(with_steps(content)).report_html or ""
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in made}


def with_steps(content: ArtifactContents) -> ArtifactContents:
    """The same, as if every step had been timed as a whole."""
    places = {(site.program, site.point) for task in content.tuning.plan.tasks for site in task.sites}
    steps = tuple(WholeStep(program, point, 4.18e3, 8.29e3, 1.95, 2.01) for program, point in sorted(places))
    return replace(content, tuning=msgspec.structs.replace(content.tuning, steps=steps))


def trouble(browser: Chromium) -> list[object]:
    """What the page complained about, and what it asked for beside itself."""
    kinds = {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"}
    asked = [e["params"]["request"]["url"] for e in browser.events if e.get("method") == "Network.requestWillBeSent"]
    return [e["params"] for e in browser.events if e.get("method") in kinds] + asked[1:]


def test_a_large_report_is_under_3_mb(pages: dict[str, Path]):
    assert 200_000 < pages["llama-3-8b"].stat().st_size < 3_000_000


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("page", ["small", "llama-3-8b"])
def test_it_looks_right(browser: Chromium, pages: dict[str, Path], repository: Path, page: str, view: str):
    browser.open(pages[page], VIEWS[view])
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.run(OVERHANG) == []
    corner = pixels(browser.picture(clip={"x": 0, "y": 0, "width": 8, "height": 8}))
    assert corner.mean() < 60 if VIEWS[view].dark else corner.mean() > 200
    plots = browser.run(PLOTS)
    assert len(plots) == {"small": 3, "llama-3-8b": 13}[page]
    for plot in plots[:4]:
        image = pixels(browser.picture(clip=plot, scale=160 / plot["width"] / VIEWS[view].scale)).reshape(-1, 3)
        colours, counts = np.unique(image // 32, axis=0, return_counts=True)
        drawn = 1.0 - counts.max() / counts.sum()
        assert 0.005 < drawn < 0.6, plot
        assert len(colours) >= 4, plot
    assert trouble(browser) == []
    folder = repository / "build" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"report-{page}-{view}.png").write_bytes(browser.picture(whole=True))


def test_letters_keep_a_readable_size_on_a_phone(browser: Chromium, pages: dict[str, Path]):
    """Plots scale with their place; drawn too wide, their letters would shrink."""
    browser.open(pages["llama-3-8b"], VIEWS["phone"])
    sizes = browser.run(
        "[...document.querySelectorAll('svg[role=img] text')].filter(t => t.getBoundingClientRect().width)"
        ".map(t => 11 * t.ownerSVGElement.getBoundingClientRect().width / t.ownerSVGElement.viewBox.baseVal.width)"
    )
    assert len(sizes) > 50
    assert min(sizes) > 9


def test_columns_sort_both_ways(browser: Chromium, pages: dict[str, Path]):
    browser.open(pages["llama-3-8b"], DESKTOP)
    shares = browser.run(SHARES)
    assert shares == sorted(shares, reverse=True)
    click = "document.querySelectorAll('#tasks th button')[{}].click()"
    browser.run(click.format(4))
    assert browser.run(SHARES) == sorted(shares)
    assert browser.run("document.querySelectorAll('#tasks th')[4].getAttribute('aria-sort')") == "ascending"
    browser.run(click.format(0))
    labels = browser.run(LABELS)
    assert labels[0][0] == min(label[0] for label in labels)
    # Numbers inside names count as numbers: b8 before b16.
    assert labels.index("attention decode b8 h32/8 d128 bf16 ctx1024") < labels.index(
        "attention decode b16 h32/8 d128 bf16 ctx1024"
    )


def test_rows_are_found_by_words_status_and_kind(browser: Chromium, pages: dict[str, Path]):
    browser.open(pages["llama-3-8b"], DESKTOP)
    total = len(browser.run(LABELS))
    put = (
        "(field => {{ field.value = {!r}; field.dispatchEvent(new Event('input', {{bubbles: true}})); }})"
        "(document.getElementById({!r}))"
    )
    browser.run(put.format("gemv 1x4096", "find"))
    found = browser.run(LABELS)
    assert found
    assert all(label.startswith("matmul 1x4096") for label in found)
    assert browser.run("document.getElementById('shown').textContent") == f"{len(found)} of {total} tasks"
    browser.run(put.format("", "find"))
    browser.run(put.format("no gain", "of-status"))
    kept = browser.run(LABELS)
    assert 0 < len(kept) < total
    browser.run(put.format("attention", "of-kind"))
    assert all(label.startswith("attention") for label in browser.run(LABELS))
    browser.run(put.format("", "of-kind"))
    browser.run(put.format("", "of-status"))
    assert len(browser.run(LABELS)) == total


def test_a_link_unfolds_the_race_it_leads_to(browser: Chromium, pages: dict[str, Path]):
    browser.open(pages["llama-3-8b"], DESKTOP)
    seen = "document.querySelector('details article svg').checkVisibility()"
    assert not browser.run(seen)
    browser.run(
        "new Promise(done => { addEventListener('hashchange', () => setTimeout(done, 50));"
        " [...document.querySelectorAll('#tasks tbody tr a')].at(-1).click(); })"
    )
    assert browser.run(seen)


def test_climbs_have_a_path_and_their_steps_unfold(browser: Chromium, pages: dict[str, Path]):
    browser.open(pages["llama-3-8b"], DESKTOP)
    climbed = browser.run("document.querySelectorAll('article path.walk').length")
    assert climbed > 10
    assert browser.run("document.querySelectorAll('article ol').length") == climbed
    browser.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    lengths = browser.run("[...document.querySelectorAll('article path.walk')].map(p => p.getTotalLength())")
    assert sum(length > 5 for length in lengths) > 5
    assert "->" in browser.run("document.querySelector('article ol').textContent")
    assert browser.run(OVERHANG) == []


def test_a_dot_tells_what_it_is(browser: Chromium, pages: dict[str, Path]):
    browser.open(pages["llama-3-8b"], DESKTOP)
    browser.run(
        "document.querySelector('svg.wide circle.dot').dispatchEvent("
        "new PointerEvent('pointerover', {bubbles: true, clientX: 1270, clientY: 890}))"
    )
    text, box = browser.run(
        "(t => [t.textContent, [t.getBoundingClientRect().right, t.getBoundingClientRect().bottom]])"
        "(document.getElementById('tip'))"
    )
    assert "of the time" in text
    assert box[0] <= 1280
    assert box[1] <= 900


def test_it_reads_without_scripts(browser: Chromium, pages: dict[str, Path], tmp_path: Path):
    page = pages["small"].read_text(encoding="utf-8")
    still = tmp_path / "still.html"
    still.write_text(page[: page.index("<script>")] + page[page.index("</script>") + 9 :], encoding="utf-8")
    browser.open(still, DESKTOP)
    assert len(browser.run(LABELS)) == 2
    assert browser.run("document.querySelectorAll('svg title').length") > 3


def test_it_is_what_the_command_renders(pages: dict[str, Path]):
    assert pages["small"].read_text(encoding="utf-8") == render_html(gather(from_contents(with_steps(contents()))))
