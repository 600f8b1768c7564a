"""The parts of docs/ that programs make are up to date.

`python docs/making/redraw.py` (or `make docs`) draws the agent's policy and writes the reference.
`make picture` runs the job of the first page and draws its picture.
"""

from __future__ import annotations

import json
import os
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from making import survives, timeline
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


# The picture of the README


def recorded_runs() -> list[timeline.Run]:
    return timeline.runs_from_json(json.loads(survives.RECORD.read_text()))


def check_elastic_run(run: timeline.Run) -> None:
    """Check that the job continued after each fault, and that no step is missing."""
    assert [fault.label for fault in run.faults] == [
        *("kill a worker", "start node B", "kill node B", "kill a worker")
    ]
    assert not any(fault.is_missed for fault in run.faults)
    own = sorted(
        (span for span in run.spans if (span.node, span.local_rank) == ("node A", 0)),
        key=lambda span: span.generation,
    )
    assert [span.generation for span in own] == [1, 2, 3, 4, 5]
    assert all(b.first_step <= a.last_step + 1 for a, b in pairwise(own))
    third = {(span.node, span.local_rank) for span in run.spans if span.generation == 3}
    assert third == {("node A", 0), ("node A", 1), ("node B", 0)}


def test_picture_is_drawn_from_the_recorded_runs() -> None:
    runs = recorded_runs()
    check_elastic_run(runs[0])
    assert survives.PICTURE.read_text() == timeline.draw(runs), "run `make picture`"


def test_picture_shows_both_launchers_with_the_same_faults() -> None:
    elastic, plain = recorded_runs()
    assert (elastic.launcher, plain.launcher) == ("elasticrun", "torchrun")
    assert [fault.label for fault in elastic.faults] == [fault.label for fault in plain.faults]
    for ours, theirs in zip(elastic.faults, plain.faults, strict=True):
        assert abs(ours.at_s - theirs.at_s) < 0.5
    text = timeline.draw([elastic, plain])
    assert all(run.summary() in text for run in (elastic, plain))


def test_picture_has_no_external_parts() -> None:
    """The picture is shown on light and on dark pages, where no script runs."""
    text = timeline.draw(recorded_runs())
    assert len(text) < 60_000
    drawing = ElementTree.fromstring(text)
    assert {part.tag.rpartition("}")[2] for part in drawing.iter()} == {
        *("svg", "title", "desc", "style", "rect", "polyline", "line", "text")
    }
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import", text)
    assert {"prefers-color-scheme: dark", "prefers-reduced-motion: reduce"} <= set(
        re.findall(r"prefers-[\w-]+: \w+", text)
    )


def test_picture_has_a_mark_for_each_fault_and_a_bar_and_a_curve_for_each_generation() -> None:
    runs = recorded_runs()
    drawing = ElementTree.fromstring(timeline.draw(runs))
    kinds = [part.get("class", "").split()[:1] for part in drawing.iter()]
    assert kinds.count(["mark"]) == len(runs[0].faults)
    assert kinds.count(["bar"]) == sum(len(run.spans) for run in runs)
    assert kinds.count(["curve"]) == sum(len(run.generations()) for run in runs)


def test_picture_names_its_axes_and_has_a_legend() -> None:
    drawing = ElementTree.fromstring(timeline.draw(recorded_runs()))
    words = [text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"seconds since the first step", "training", "step", "SIGKILL"} <= set(words)
    assert words.count("node A, worker 0") == words.count("node B, worker 0") == 2


@pytest.mark.faults
@pytest.mark.long
@pytest.mark.timeout(300)
def test_job_of_the_picture_loses_no_step(tmp_path: Path) -> None:
    # A busy machine needs more time than the picture shows to recover before the next fault.
    check_elastic_run(survives.play(survives.LAUNCHERS[0], tmp_path, slowdown=2.5))
