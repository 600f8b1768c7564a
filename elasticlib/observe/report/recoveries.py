"""What each way back to training cost, phase by phase, as bars on one scale.

Where they are many, the longest have bars, and all are summed up by phase.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from ..history import Generation, History, Why
from ..wording import count, median, plural
from .drawing import THINNEST, Label, box, inside, words_at
from .markup import Markup, element, escaped, seconds_text, short

PHASES = {
    "detect": "until an agent knew of it",
    "stop": "until no worker was left",
    "rendezvous": "until the next generation was settled",
    "start": "until the script asked for its state, made a step, or ended without one",
    "restore": "taking up the state",
    "redone": "steps done a second time",
}
BARS = 16
"""Recoveries with a bar of their own, at most."""
LEAST = 0.005
"""Seconds of an end, and between launches, that are worth a word."""
HEIGHT = 20.0


@attrs.frozen
class Recovery:
    """seconds: by phase, those that were told."""

    generation: Generation
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def recoveries(history: History) -> list[Recovery]:
    """Of the generations whose cost somebody told of, in order."""
    found = []
    for generation in history.generations:
        cost = generation.cost
        told = {
            "detect": cost.detect,
            "stop": cost.stop,
            "rendezvous": cost.rendezvous,
            "start": cost.start,
            "restore": cost.restore,
            "redone": cost.redone_seconds if cost.redone else None,
        }
        seconds = {name: max(0.0, value) for name, value in told.items() if value is not None}
        if seconds:
            found.append(Recovery(generation, seconds))
    return found


def lost_seconds(history: History) -> float:
    """All that was not spent on steps that count; where no steps are told, what is told of."""
    told = sum(one.total for one in recoveries(history))
    return told if history.lost is None else max(told, history.lost)


def recovery_section(history: History) -> Markup:
    """All of it; nothing where nothing is known."""
    every = recoveries(history)
    if not every:
        return Markup("")
    longest = sorted(every, key=lambda one: -one.total)[:BARS]
    shown = [one for one in every if any(one is other for other in longest)]
    widest = max(one.total for one in shown) or 1.0
    told, total = sum(one.total for one in every), lost_seconds(history)
    after = [one for one in every if one.generation.why is not Why.START]
    said = f"{seconds_text(total)} were not spent on steps that count: "
    said += f"{plural(len(every) - len(after), 'start')} and "
    said += f"{plural(len(after), 'recovery', 'recoveries')}"
    if total - told > LEAST:
        said += f"; {seconds_text(total - told)} of that belong to neither"
    said += "."
    if len(shown) < len(every):
        rest = told - sum(one.total for one in shown)
        said += f" The {len(shown)} longest are drawn; the other {count(len(every) - len(shown))}"
        said += f" took {seconds_text(rest)}, and are in the table."
    return element(
        "section",
        element("h2", "Recoveries"),
        element("p", said, class_="soft"),
        _table(every),
        element("ol", *(_bar(one, widest) for one in shown), class_="recoveries"),
    )


def _table(every: Sequence[Recovery]) -> Markup:
    head = [
        element("th", "Phase"),
        element("th", "Sum", class_="number"),
        element("th", "Median", class_="number"),
        element("th", "Longest", class_="number"),
        element("th", "It lasts", class_="wide"),
    ]
    rows = []
    for name, means in PHASES.items():
        values = [one.seconds[name] for one in every if name in one.seconds]
        if not values:
            continue
        numbers = (sum(values), median(values), max(values))
        cells = [element("td", seconds_text(value), class_="number") for value in numbers]
        words = element("td", _swatch(name), name, class_="when")
        rows.append(element("tr", words, *cells, element("td", means, class_="wide soft")))
    return element(
        "table", element("thead", element("tr", *head)), element("tbody", *rows), class_="narrow"
    )


def _swatch(name: str) -> Markup:
    shape = element("rect", x=1, y=1, width=10, height=10, class_=f"p-{name}")
    return element("svg", shape, class_="sign", width=12, height=12, aria_hidden="true")


def _bar(one: Recovery, widest: float) -> Markup:
    generation = one.generation
    title = f"Generation {generation.number}, {generation.why.words}"
    told = {name: _told(one, name) for name in one.seconds}
    parts, at = [], 0.0
    for name, seconds in one.seconds.items():
        wide = seconds / widest * 100
        if wide < THINNEST:
            continue
        words = f"{name} {told[name]}"
        parts.append(box((at, at + wide), 0, HEIGHT, f"phase p-{name}", told=words))
        rung = inside(wide, name, 11)
        if rung is not None:
            parts.append(words_at(Label(at + wide / 2, name), 14, f"on-phase {rung}"))
        at += wide
    drawing = element(
        "svg",
        element("title", f"{title}: {seconds_text(one.total)}"),
        element("desc", ", ".join(f"{name} {words}" for name, words in told.items())),
        *parts,
        class_="drawing",
        role="img",
        height=HEIGHT,
    )
    listed = [element("li", _swatch(name), f"{name} {words}") for name, words in told.items()]
    cause = element("span", short(generation.cause, 160), class_="soft")
    head = element(
        "div",
        element("span", element("b", title), escaped(" "), cause),
        element("b", seconds_text(one.total)),
        class_="head",
    )
    return element("li", head, drawing, element("ul", *listed, class_="phases"))


def _told(one: Recovery, name: str) -> str:
    words = seconds_text(one.seconds[name])
    if name != "redone":
        return words
    return f"{plural(one.generation.cost.redone, 'step')}, {words}"
