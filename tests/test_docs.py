"""The parts of docs/ that programs make are up to date.

`python docs/making/redraw.py` (or `make docs`) draws the agent's policy and writes the reference.
`make picture` runs the job of the first page and draws its picture.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from making import survives
from making.policy import CASES, EVENTS, arrows, rows
from making.redraw import PAGE, PICTURE, POSITIONS, states, with_table
from making.reference import GENERATED, pages
from making.states import picture

from elasticlib.agent.policy import AgentState

ROOT = Path(__file__).parent.parent
DESIGN = [ROOT / "docs" / "design.md", *sorted((ROOT / "docs" / "design").glob("*.md"))]
CODE_MAP = ROOT / "docs" / "design" / "code_map.md"


def test_each_event_of_the_policy_has_cases() -> None:
    assert set(CASES) == EVENTS


def test_the_page_has_the_current_table_of_the_policy() -> None:
    page = PAGE.read_text()
    assert page == with_table(page), "run `make docs`"
    assert f"({os.path.relpath(PICTURE, PAGE.parent)})" in page


def test_the_picture_shows_the_current_policy() -> None:
    assert PICTURE.read_text() == states(), "run `make docs`"


def test_the_picture_has_each_state_and_each_event_with_a_transition() -> None:
    drawing = ElementTree.fromstring(states())
    texts = [text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert set(POSITIONS) == {state.value for state in AgentState}
    events = [event for led_by in arrows().values() for event in led_by]
    assert sorted(filter(None, texts)) == sorted([*POSITIONS, *events])


def test_a_route_without_an_arrow_is_rejected() -> None:
    route = {("a", "b"): ((), (0, 0))}
    with pytest.raises(LookupError, match="these routes belong to no arrow"):
        picture("", (1, 1), positions={"a": (0, 0)}, arrows={}, routes=route, dots={})


def test_each_event_and_command_of_the_table_is_described() -> None:
    page = PAGE.read_text()
    described = set(re.findall(r"`([A-Z]\w+)`", "".join(re.findall(r"^\| `.* \|$", page, re.M))))
    commands = {name for row in rows() for name in row[3].split(", ")} - {"-"}
    assert {event.__name__ for event in EVENTS} | commands <= described


def test_each_file_and_directory_that_the_design_names_exists() -> None:
    text = "".join(page.read_text() for page in DESIGN)
    names = re.findall(r"`((?:elasticlib|tests|docs|notebooks)/[\w./]*)`", text)
    # Files of the package are also named relative to it.
    packages = "|".join(path.name for path in (ROOT / "elasticlib").iterdir() if path.is_dir())
    names += [f"elasticlib/{name}" for name in re.findall(rf"`((?:{packages})/\w+\.py)`", text)]
    assert len(names) > 50
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_code_map_has_a_row_for_each_file_of_the_packages_that_it_lists() -> None:
    sections = re.findall(
        r"\n## `(elasticlib(?:/\w+)?)/`\n(.*?)(?=\n## )", CODE_MAP.read_text(), re.DOTALL
    )
    assert len(sections) > 11
    for folder, text in sections:
        files = {path.name for path in (ROOT / folder).glob("[!_]*.py")}
        assert set(re.findall(r"`([a-z]\w*\.py)`", text)) == files, folder


def test_the_reference_in_the_repository_is_up_to_date() -> None:
    texts = {path.name: path.read_text() for path in GENERATED.iterdir()}
    assert texts == pages(), "run `python docs/making/redraw.py`"


# The job of the first page


def load_recorded_job() -> survives.Story:
    return survives.from_plain(json.loads(survives.KEPT.read_text()))


def check_story(story: survives.Story) -> None:
    """Check that the job had four disturbances and lost no step."""
    descriptions = [description for _, description in story.faults]
    assert descriptions == ["kill -9 worker", "node B joins", "kill -9 node B", "kill -9 worker"]
    rank_0 = sorted((s for s in story.spans if s.rank == 0), key=lambda span: span.generation)
    assert [span.generation for span in rank_0] == [1, 2, 3, 4, 5]
    assert all(b.first <= a.last + 1 for a, b in pairwise(rank_0))
    assert sorted({(span.node, span.rank) for span in story.spans if span.generation == 3}) == [
        *(("node A", 0), ("node A", 1), ("node B", 2))
    ]


def test_the_picture_of_the_job_is_drawn_from_its_recorded_data() -> None:
    story = load_recorded_job()
    check_story(story)
    assert survives.PICTURE.read_text() == survives.draw(story), "run `make picture`"


def test_the_picture_of_the_job_has_no_external_parts() -> None:
    """The picture is shown on light and on dark pages, where no script runs."""
    text = survives.draw(load_recorded_job())
    assert len(text) < 60_000
    drawing = ElementTree.fromstring(text)
    assert {part.tag.rpartition("}")[2] for part in drawing.iter()} == {
        *("svg", "title", "desc", "style", "rect", "polyline", "line", "text")
    }
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import", text)
    assert {"prefers-color-scheme: dark", "prefers-reduced-motion: reduce"} <= set(
        re.findall(r"prefers-[\w-]+: \w+", text)
    )


def test_the_picture_of_the_job_has_a_mark_for_each_disturbance_and_a_bar_for_each_span() -> None:
    story = load_recorded_job()
    drawing = ElementTree.fromstring(survives.draw(story))
    kinds = [part.get("class", "").split()[:1] for part in drawing.iter()]
    assert kinds.count(["mark"]) == len(story.faults)
    assert kinds.count(["bar"]) == len(story.spans)
    assert kinds.count(["loss"]) == 5


@pytest.mark.faults
@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_job_of_the_picture_loses_no_step() -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_story(survives.play(Path(folder)))
