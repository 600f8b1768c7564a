"""What each way back to training cost, phase by phase, as bars on one scale.

Where they are many, the longest have bars, and all are summed up by phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ..history import PHASES, Generation, GenerationTrigger, History
from ..wording import STEPLESS, count, plural
from .drawing import THINNEST, Label, box, drawing, inside, swatch, words_at
from .markup import Markup, element, joined, seconds_text, short
from .tables import table

BARS = 16
"""Recoveries with a bar of their own, at most."""
LEAST = 0.005
"""Seconds of an end, and between launches, that are worth a word."""
HEIGHT = 20.0


def recoveries(history: History) -> list[Generation]:
    """The generations whose cost is known, at least in part."""
    return [made for made in history.generations if made.cost.phases]


def lost_seconds(history: History) -> float:
    """All that was not spent on steps that count; if workers report none, what is known of it."""
    known = sum(made.cost.seconds for made in history.generations)
    return known if history.lost is None else max(known, history.lost)


def recovery_section(history: History) -> Markup:
    """All of it; nothing where nothing is known."""
    every = recoveries(history)
    if not every:
        return Markup("")
    longest = sorted(every, key=lambda made: -made.cost.seconds)[:BARS]
    shown = [made for made in every if any(made is one for one in longest)]
    widest = max(made.cost.seconds for made in shown) or 1.0
    known, total = sum(made.cost.seconds for made in every), lost_seconds(history)
    starts = sum(made.why is GenerationTrigger.START for made in every)
    said = f"{seconds_text(total)} did not go into steps that count: "
    said += f"{plural(starts, 'start')} and "
    said += plural(len(every) - starts, "recovery", "recoveries")
    stalled = sum(made.cost.stalled or 0.0 for made in every)
    said += f", with {seconds_text(stalled)} stalled" if stalled else ""
    if total - known > LEAST:
        said += f"; {seconds_text(total - known)} of it belongs to neither"
    said += f"; {STEPLESS}" if history.goodput is None else ""
    said += "."
    if len(shown) < len(every):
        rest = seconds_text(known - sum(made.cost.seconds for made in shown))
        said += f" The {BARS} longest are drawn; the other {count(len(every) - BARS)} took {rest},"
        said += " and are in the table."
    return element(
        "section",
        element("h2", "Recoveries"),
        element("p", said, class_="soft"),
        table(("Phase", "Sum", "Median", "Longest", "Lasts"), _sums(every), cards=False),
        element("ol", *(_bar(made, widest) for made in shown), class_="recoveries"),
    )


def _sums(every: Sequence[Generation]) -> list[list[tuple[str, str]]]:
    rows = []
    for name, means in PHASES.items():
        values = [made.cost.phases[name] for made in every if name in made.cost.phases]
        if values:
            numbers = (sum(values), median(values), max(values))
            cells = [("number", seconds_text(value)) for value in numbers]
            lasts = ("wide", element("span", means, class_="soft"))
            rows.append([("when", joined(swatch(f"p-{name}"), name)), *cells, lasts])
    return rows


def _bar(made: Generation, widest: float) -> Markup:
    phases = made.cost.phases
    words = {name: f"{name} {seconds_text(seconds)}" for name, seconds in phases.items()}
    if "redone" in words:
        redone = plural(made.cost.redone, "step")
        words["redone"] = f"redone {redone}, {seconds_text(phases['redone'])}"
    parts, at = [], 0.0
    for name, seconds in phases.items():
        wide = seconds / widest * 100
        if wide < THINNEST:
            continue
        parts.append(box((at, at + wide), 0, HEIGHT, f"phase p-{name}", title=words[name]))
        rung = inside(wide, name, 11)
        if rung is not None:
            parts.append(words_at(Label(at + wide / 2, name), 14, f"on-phase {rung}"))
        at += wide
    title, total = f"Generation {made.number}, {made.why.phrase}", seconds_text(made.cost.seconds)
    cause = element("span", short(made.cause, 160), class_="soft")
    head = element("span", element("b", title), " ", cause)
    return element(
        "li",
        element("div", head, element("b", total), class_="head"),
        drawing(f"{title}: {total}", parts, HEIGHT, desc=", ".join(words.values())),
        element(
            "ul",
            *(element("li", swatch(f"p-{name}"), words[name]) for name in phases),
            class_="phases",
        ),
    )
