"""docs/design.md says what the code does: its table and picture are drawn from the policy itself.

`python docs/making/redraw.py` (or `make docs`) redraws them.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from making.policy import CASES, EVENTS, arrows
from making.redraw import PAGE, PICTURE, PLACES, states, with_table
from making.states import picture

from elasticlib.agent.policy import State

ROOT = Path(__file__).parent.parent


def test_every_event_of_the_policy_has_its_cases() -> None:
    assert set(CASES) == EVENTS


def test_the_page_shows_the_policy_as_it_is() -> None:
    page = PAGE.read_text()
    assert page == with_table(page), "run `make docs`"
    assert f"({PICTURE.relative_to(PAGE.parent)})" in page


def test_the_picture_shows_the_policy_as_it_is() -> None:
    assert PICTURE.read_text() == states(), "run `make docs`"


def test_the_picture_has_each_state_and_each_event_that_leads_on() -> None:
    drawing = ElementTree.fromstring(states())
    words = [text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert set(PLACES) == {state.value for state in State}
    events = [event for led_by in arrows().values() for event in led_by]
    assert sorted(filter(None, words)) == sorted([*PLACES, *events])


def test_a_route_without_an_arrow_is_refused() -> None:
    route = {("a", "b"): ((), (0, 0))}
    with pytest.raises(LookupError, match="routes of arrows that there are not"):
        picture("", (1, 1), places={"a": (0, 0)}, arrows={}, routes=route, ends={})


def test_every_file_and_folder_that_the_page_names_exists() -> None:
    named = re.findall(r"`((?:elasticlib|tests|docs|notebooks)/[\w./]*)`", PAGE.read_text())
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []
