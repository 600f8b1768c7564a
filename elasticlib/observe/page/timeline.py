"""The run as small pictures above one axis of time: how many work, who, what is saved, how far.

Each lane gives its markup and its lower end, in pixels from the top.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..history import Generation, History, Mark
from .curves import foot, progress, strip
from .markup import Markup, cut, element
from .rows import Row, row_lane, rows, together
from .scale import Axis, Label, placed, time_ticks
from .signs import legend, place
from .strokes import box, left_words, level, upright, words_at
from .wording import count_text, plural, seconds_text

DEEPEST = 48
"""Rules of failures through all lanes, at most."""
DESCRIBED = 40
"""Generations in the words for who does not see it."""
Lane = tuple[list[Markup], float]


def timeline(history: History) -> Markup:
    """The figure, what its signs mean, and what was left out of it."""
    axis = Axis(0.0, max(history.until, 1e-9))
    shown, folded = rows(history)
    made = {generation.number: generation for generation in history.generations}
    lanes, down = _workers(history, axis)
    for row in shown:
        drawn, down = row_lane(row, made, history.until, axis, down)
        lanes += drawn
    if folded:
        drawn, down = _folded(folded, history, axis, down)
        lanes += drawn
    kept = _kept(history.marks)
    for kind, marks in kept.items():
        drawn, down = _kept_lane(kind, marks, axis, down)
        lanes += drawn
    drawn, down = _progress(history, axis, down)
    lanes += drawn
    words = f"Timeline of {plural(len(history.nodes), 'node')} and "
    words += f"{plural(len(history.generations), 'generation')} in {seconds_text(history.until)}"
    drawing = element(
        "svg",
        element("title", words),
        element("desc", _described(history)),
        *_faults(history, axis, down),
        *lanes,
        *foot(axis, time_ticks(axis.last), down),
        class_="drawing",
        role="img",
        height=down + 24,
    )
    signs = set(kept).union(*(row.signs for row in shown))
    return element("figure", drawing, _legend(signs, history), *_notes(history, len(folded)))


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
        words = count_text(generation.world)
        if not labels or labels[-1][0].words != words:
            labels.append((Label(span[0], words, "start"), base - tall - 4))
        told = _told(generation, history)
        hovers.append(box(span, top - 16, height + 16, "hover", told=told))
    heights = dict(labels)
    for label, rung in placed([label for label, _ in labels], 11):
        found.append(words_at(label, heights[label], f"value {rung}"))
    return [*found, level(base), *hovers], base + 6


def _told(generation: Generation, history: History) -> str:
    lasted = seconds_text(max(0.0, _end(generation, history) - generation.began))
    return (
        f"Generation {generation.number}: {plural(generation.world, 'worker')} on "
        f"{plural(generation.nodes, 'node')} for {lasted}, from {seconds_text(generation.began)}. "
        f"{cut(generation.cause, 300)}"
    )


def _folded(folded: Sequence[Row], history: History, axis: Axis, top: float) -> Lane:
    """How many of the nodes without a row of their own were in each generation."""
    names = {row.story.node for row in folded}
    here: dict[int, int] = {}
    for stay in history.stays:
        if stay.node in names:
            here[stay.generation] = here.get(stay.generation, 0) + 1
    most, base = max(here.values(), default=1), top + 54
    found = [left_words(f"{plural(len(folded), 'more node')}: how many were there", top + 14)]
    for generation in history.generations:
        many = here.get(generation.number, 0)
        tall = 30.0 * many / most
        told = f"generation {generation.number}: {count_text(many)} of them"
        found.append(box(_span(generation, history, axis), base - tall, tall, "area", told=told))
    return [*found, level(base)], base + 8


def _kept(marks: Iterable[Mark]) -> dict[str, list[Mark]]:
    """Checkpoints and snapshots by kind, each step once, though every node tells of it."""
    found: dict[str, dict[int, Mark]] = {"saved": {}, "snapshot": {}}
    for mark in marks:
        if mark.kind in found and mark.step is not None:
            found[mark.kind].setdefault(mark.step, mark)
    return {kind: list(steps.values()) for kind, steps in found.items() if steps}


def _kept_lane(kind: str, marks: Sequence[Mark], axis: Axis, top: float) -> Lane:
    name = {"saved": "Checkpoints", "snapshot": "Snapshots in memory"}[kind]
    found = [left_words(f"{name}: {count_text(len(marks))}", top + 14)]
    for group in together(marks, lambda mark: axis(mark.at)):
        steps = [count_text(mark.step or 0) for mark in group]
        told = f"step {steps[0]}" if len(group) == 1 else f"steps {steps[0]} to {steps[-1]}"
        told += f", at {seconds_text(group[0].at)}"
        found.append(place(kind, axis(group[0].at), top + 27, told))
    return found, top + 40


def _progress(history: History, axis: Axis, top: float) -> Lane:
    course = progress(history)
    if not course.values:
        return [], top
    height = 110.0
    head = left_words("Steps done", top + 14)
    return [head, *strip(course, axis, top + 32, height)], top + 32 + height


def _faults(history: History, axis: Axis, down: float) -> list[Markup]:
    """A rule through all lanes where something failed, as long as they can be told apart."""
    moments = [mark.at for mark in history.marks if mark.kind == "failure"]
    if len(moments) > DEEPEST:
        return []
    return [upright(axis(at), 34, down, "fault") for at in moments]


def _legend(signs: set[str], history: History) -> Markup:
    def bar(classes: str, words: str) -> Markup:
        shape = element("rect", x=0.5, y=2, width=17, height=9, class_=classes)
        about = {"class_": "sign", "width": 18, "height": 13, "aria_hidden": "true"}
        return element("li", element("svg", shape, **about), words)

    told = any(generation.trained is not None for generation in history.generations)
    works = "training; the number is the generation" if told else "working, by generation"
    bars = [bar("band-a", works), *([bar("starting", "starting")] if told else [])]
    return legend(sorted(signs), *bars)


def _notes(history: History, folded: int) -> list[Markup]:
    said = []
    if folded:
        said.append(
            f"{count_text(folded)} nodes share one row: those with the most to tell have their own."
        )
    if len(history.generations) > DESCRIBED or len(history.marks) > DEEPEST:
        said.append(
            "What would lie on each other is drawn as one: signs of one kind, and generations too "
            "short to be seen."
        )
    return [element("p", " ".join(said), class_="soft")] if said else []
