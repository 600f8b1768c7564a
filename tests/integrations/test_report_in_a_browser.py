"""Layout of the report in a browser: phone, desktop, dark mode, print, and embedded in a page."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import histories
import pytest
from chromium import Browser, start_browser
from making.outputs import PICTURE_SIZE, take_picture

from elasticlib.observe.history import History
from elasticlib.observe.report import Report

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="it needs Debian's chromium")

RUNS = ("uneventful", "waiting", "eventful", "vast")
PHONE, DESK = 360, 1280
# A4 at 96 pixels per inch, without the margins of the style sheet.
PAPER = (int(186 / 25.4 * 96), int(269 / 25.4 * 96))
PIXEL = 1.0
SMALLEST = 11.0
CONTRAST = 4.5

TEXTS = """(() => {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const behind = (element, x, y) => {
    const stack = document.elementsFromPoint(x, y);
    for (const below of stack.slice(stack.indexOf(element) + 1)) {
      const style = getComputedStyle(below);
      const shape = below instanceof SVGGeometryElement;
      const colour = shape ? style.fill : style.backgroundColor;
      if (colour !== 'none' && !/, 0\\)$/.test(colour)) return [colour, style.opacity];
    }
    return [getComputedStyle(document.documentElement).backgroundColor, '1'];
  };
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement;
    if (!node.data.trim() || element.closest('style, script, details') ||
      getComputedStyle(element).visibility === 'hidden') continue;
    const style = getComputedStyle(element);
    const range = document.createRange();
    range.selectNodeContents(node);
    const inside = element instanceof SVGElement;
    const clipped = style.overflowX === 'hidden';
    const part = inside || clipped ? element : range;
    const boxes = [...part.getClientRects()];
    for (const box of boxes) {
      if (box.width < 1) continue;
      const x = box.x + box.width / 2, y = box.y + box.height / 2;
      found.push({words: node.data.slice(0, 40), size: parseFloat(style.fontSize),
        box: [box.left, box.top, box.right, box.bottom],
        colour: inside ? style.fill : style.color, behind: behind(element, x, y)});
    }
  }
  return found;
})()"""

OUTSIDE = """(() => {
  const found = [];
  for (const drawing of document.querySelectorAll('.lanes, figure, ol.recoveries > li')) {
    const frame = drawing.getBoundingClientRect();
    for (const part of drawing.querySelectorAll('i, span, path')) {
      const box = part.getBoundingClientRect();
      const style = getComputedStyle(part);
      if (style.display === 'none' || style.visibility === 'hidden') continue;
      const over = Math.max(frame.left - box.left, box.right - frame.right,
        frame.top - box.top, box.bottom - frame.bottom);
      if (over > 1) found.push(part.outerHTML.slice(0, 120) + ' by ' + over);
    }
  }
  return found;
})()"""

WHOLE = "tr, li, .lane, figure, dl.figures > div"
CUT = f"""[...document.querySelectorAll({WHOLE!r})].map(part => [
    part.outerHTML.slice(0, 60),
    getComputedStyle(part).breakInside,
    part.getBoundingClientRect().height])"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert CHROMIUM is not None
    with start_browser(CHROMIUM, tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    return {name: Report(run(name)).save(folder / f"{name}.html") for name in RUNS}


def run(name: str) -> History:
    found: History = getattr(histories, name)()
    return found


def light(colour: str) -> tuple[float, float, float]:
    red, green, blue = (float(part) for part in re.findall(r"[\d.]+", colour)[:3])
    return red, green, blue


def luminance(colour: tuple[float, float, float]) -> float:
    """Return the relative luminance of WCAG, from 0 to 1."""
    parts = [value / 255 for value in colour]
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(text: dict[str, Any], page: str) -> float:
    colour, opacity = text["behind"]
    under = [
        float(opacity) * top + (1 - float(opacity)) * bottom
        for top, bottom in zip(light(colour), light(page), strict=True)
    ]
    one, other = luminance(light(text["colour"])), luminance((under[0], under[1], under[2]))
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


def overlapping(texts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return pairs of texts that overlap. The box of a line is higher than its letters."""
    found = []
    ordered = sorted(texts, key=lambda text: text["box"][1])
    for at, one in enumerate(ordered):
        left, top, right, bottom = one["box"]
        spare = 0.2 * (bottom - top)
        for other in ordered[at + 1 :]:
            begin, high, end, _ = other["box"]
            if high > bottom - spare:
                break
            if high < bottom - 2 * spare and begin < right - PIXEL and left < end - PIXEL:
                found.append((one["words"], other["words"]))
    return found


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_all_parts_of_the_report_are_visible(
    browser: Browser, pages: dict[str, Path], name: str, width: int
) -> None:
    browser.open(pages[name], width)
    assert browser.value("document.documentElement.scrollWidth") <= width
    texts = browser.value(TEXTS)
    assert len(texts) > 20
    assert min(text["size"] for text in texts) >= SMALLEST
    assert not [t for t in texts if t["box"][0] < 0 or t["box"][2] > width + PIXEL]
    assert overlapping(texts) == []
    assert browser.value(OUTSIDE) == []


@pytest.mark.parametrize("name", ["eventful", "vast"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_has_enough_contrast_in_light_and_dark_mode(
    browser: Browser, pages: dict[str, Path], name: str, dark: bool
) -> None:
    browser.open(pages[name], DESK, dark=dark)
    page = browser.value("getComputedStyle(document.documentElement).backgroundColor")
    assert (luminance(light(page)) < 0.1) == dark
    faint = [
        (text["words"], text["colour"], text["behind"], contrast(text, page))
        for text in browser.value(TEXTS)
        if contrast(text, page) < CONTRAST
    ]
    assert faint == []


@pytest.mark.parametrize("name", ["eventful", "vast"])
def test_printing_uses_light_colors_and_does_not_split_rows(
    browser: Browser, pages: dict[str, Path], name: str, tmp_path: Path
) -> None:
    width, height = PAPER
    browser.open(pages[name], width, dark=True, media="print")
    assert browser.value("document.documentElement.scrollWidth") <= width
    page = browser.value("getComputedStyle(document.querySelector('article')).backgroundColor")
    assert light(page) == (255, 255, 255)
    parts = browser.value(CUT)
    assert len(parts) > 40
    assert [part for part in parts if part[1] != "avoid" or part[2] > height] == []
    assert browser.value(OUTSIDE) == []
    needed = browser.value("document.documentElement.scrollHeight") / height
    browser.print(tmp_path / "run.pdf")
    printed = (tmp_path / "run.pdf").read_bytes()
    sheets = len(re.findall(rb"/Type\s*/Page\b", printed))
    assert needed <= sheets <= 2 * needed + 2


def test_a_report_of_500_nodes_and_200_generations_stays_small(
    browser: Browser, pages: dict[str, Path]
) -> None:
    assert pages["vast"].stat().st_size < 2_000_000
    browser.open(pages["vast"], DESK)
    assert browser.value("document.querySelectorAll('*').length") < 8000
    page_text = browser.value("document.body.innerText")
    assert "490 nodes not shown here" in page_text
    assert "The 16 longest are shown; the other 184 took" in page_text
    assert "500 nodes; the 40 most eventful are listed" in page_text


def test_text_from_workers_is_not_executed(browser: Browser, tmp_path: Path) -> None:
    """A report escapes text with scripts, links, closing tags and text directions."""
    evil = "</title></style><img src=x onerror='window.done=1'><script>window.done=1</script>\u202e"
    history = histories.eventful()
    marks = tuple(attrs.evolve(mark, text=evil) for mark in history.timeline)
    nodes = tuple(
        attrs.evolve(node, host=evil, log_dir=evil, settings={evil: evil}, versions={evil: evil})
        for node in history.nodes
    )
    generations = tuple(attrs.evolve(one, reason=evil) for one in history.generations)
    history = attrs.evolve(
        history,
        run=evil,
        reason=evil,
        timeline=marks,
        nodes=nodes,
        generations=generations,
        root_cause={"x": evil},
    )
    browser.open(Report(history).save(tmp_path / "evil.html"), PHONE)
    assert browser.value("window.done") is None
    assert browser.value("document.querySelectorAll('img, a, link, iframe').length") == 0
    assert browser.value("document.querySelectorAll('script').length") == 1, "the page's own"
    assert browser.value("document.documentElement.scrollWidth") <= PHONE
    assert browser.value("document.title").startswith("</title></style><img")
    assert browser.value(OUTSIDE) == []
    assert overlapping(browser.value(TEXTS)) == []


def test_two_reports_in_one_page_do_not_affect_the_page(browser: Browser, tmp_path: Path) -> None:
    # A notebook has a style for all of its tables.
    around = """<!DOCTYPE html><meta name=viewport content='width=device-width'>
        <style>td, th { text-align: right } .cell table { font-size: 30px; margin-left: auto }
        .cell tbody tr:nth-child(odd) { background: rgb(9, 9, 9) }</style>
        <h1 id=mine>mine</h1><table id=own><tr><td>1</td></tr></table><p id=last>svg</p>"""
    plain, full = tmp_path / "plain.html", tmp_path / "full.html"
    plain.write_text(around)
    parts = "".join(
        f"<div class=cell>{Report(run(name))._repr_html_()}</div>"
        for name in ("eventful", "uneventful")
    )
    full.write_text(around + parts)
    looks = """['mine', 'own', 'last'].map(id => {
        const style = getComputedStyle(document.getElementById(id));
        return [...style].filter(name => !/^(width|height|perspective|transform|inline|block)/
            .test(name)).map(name => name + style.getPropertyValue(name)).join() })"""
    browser.open(plain, DESK)
    before = browser.value(looks)
    browser.open(full, DESK)
    assert browser.value(looks) == before
    row = "document.querySelector('article tbody tr')"
    assert browser.value(f"getComputedStyle({row}).backgroundColor") == "rgba(0, 0, 0, 0)"
    cell = browser.value(f"getComputedStyle({row}.querySelector('td')).textAlign")
    assert cell == "left"
    texts = browser.value(TEXTS)
    assert max(text["size"] for text in texts) < 33
    assert overlapping(texts) == []


def test_the_picture_of_the_documentation_can_be_taken(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    report = Report(histories.eventful()).save(tmp_path / "report.html")
    picture = tmp_path / "report.png"
    take_picture(CHROMIUM, report, tmp_path, picture)
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    size = tuple(int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert size == PICTURE_SIZE
