"""The whole report of a run: its words and figures, and the page around them.

It is one text without scripts that fetches nothing, and the same part of it stands in notebooks.
"""

from __future__ import annotations

import contextlib
import itertools

from ...clock import date_of
from ..history import History, JobState
from ..wording import KILLED, LOST_SNAPSHOT, count, percentage, plural
from .curves import curve_section
from .drawing import picture
from .markup import Markup, cut, element, joined, seconds_text, unbroken
from .recoveries import lost_seconds, recoveries, recovery_section
from .style import ROOT, page_style, style
from .tables import failure_section, node_section, settings_section
from .timeline import timeline

LAW = "default-src 'none'; style-src 'unsafe-inline'"
"""What the page may load: nothing, whatever a bug would let into it."""
GENERATOR = "elasticlib report"
"""What tells a report from another page."""
DOCTYPE = Markup("<!DOCTYPE html>\n")
REASON = 600
UNKNOWN = ("\u2013", "not reported")
"""A key figure, and what is said below it."""
LONG = 12
"""Characters of a key figure, above which it is written smaller."""


def page(history: History) -> str:
    """A file of its own, in UTF-8."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name_="generator", content=GENERATOR),
        element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=LAW),
        element("meta", name_="color-scheme", content="light dark"),
        element("title", f"{history.run or 'run'}: {_word(history.state)}"),
        element("style", Markup(page_style())),
    )
    body = element("body", Markup(fragment(history)))
    return f"{DOCTYPE}{element('html', head, body, lang='en')}\n"


def fragment(history: History) -> str:
    """The report alone, with its style: for a page that holds more."""
    inner = element(
        "div",
        _header(history),
        element("section", element("h2", "Timeline"), timeline(history)),
        curve_section(history),
        recovery_section(history),
        failure_section(history),
        node_section(history),
        settings_section(history),
        _footer(history),
        class_="inner",
    )
    return element("article", element("style", Markup(style())), inner, class_=ROOT)


def _word(state: JobState | None) -> str:
    return KILLED if state is None else state.value.lower()


def _header(history: History) -> Markup:
    sign = "vanished" if history.state is None else history.state.value
    state = element("span", picture(sign), _word(history.state), class_="state")
    lead = [state, element("span", seconds_text(history.until))]
    if history.goodput is not None:
        lead.append(element("span", f"goodput {unbroken(percentage(history.goodput))}"))
    with contextlib.suppress(OverflowError, OSError, ValueError):  # files may hold any time
        lead.append(element("span", f"began {date_of(history.wall)}", class_="soft"))
        if history.state is None or not history.state.over:
            seen = f"last heard of {date_of(history.wall + history.until)}"
            lead.append(element("span", seen, class_="soft"))
    parts = [
        element("h1", history.run or "a run without an id"),
        element("p", *lead, class_="lead"),
    ]
    if history.reason:
        # It is not why a job was killed.
        last = "the last generation began because: " if history.state is None else ""
        parts.append(element("p", cut(f"{last}{history.reason}", REASON), class_="reason"))
    if history.cause:
        named = history.cause.items()
        words = ", ".join(f"{name} {value}" for name, value in named if value is not None)
        parts.append(element("p", f"First cause: {cut(words, REASON)}", class_="reason"))
    return element("header", *parts, _figures(history))


def _figures(history: History) -> Markup:
    made = history.generations
    redone = sum(generation.cost.redone for generation in made)
    ways = recoveries(history)
    stepless = history.goodput is None
    beside = "and what training lost" if stepless else "starts, recoveries, stalls"
    lost = (seconds_text(lost_seconds(history)), beside) if ways else UNKNOWN
    steps = [pace.step for pace in history.paces]
    worlds = [generation.world for generation in made]
    sizes = len(set(worlds))
    budget = "" if history.max_restarts is None else f"of {count(history.max_restarts)}"
    figures = [
        ("Generations", count(len(made)), ""),
        ("Restarts", count(history.restarts), budget),
        ("Failures", count(history.failures), "reported by nodes"),
        ("Nodes", count(_nodes(history)), _span(history)),
        ("Workers", _sizes(worlds), plural(sizes, "size") if sizes > 4 else ""),
        ("Last step", *((count(max(steps)), "") if steps else UNKNOWN)),
        ("Last checkpoint", *_step(history.saved)),
        ("Last snapshot", *_last_snapshot(history)),
        ("Steps redone", *(UNKNOWN if stepless else (count(redone), ""))),
        ("Time lost", *lost),
    ]
    return element("dl", *(_figure(*one) for one in figures), class_="figures")


def _figure(name: str, value: str, more: str) -> Markup:
    words = joined(value, element("small", more)) if more else joined(value)
    wide = "small" if len(value) > LONG else None
    return element("div", element("dt", name), element("dd", words, class_=wide))


def _step(step: int | None) -> tuple[str, str]:
    return UNKNOWN if step is None else (f"step {count(step)}", "")


def _last_snapshot(history: History) -> tuple[str, str]:
    """It is in the memory of agents, and where these were killed it went with them."""
    newer = history.snapshot is not None and history.snapshot > (history.saved or 0)
    if history.state is None and newer:
        return _step(history.snapshot)[0], LOST_SNAPSHOT
    return _step(history.snapshot)


def _nodes(history: History) -> int:
    """Machines, or where several agents share one, agents; each launch has agents of its own."""
    at_a_time = max((generation.nodes for generation in history.generations), default=0)
    return max(at_a_time, len({node.host for node in history.nodes}))


def _span(history: History) -> str:
    """How many nodes there were at a time, where that is not all of them at all times."""
    values = {generation.nodes for generation in history.generations} or {len(history.nodes)}
    low, high = min(values), max(values)
    if low == high == len(history.nodes):
        return ""
    return f"{low} at a time" if low == high else f"{low} to {high} at a time"


def _sizes(worlds: list[int]) -> str:
    """The sizes that the job had, in order, where these are few."""
    found = [world for world, _ in itertools.groupby(worlds)]
    if len(found) > 6:
        return f"{count(min(found))} to {count(max(found))}"
    return " \u2192 ".join(map(count, found)) or "none"


def _footer(history: History) -> Markup:
    unread = ""
    if history.unread:
        unread = f"{plural(history.unread, 'line')} of its files could not be read. "
    return element(
        "footer",
        unread,
        "Times count from the run's first event. Goodput is the share of all time in which steps "
        "were made that count: neither waiting, stalled nor repeating. Point at a band or a sign "
        "for more.",
    )
