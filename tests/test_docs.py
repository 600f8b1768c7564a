"""The parts of docs/ that programs make are up to date.

`python docs/making/redraw.py` (or `make docs`) draws the agent's machine.
`make picture` runs the job of the first page and draws its picture.
"""

from __future__ import annotations

import json
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import pytest
from making import code_map, survives, timeline
from making.machine import EVENTS, arrows, rows
from making.redraw import PAGE, PICTURE, POSITIONS, phases, with_table
from making.states import picture

from elasticlib.agent.machine import TABLE, EventKind, Phase
from elasticlib.agent.messages import Effect, Event
from elasticlib.rendezvous.blame import Evidence, FailureKind, blame

ROOT = Path(__file__).parent.parent
DESIGN = [ROOT / "docs" / "design.md", *sorted((ROOT / "docs" / "design").glob("*.md"))]
CODE_MAP = ROOT / "docs" / "design" / "code_map.md"


def test_the_page_has_the_current_table_of_the_machine() -> None:
    page = PAGE.read_text()
    assert page == with_table(page), "run `make docs`"
    assert f"({os.path.relpath(PICTURE, PAGE.parent)})" in page
    head, *others = rows()
    named = {(Phase(phase), EventKind(row[0])) for row in others for phase in head[1:]}
    assert named >= set(TABLE)


def test_the_picture_shows_the_traces_of_the_machine() -> None:
    assert PICTURE.read_text() == phases(), "run `make docs`"


def test_the_picture_has_each_phase_and_each_event_that_leads_to_another_one() -> None:
    drawing = ElementTree.fromstring(phases())
    texts = [text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert set(POSITIONS) == {phase.value for phase in Phase}
    events = [event for led_by in arrows().values() for event in led_by]
    assert sorted(filter(None, texts)) == sorted([*POSITIONS, *events])


def test_a_route_without_an_arrow_is_rejected() -> None:
    route = {("a", "b"): ((), (0, 0))}
    with pytest.raises(LookupError, match="these routes belong to no arrow"):
        picture("", (1, 1), positions={"a": (0, 0)}, arrows={}, routes=route, dots={})


def described(page: str) -> set[str]:
    """Return the names in the first columns of the tables of a page."""
    firsts = re.findall(r"^\| (`[^|]*) \|", page, re.M)
    return set(re.findall(r"`([^`]+)`", " ".join(firsts)))


def test_each_event_effect_phase_and_word_is_described() -> None:
    names = described(PAGE.read_text())
    messages = {one.__name__ for union in (Event, Effect) for one in get_args(union)}
    assert set(EVENTS.values()) == set(get_args(Event))
    assert messages | {phase.value for phase in Phase} <= names
    before_the_table = described(PAGE.read_text().partition("<!-- table")[0])
    assert {kind.value for kind in EventKind} <= before_the_table


def evidence_rows() -> list[tuple[FailureKind, str]]:
    """Return the kinds of evidence in the order of the page, and what each of them names."""
    section = PAGE.read_text().partition("\n## Who is to blame\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", section, re.M)
    return [(FailureKind(kind), names) for kind, names in rows]


def test_the_page_lists_the_kinds_of_evidence_in_their_order() -> None:
    assert [kind for kind, _ in evidence_rows()] == [*FailureKind]


def evidence(kind: FailureKind, host: str) -> Evidence:
    return Evidence(kind, node=f"node-{host}", host=host)


@pytest.mark.parametrize(("kind", "names"), evidence_rows(), ids=lambda one: str(one))
def test_the_page_says_which_evidence_names_a_host(kind: FailureKind, names: str) -> None:
    def named(*hosts: str) -> str:
        verdict = blame([evidence(kind, host) for host in hosts])
        assert verdict is not None
        return verdict.named_host

    expected = {"yes": ("a", "a"), "if it holds for one host only": ("a", ""), "no": ("", "")}
    if kind is FailureKind.LOST:  # no node reports this itself
        assert names == "yes"
        verdict = blame([], [evidence(kind, "a"), evidence(kind, "b")])
        assert verdict is not None
        assert verdict.named_host == "a"
    else:
        assert (named("a"), named("a", "b")) == expected[names]


def test_the_stronger_evidence_of_the_page_decides() -> None:
    ordered = [kind for kind, _ in evidence_rows() if kind is not FailureKind.LOST]
    for stronger, weaker in pairwise(ordered):
        if {stronger, weaker} != {FailureKind.KILLED, FailureKind.CRASHED}:
            verdict = blame([evidence(weaker, "b"), evidence(stronger, "a")])
            assert verdict is not None
            assert verdict.kind is stronger


def test_each_file_and_directory_that_the_design_names_exists() -> None:
    text = "".join(page.read_text() for page in DESIGN)
    names = re.findall(r"`((?:elasticlib|tests|docs|notebooks)/[\w./]*)`", text)
    # Files of the package are also named relative to it.
    packages = "|".join(path.name for path in (ROOT / "elasticlib").iterdir() if path.is_dir())
    names += [f"elasticlib/{name}" for name in re.findall(rf"`((?:{packages})/\w+\.py)`", text)]
    assert len(names) > 50
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_code_map_has_a_row_for_each_file() -> None:
    text = CODE_MAP.read_text()
    assert text == code_map.with_tables(text), "run `python docs/making/redraw.py`"
    sections = re.findall(r"\n## `(elasticlib(?:/\w+)*)/`\n", text)
    assert len(sections) > 11


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
