"""What workers reported of their steps, as curves: one line a generation, so that repeated steps
lie beside the first ones, and a band for the gap between two.

The workers of a job go in step, so the node of the lowest rank speaks for all of them; samples are
summed over the nodes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import attrs

from ..history import Generation, History, Pace
from ..wording import count, plural, rate
from .drawing import (
    Axis,
    Label,
    box,
    curve,
    drawing,
    inward,
    left_words,
    level,
    placed,
    thinned,
    time_ticks,
    upright,
    value_ticks,
    words_at,
)
from .markup import Markup, cut, element, seconds_text

POINTS = 1200
"""Of one curve, at most."""
GAPS = 12
"""That are shaded and listed, at most."""
NARROWEST = 0.3
"""Per cent of the width, of a band, at least."""
CAUSE = 160
FEW = 60
"""Rates of a whole run."""
DECADES = 100.0
"""So many times the lowest is the highest value of a loss that is drawn by its logarithm."""

Points = list[tuple[float, float]]


@attrs.frozen
class Course:
    """One curve: name and what it is over; lines of points in order; left_out: points whose value
    is no finite number."""

    name: str
    lines: Sequence[Points]
    over: str = "time"
    left_out: Points = attrs.field(factory=list)

    @property
    def values(self) -> list[float]:
        return [y for line in self.lines for _, y in line]


def leading(history: History) -> dict[int, list[Pace]]:
    """By generation, the reports of the node of the lowest rank that made any."""
    place = {(stay.node, stay.generation): stay.node_rank for stay in history.stays}
    found: dict[int, dict[str, list[Pace]]] = {}
    for pace in history.paces:
        found.setdefault(pace.generation, {}).setdefault(pace.node, []).append(pace)
    return {
        generation: by_node[min(by_node, key=lambda n: place.get((n, generation), math.inf))]
        for generation, by_node in sorted(found.items())
    }


def progress(history: History) -> Course:
    """From the first step of each generation on, so that what was lost is a step down."""
    made = {generation.number: generation for generation in history.generations}
    lines = []
    for number, paces in leading(history).items():
        line = [(pace.at, float(pace.step)) for pace in paces]
        one = made.get(number)
        if one is not None and one.trained is not None and one.first_step is not None:
            line = [(one.trained, float(one.first_step)), *(p for p in line if p[0] > one.trained)]
        lines.append(line)
    return _course("Steps done", lines)


def step_rate(history: History) -> Course:
    """As reported; of a short run, which has few such reports, from the times of its losses."""
    every = leading(history).values()
    lines = [[(p.at, p.per_second) for p in paces if p.per_second is not None] for paces in every]
    if sum(map(len, lines)) < FEW:
        timed = [[p for p in paces if p.per_second is None] for paces in every]
        fine = [_rates(paces, history.until / FEW) for paces in timed]
        lines = [max(pair, key=len) for pair in zip(lines, fine, strict=True)]
    return _course("Steps per second", lines)


def _rates(paces: Sequence[Pace], apart: float) -> Points:
    """Of stretches of at least so many seconds."""
    found: Points = []
    last = paces[0] if paces else None
    for pace in paces:
        if last is not None and pace.at - last.at > apart and pace.step > last.step:
            found.append((pace.at, (pace.step - last.step) / (pace.at - last.at)))
            last = pace
    return found


def loss(history: History) -> Course:
    """Over steps. Of the node of the lowest rank that reports a loss."""
    telling = attrs.evolve(history, paces=tuple(p for p in history.paces if p.loss is not None))
    lines = [
        [(float(pace.step), pace.loss) for pace in paces if pace.loss is not None]
        for paces in leading(telling).values()
    ]
    return _course("Loss", lines, over="steps")


def sample_rate(history: History) -> Course:
    """Of all nodes: at each report of the leading one, what each reported last."""
    paces = [p for p in history.paces if p.samples_per_second is not None]
    leaders = leading(attrs.evolve(history, paces=tuple(paces)))
    speaks = {generation: paces[0].node for generation, paces in leaders.items()}
    last: dict[int, dict[str, float]] = {}
    lines: dict[int, Points] = {}
    for pace in sorted(paces, key=lambda p: (p.at, p.node == speaks[p.generation])):
        nodes = last.setdefault(pace.generation, {})
        nodes[pace.node] = pace.samples_per_second or 0.0
        if pace.node == speaks[pace.generation]:
            lines.setdefault(pace.generation, []).append((pace.at, sum(nodes.values())))
    return _course("Samples per second", list(lines.values()))


def _course(name: str, lines: Iterable[Points], over: str = "time") -> Course:
    """Without what is not finite, and thinned."""
    lines = list(lines)
    odd = [(x, y) for line in lines for x, y in line if not math.isfinite(y)]
    finite = [[point for point in line if math.isfinite(point[1])] for line in lines]
    full = [line for line in finite if line]
    total = sum(map(len, full))
    kept = [thinned(line, max(8, POINTS * len(line) // total)) for line in full]
    return Course(name, kept, over, odd)


@attrs.frozen
class Gap:
    """What a new generation did to the curves. time: in which no step was made; steps: those that
    were repeated, or if none was, the first one twice; words: what it cost, and why."""

    generation: Generation
    time: tuple[float, float]
    steps: tuple[float, float] | None
    words: str


def gaps(history: History) -> list[Gap]:
    """Between each two generations, in order; none where workers report no steps."""
    found: list[Gap] = []
    if all(made.trained is None for made in history.generations):
        return found
    for before, made in itertools.pairwise(history.generations):
        if before.ended is None:
            continue
        ended = history.until if made.ended is None else made.ended
        until = max(before.ended, ended if made.trained is None else made.trained)
        words = f"{seconds_text(until - before.ended)} without a step"
        steps, redone = None, made.cost.redone
        if made.first_step is not None:
            first = float(made.first_step)
            steps = (first, first + max(0, redone - 1))
        if redone:
            words += f", {plural(redone, 'step')} repeated"
        found.append(Gap(made, (before.ended, until), steps, f"{words}: {cut(made.cause, CAUSE)}"))
    return found


def longest(found: Sequence[Gap]) -> list[Gap]:
    """Those that are drawn and listed, in order."""
    chosen = sorted(found, key=lambda gap: gap.time[0] - gap.time[1])[:GAPS]
    return [gap for gap in found if any(gap is one for one in chosen)]


def _shaded(
    found: Sequence[Gap], over: str, axis: Axis, place: tuple[float, float]
) -> tuple[list[Markup], list[Label]]:
    """A band across the curve for each gap, and the numbers of their generations."""
    bands, numbers = [], []
    for gap in found:
        span = gap.time if over == "time" else gap.steps
        if span is not None:
            made, left = gap.generation, axis(span[0])
            right = max(axis(span[1]), left + NARROWEST)
            title = f"Generation {made.number} {made.why.phrase}, {gap.words}"
            bands.append(box((left, right), *place, f"gap gap-{made.why.value}", title=title))
            numbers.append(inward(Label((left + right) / 2, str(made.number)), 11))
    return bands, numbers


def strip(course: Course, history: History, axis: Axis, place: tuple[float, float]) -> list[Markup]:
    """The curve with its rules and numbers, in a lane of the timeline; from 0 up, if it can."""
    values = course.values
    low, high = min(values), max(values)
    up = Axis(0.0 if low > 0 else low, high if high > low else high + 1.0)
    bands, _ = _shaded(longest(gaps(history)), course.over, axis, place)
    return [*bands, *_drawn(course, axis, up, place, count)]


def _drawn(
    course: Course,
    axis: Axis,
    up: Axis,
    place: tuple[float, float],
    text: Callable[[float], str],
    *,
    power: bool = False,
) -> list[Markup]:
    top, height = place
    rules, numbers = [], []
    for value in value_ticks(up.first, up.last, 4):
        down = top + height * (1 - up.part(value))
        rules.append(level(down))
        words = text(10.0**value if power else value)
        numbers.append(left_words(words, down - 4, "value halo"))
    return [*rules, curve(course.lines, axis, up, place), *numbers]


def chart(course: Course, history: History) -> Markup:
    """A figure of its own; nothing where there is nothing to draw."""
    values = course.values
    if not values:
        # Of a loss that never was a number there is nothing to draw, and much to say.
        notes = _notes(course, history, power=False) if course.left_out else []
        return element("figure", element("h3", course.name), *notes) if notes else Markup("")
    power = course.name == "Loss" and min(values) > 0 and max(values) > DECADES * min(values)
    if power:
        lines = [[(x, math.log10(y)) for x, y in line] for line in course.lines]
        course = attrs.evolve(course, lines=lines)
    low, high = min(course.values), max(course.values)
    if low > 0 and not power and (course.over == "time" or low < high / 2):
        low = 0.0  # so that heights can be compared
    up = Axis(low, high if high > low else low + 1.0)
    axis, ticks = _across(course, history)
    found = longest(gaps(history))
    top, height = 30.0 if found else 16.0, 130.0
    parts, numbers = _shaded(found, course.over, axis, (top, height))
    parts += [words_at(label, 10, f"value {rung}") for label, rung in placed(numbers, 11)]
    parts += _drawn(course, axis, up, (top, height), rate, power=power)
    parts += foot(axis, ticks, top + height)
    first, last = rate(values[0]), rate(values[-1])
    title = f"{course.name} over {course.over}, from {first} to {last}"
    desc = f"lowest {rate(min(values))}, highest {rate(max(values))}"
    head = element("h3", course.name, " ", element("span", f"last {last}", class_="soft"))
    drawn = drawing(title, parts, top + height + 24, desc=desc)
    return element("figure", head, drawn, *_notes(course, history, power))


def _across(course: Course, history: History) -> tuple[Axis, list[tuple[float, str]]]:
    if course.over == "time":
        return Axis(0.0, max(history.until, 1e-9)), time_ticks(history.until, 4)
    steps = [x for line in course.lines for x, _ in line]
    axis = Axis(min(0.0, min(steps)), max(steps))
    return axis, [(at, f"{count(at)}") for at in value_ticks(axis.first, axis.last, 4)]


def foot(axis: Axis, ticks: list[tuple[float, str]], top: float) -> list[Markup]:
    """An axis: a rule, its marks and their words; 24 pixels high."""
    labels = [inward(Label(axis(at), words)) for at, words in ticks]
    marks = [upright(axis(at), top, top + 5) for at, _ in ticks]
    words = [words_at(label, top + 18, f"note {rung}") for label, rung in placed(labels)]
    return [level(top), *marks, *words]


def _notes(course: Course, history: History, power: bool) -> list[Markup]:
    said = []
    if course.over == "steps":
        said.append("Over steps.")
        if any(made.cost.redone for made in history.generations):
            said.append("Steps that were repeated have two lines.")
    if power:
        said.append("The scale is logarithmic.")
    if course.left_out:
        (at, value), many = course.left_out[0], len(course.left_out)
        where = seconds_text(at) if course.over == "time" else f"step {count(at)}"
        are = plural(many, "value is", "values are")
        said.append(f"{are} not finite, and left out; the first is {value} at {where}.")
    return [element("p", " ".join(said), class_="soft")] if said else []


def curve_section(history: History) -> Markup:
    """Loss and speed, as far as workers report them, and why they have gaps."""
    losses = chart(loss(history), history)
    speeds = (chart(course, history) for course in (step_rate(history), sample_rate(history)))
    figures = [figure for figure in (losses, *speeds) if figure]
    if not figures:
        return Markup("")
    parts = [*figures, *_why(gaps(history))]
    charts = element("div", *parts, class_="charts two" if len(parts) > 1 else "charts")
    return element("section", element("h2", "Loss and speed" if losses else "Speed"), charts)


def _why(found: Sequence[Gap]) -> list[Markup]:
    """The gaps in words."""
    if not found:
        return []
    said = "Bands have the number of the generation that begins there"
    if len(found) > GAPS:
        said += f"; the {GAPS} longest of {count(len(found))}"
    rows = [
        element(
            "li",
            element("b", str(gap.generation.number)),
            f" at {seconds_text(gap.time[0])}, {gap.words}",
        )
        for gap in longest(found)
    ]
    head = element("h3", "Interruptions")
    return [element("div", head, element("p", f"{said}:", class_="soft"), element("ul", *rows))]
