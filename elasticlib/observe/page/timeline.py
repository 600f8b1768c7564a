"""The run as small pictures above one axis of time: how many work, who, what is saved, how far.

Each lane is a drawing of its own with its own words, so that a printer can break between them, and
all have the same width, so that they are one picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..history import Generation, History, Mark
from ..wording import count, plural
from .curves import foot, progress, strip
from .lane import Lane, drawn
from .markup import Markup, cut, element, seconds_text
from .rows import MANY, Row, row_lane, rows, together
from .scale import Axis, Label, placed, time_ticks
from .signs import legend, place
from .strokes import box, left_words, level, words_at

DEEPEST = 48
"""Rules of failures through all lanes, at most."""
DESCRIBED = 40
"""Generations in the words for who does not see it."""
KEPT_APART = 2.6
"""Per cent of the width between two checkpoints, below which they are one sign."""
KEPT = {"saved": "Checkpoints", "snapshot": "Snapshots in memory"}


def timeline(history: History) -> Markup:
    """The figure, what its signs mean, and what was left out of it."""
    axis = Axis(0.0, max(history.until, 1e-9))
    shown, folded = rows(history)
    lanes = [_workers(history, axis)]
    lanes += [row_lane(row, history, axis) for row in shown]
    if folded:
        lanes.append(_folded(folded, history, axis))
    kept = _kept(history.marks)
    lanes += [_kept_lane(kind, marks, history, axis) for kind, marks in kept.items()]
    lanes += _progress(history, axis)
    lanes.append(Lane("Time", foot(axis, time_ticks(axis.last), 0.5), 24.5, rules=None))
    faults = _faults(history, axis)
    signs = set(kept).union(*(row.signs for row in shown))
    words = _legend(signs, history)
    return element(
        "figure",
        *(drawn(lane, faults) for lane in lanes),
        words,
        *_notes(history, len(folded)),
        class_="timeline",
    )


def _described(history: History) -> str:
    told = [
        f"generation {g.number} from {seconds_text(g.began)}: {plural(g.world, 'worker')}, "
        f"{g.why.value}"
        for g in history.generations[:DESCRIBED]
    ]
    more = len(history.generations) - DESCRIBED
    return "; ".join(told) + (f"; and {more} more" if more > 0 else "")


def _span(generation: Generation, history: History, axis: Axis) -> tuple[float, float]:
    return axis(generation.began), axis(_end(generation, history))


def _end(generation: Generation, history: History) -> float:
    return history.until if generation.ended is None else generation.ended


def _workers(history: History, axis: Axis) -> Lane:
    """How many workers there were, as steps; hovering tells each generation."""
    top, height = 34.0, 40.0
    base = top + height
    most = max((g.world for g in history.generations), default=0) or 1
    found, hovers = [left_words("Workers", 12)], []
    labels: list[tuple[Label, float]] = []
    for generation in history.generations:
        span = _span(generation, history, axis)
        tall = height * generation.world / most
        found.append(box(span, base - tall, tall, "area"))
        found.append(box(span, base - tall, 2.0, "band-a"))
        words = count(generation.world)
        if not labels or labels[-1][0].words != words:
            labels.append((Label(span[0], words, "start"), base - tall - 4))
        told = _told(generation, history)
        hovers.append(box(span, top - 16, height + 16, "hover", told=told))
    heights = dict(labels)
    for label, rung in placed([label for label, _ in labels], 11):
        found.append(words_at(label, heights[label], f"value halo {rung}"))
    words = f"Timeline of {plural(len(history.nodes), 'node')} and "
    words += f"{plural(len(history.generations), 'generation')} in {seconds_text(history.until)}"
    parts = [*found, level(base), *hovers]
    return Lane(words, parts, base + 6, told=_described(history), rules=top)


def _told(generation: Generation, history: History) -> str:
    lasted = seconds_text(max(0.0, _end(generation, history) - generation.began))
    return (
        f"Generation {generation.number}: {plural(generation.world, 'worker')} on "
        f"{plural(generation.nodes, 'node')} for {lasted}, from {seconds_text(generation.began)}. "
        f"{cut(generation.cause, 300)}"
    )


def _folded(folded: Sequence[Row], history: History, axis: Axis) -> Lane:
    """How many of the nodes without a row of their own were in each generation."""
    names = {row.story.node for row in folded}
    here: dict[int, int] = {}
    for stay in history.stays:
        if stay.node in names:
            here[stay.generation] = here.get(stay.generation, 0) + 1
    most, base = max(here.values(), default=1), 54.0
    words = f"{plural(len(folded), 'more node')}: how many were there"
    found = [left_words(words, 14)]
    for generation in history.generations:
        many = here.get(generation.number, 0)
        tall = 30.0 * many / most
        told = f"generation {generation.number}: {count(many)} of them"
        found.append(box(_span(generation, history, axis), base - tall, tall, "area", told=told))
    return Lane(words, [*found, level(base)], base + 8)


def _kept(marks: Iterable[Mark]) -> dict[str, list[Mark]]:
    """Checkpoints and snapshots by kind, each step once, though every node tells of it."""
    found: dict[str, dict[int, Mark]] = {kind: {} for kind in KEPT}
    for mark in marks:
        if mark.kind in found and mark.step is not None:
            found[mark.kind].setdefault(mark.step, mark)
    return {kind: list(steps.values()) for kind, steps in found.items() if steps}


def _kept_lane(kind: str, marks: Sequence[Mark], history: History, axis: Axis) -> Lane:
    many = max(len(marks), history.kept.get(kind, 0))
    words = f"{KEPT[kind]}: {count(many)}"
    found = [left_words(words, 14)]
    for group in together(marks, lambda mark: axis(mark.at), KEPT_APART):
        steps = [count(mark.step or 0) for mark in group]
        told = f"step {steps[0]}" if len(group) == 1 else f"steps {steps[0]} to {steps[-1]}"
        told += f", at {seconds_text(group[0].at)}"
        found.append(place(kind, axis(group[0].at), 27, told))
    return Lane(words, found, 40.0)


def _progress(history: History, axis: Axis) -> list[Lane]:
    course = progress(history)
    if not course.values:
        return []
    top, height = 32.0, 110.0
    words = f"Steps done: {count(course.lines[-1][-1][1])} at last"
    parts = [left_words(words, 14), *strip(course, axis, top, height)]
    return [Lane(words, parts, top + height)]


def _faults(history: History, axis: Axis) -> list[float]:
    """Where a rule goes through all lanes, as something failed there."""
    moments = [axis(mark.at) for mark in history.marks if mark.kind == "failure"]
    return moments if len(moments) <= DEEPEST else []


def _legend(signs: set[str], history: History) -> Markup:
    def bar(words: str, *classes: str) -> Markup:
        shapes = [
            element("rect", x=0.5 + at * 10, y=2, width=20 / len(classes) - 1, height=9, class_=one)
            for at, one in enumerate(classes)
        ]
        about = {"class_": "sign", "width": 20, "height": 13, "aria_hidden": "true"}
        return element("li", element("svg", *shapes, **about), words)

    if not history.generations:
        return legend(sorted(signs))
    told = any(generation.trained is not None for generation in history.generations)
    works = "training" if told else "working"
    if len(history.generations) > MANY:
        bars = [bar(works, "band-b")]
    else:
        bars = [bar(f"{works}, with the generation's number", "band-a", "band-b")]
        bars += [bar("starting", "starting")] if told else []
    return legend(sorted(signs), *bars)


def _notes(history: History, folded: int) -> list[Markup]:
    said = []
    if folded:
        said.append(
            f"{count(folded)} nodes share one row: those with the most to tell have their own."
        )
    if len(history.generations) > MANY or len(history.marks) > DEEPEST:
        said.append(
            "What would lie on each other is drawn as one: signs of one kind, and generations too "
            "short to be seen."
        )
    if history.left_out:
        said.append(
            f"{count(history.left_out)} marks or steps' lines were left out as events were "
            "read: there are so many that evenly spread ones stand for them."
        )
    return [element("p", " ".join(said), class_="soft")] if said else []
