"""The run as small pictures above one axis of time: how many work, who, what is saved, how far.

Each lane is a drawing of its own with its own words, so that a printer can break between them, and
all have the same width, so that they are one picture. A node has a row of its own, or where nodes
are many, the most eventful ones have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from ..event import Mark
from ..history import Generation, History, JobState, NodeStory, Stay
from ..wording import count, plural, spans
from .curves import foot, progress, strip
from .drawing import (
    SIGNS,
    Axis,
    Label,
    box,
    drawing,
    inside,
    left_words,
    level,
    picture,
    place,
    placed,
    swatch,
    time_ticks,
    upright,
    words_at,
)
from .markup import Markup, cut, element, seconds_text, short

ROWS = 24
BANDS = 3000
"""Of all rows together, at most, generations x rows."""
FEWEST = 6
NARROWEST = 0.25
"""Per cent of the width below which bands of generations melt into one."""
APART = 1.6
"""Per cent of the width between two signs of one kind, below which they are one."""
KEPT_APART = 2.6
"""The same between two checkpoints."""
SHORT = 17
"""Characters of a node's name on a narrow page."""
BAND = 14.0
SIGN = 18.0
"""Pixels of a band that signs at its ends may cover."""
MOST_SPANS = 6
MANY = 60
"""Generations, above which rows do not tell them apart."""
DEEPEST = 48
"""Rules of failures through all lanes, at most."""
DESCRIBED = 40
"""Generations in the words for people who do not see it."""
KEPT = {"saved": "Checkpoints", "snapshot": "Snapshots in memory"}
IN_ROWS = ("failure", "drain.asked", "lost")
ENDS = {
    JobState.SUCCEEDED: "succeeded",
    JobState.FAILED: "failed",
    JobState.DRAINED: "drained",
    JobState.STOPPED: "stopped",
}


@attrs.frozen
class Lane:
    """parts: what is drawn; height: in pixels. title, desc: for people who do not see it. rules:
    from where down rules of failures go through it, None for none."""

    title: str
    parts: Sequence[Markup]
    height: float
    desc: str = ""
    rules: float | None = 0.0

    def drawn(self, faults: Sequence[float]) -> Markup:
        """With a rule behind it at each of these per cent."""
        top = self.rules
        marked = [] if top is None else [upright(x, top, self.height, "fault") for x in faults]
        return drawing(self.title, [*marked, *self.parts], self.height, desc=self.desc)


def timeline(history: History) -> Markup:
    """The figure, what its signs mean, and what was left out of it."""
    axis = Axis(0.0, max(history.until, 1e-9))
    shown, folded = rows(history)
    kept = _kept(history.marks)
    lanes = [
        _workers(history, axis),
        *(row_lane(row, history, axis) for row in shown),
        *([_folded(folded, history, axis)] if folded else []),
        *(_kept_lane(kind, marks, history, axis) for kind, marks in kept.items()),
        *_progress(history, axis),
        Lane("Time", foot(axis, time_ticks(axis.last), 0.5), 24.5, rules=None),
    ]
    faults = [axis(mark.at) for mark in history.marks if mark.kind == "failure"]
    faults = faults if len(faults) <= DEEPEST else []
    signs = set(kept).union(*(row.signs for row in shown))
    return element(
        "figure",
        *(lane.drawn(faults) for lane in lanes),
        _legend(signs, history),
        *_notes(history, len(folded)),
        class_="timeline",
    )


def _workers(history: History, axis: Axis) -> Lane:
    """How many workers there were, as steps; hovering tells of each generation."""
    top, height, made = 34.0, 40.0, history.generations
    base = top + height
    most = max((generation.world for generation in made), default=0) or 1
    parts, hovers = [left_words("Workers", 12)], []
    labels: dict[Label, float] = {}
    words = ""
    for one in made:
        span = _span(one, history, axis)
        tall = height * one.world / most
        parts += [box(span, base - tall, tall, "area"), box(span, base - tall, 2.0, "band-a")]
        if words != count(one.world):
            words = count(one.world)
            labels[Label(span[0], words, "start")] = base - tall - 4
        title = f"Generation {one.number}: {plural(one.world, 'worker')} on "
        title += f"{plural(one.nodes, 'node')} for {_lasted(one.began, one.ended, history)}, from "
        title += f"{seconds_text(one.began)}. {cut(one.cause, 300)}"
        hovers.append(box(span, top - 16, height + 16, "hover", title=title))
    for label, rung in placed(labels, 11):
        parts.append(words_at(label, labels[label], f"value halo {rung}"))
    title = f"Timeline of {plural(len(history.nodes), 'node')} and "
    title += f"{plural(len(made), 'generation')} in {seconds_text(history.until)}"
    return Lane(title, [*parts, level(base), *hovers], base + 6, _described(made), rules=top)


def _described(generations: Sequence[Generation]) -> str:
    words = [
        f"generation {one.number} from {seconds_text(one.began)}: {plural(one.world, 'worker')}, "
        f"{one.why.value}"
        for one in generations[:DESCRIBED]
    ]
    more = len(generations) - DESCRIBED
    return "; ".join(words) + (f"; and {more} more" if more > 0 else "")


def _span(one: Generation | Stay, history: History, axis: Axis) -> tuple[float, float]:
    return axis(one.began), axis(history.until if one.ended is None else one.ended)


def _lasted(began: float, ended: float | None, history: History) -> str:
    return seconds_text(max(0.0, (history.until if ended is None else ended) - began))


# -- a node's row ----------------------------------------------------------------------------------


@attrs.frozen
class Row:
    """A node with what is drawn of it."""

    story: NodeStory
    stays: tuple[Stay, ...]
    marks: tuple[Mark, ...]

    @property
    def gone(self) -> float | None:
        """When the others went on without it, if it left without a word."""
        if not self.story.lost:
            return None
        ends = (stay.ended for stay in self.stays if stay.ended is not None)
        return max([self.story.seen, *ends])

    @property
    def signs(self) -> set[str]:
        """The names of its signs."""
        found = {mark.kind for mark in self.marks}
        if self.story.end is not None:
            found.add(self.story.end.state.value)
        return found | ({"vanished"} if self.gone is not None else set())

    @property
    def weight(self) -> int:
        """How eventful it is."""
        end = self.story.end
        ended = end is None or end.state is not JobState.SUCCEEDED
        failures = sum(mark.kind == "failure" for mark in self.marks)
        return 4 * (self.gone is not None) + 3 * failures + 2 * len(self.marks) + ended


def rows(history: History) -> tuple[list[Row], list[Row]]:
    """Those to draw, in the order of the history, and those that are folded."""
    stays: dict[str, list[Stay]] = {}
    for stay in history.stays:
        stays.setdefault(stay.node, []).append(stay)
    marks: dict[str, list[Mark]] = {}
    for mark in history.marks:
        if mark.kind in IN_ROWS:
            marks.setdefault(mark.node, []).append(mark)
    every = [
        Row(story, tuple(stays.get(story.node, ())), tuple(marks.get(story.node, ())))
        for story in history.nodes
    ]
    most = max(FEWEST, min(ROWS, BANDS // max(1, len(history.generations))))
    if len(every) <= most + 1:
        return every, []
    chosen = set(sorted(range(len(every)), key=lambda at: (-every[at].weight, at))[:most])
    drawn = [row for at, row in enumerate(every) if at in chosen]
    return drawn, [row for at, row in enumerate(every) if at not in chosen]


def row_lane(row: Row, history: History, axis: Axis) -> Lane:
    """A line of words, and below it the node's time."""
    story, middle = row.story, 30.0
    name = story.host or story.node
    title = f"{name} ({story.node}), {plural(story.slots, 'worker')}"
    if story.folder:
        title += f", logs in {story.folder}"
    ended = history.until if story.end is None else story.end.at
    if row.gone is not None:
        ended = row.gone
    elif story.end is None and history.over:
        ended = story.seen
    end = _end(row, history.over)
    why = "" if story.end is None else f"{story.end.reason} (exit code {story.end.exit_code})"
    parts = [
        *_names(name, title),
        words_at(Label(100.0, end, "end"), 14, "note halo", title=cut(why, 300)),
        level(middle, "life", span=(axis(story.began), axis(ended))),
    ]
    if row.gone is not None:
        parts.append(level(middle, "lost", span=(axis(row.gone), axis(history.until))))
    parts += [*_bands(row.stays, history, axis, middle), *_signs(row, axis, middle)]
    failures = max(story.failures, sum(mark.kind == "failure" for mark in row.marks))
    failed = f"{plural(failures, 'failure')}, " if failures else ""
    stays = plural(len(row.stays), "generation")
    return Lane(f"{name}: {stays}, {failed}{end or 'running'}", parts, 44.0)


def _names(name: str, title: str) -> list[Markup]:
    """The node's name, or as much of it as there is room for beside its end."""
    if len(name) <= SHORT:
        return [left_words(name, 14, title=title)]
    narrow = left_words(short(name, SHORT), 14, "halo n0", title=title)
    return [narrow, left_words(short(name, 3 * SHORT), 14, "halo w1", title=title)]


def _end(row: Row, over: bool) -> str:
    """over: whether the job is."""
    if row.gone is not None:
        return f"lost at {seconds_text(row.gone)}"
    end = row.story.end
    if end is None:
        return "its end is not known" if over else ""
    return f"{ENDS.get(end.state, '')} at {seconds_text(end.at)}"


def _bands(stays: Sequence[Stay], history: History, axis: Axis, middle: float) -> list[Markup]:
    made = {generation.number: generation for generation in history.generations}
    many, top = len(made) > MANY, middle - BAND / 2
    found = []
    for group in _melted(stays, history, axis):
        first = group[0]
        left, right = axis(first.began), _span(group[-1], history, axis)[1]
        shade = "b" if many or first.generation % 2 == 0 else "a"
        title = _stays(group, made, history)
        trained = _trained(first, made)
        if len(group) == 1 and (trained is None or axis(trained) - left > NARROWEST):
            found.append(box((left, right), top, BAND, "starting", title=title))
            left = right if trained is None else axis(trained)
        if right > left:
            found.append(box((left, right), top, BAND, f"band-{shade}", title=title))
        label = Label((left + right) / 2, str(first.generation))
        rung = None if many or len(group) > 1 else inside(right - left, label.words, room=SIGN)
        if rung is not None:
            found.append(words_at(label, middle + 4, f"on-{shade} {rung}"))
    return found


def _trained(stay: Stay, made: Mapping[int, Generation]) -> float | None:
    """When training began in this stay: at once, where workers report no steps."""
    generation = made.get(stay.generation)
    if generation is None or all(one.trained is None for one in made.values()):
        return stay.began
    return generation.trained


def _melted(stays: Iterable[Stay], history: History, axis: Axis) -> list[list[Stay]]:
    """Stays one by one; those too narrow to be seen together with their neighbours; and where
    generations are many, all that only gaps too narrow part."""
    many = len(history.generations) > MANY
    groups: list[list[Stay]] = []
    narrow, before = False, 0.0
    for stay in stays:
        left, right = _span(stay, history, axis)
        thin = right - left < NARROWEST
        near = many and left - before < NARROWEST
        if groups and (near or (thin and narrow and right - axis(groups[-1][0].began) < 1)):
            groups[-1].append(stay)
        else:
            groups.append([stay])
        narrow, before = thin, right
    return groups


def _stays(group: Sequence[Stay], made: Mapping[int, Generation], history: History) -> str:
    first = group[0]
    numbers = spans((stay.generation for stay in group), MOST_SPANS)
    lasted = _lasted(first.began, group[-1].ended, history)
    if len(group) > 1:
        return f"generations {numbers}, {lasted} in all"
    # Not counted one by one: a file may name any number of them.
    low, high = first.ranks
    ranks = f"rank {low}" if low == high else f"ranks {low}-{high}"
    words = f"generation {numbers}: node {first.node_rank}, {ranks}, {lasted}"
    generation = made.get(first.generation)
    return words if generation is None else f"{words}; {cut(generation.cause, 120)}"


def _signs(row: Row, axis: Axis, middle: float) -> list[Markup]:
    found = []
    for kind in sorted({mark.kind for mark in row.marks}):
        marks = [mark for mark in row.marks if mark.kind == kind]
        for group in together(marks, lambda mark: axis(mark.at), APART):
            first = group[0]
            rank = "" if first.rank is None else f", rank {first.rank}"
            title = (
                f"{SIGNS[kind].means} at {seconds_text(first.at)}{rank}: {cut(first.words, 300)}"
            )
            title += f" (and {count(len(group) - 1)} more)" if len(group) > 1 else ""
            found.append(place(kind, axis(first.at), middle, title))
    end = row.story.end
    if end is not None:
        title = f"{_end(row, over=True)}: {cut(end.reason, 300)}"
        found.append(place(end.state.value, axis(end.at), middle, title))
    if row.gone is not None:
        title = f"last heard from at {seconds_text(row.gone)}"
        found.append(place("vanished", axis(row.gone), middle, title))
    return found


def together(
    marks: Iterable[Mark], where: Callable[[Mark], float], apart: float
) -> list[list[Mark]]:
    """Marks in order, those that would lie on each other in one group."""
    groups: list[list[Mark]] = []
    for mark in marks:
        if groups and where(mark) - where(groups[-1][0]) < apart:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    return groups


# -- the other lanes -------------------------------------------------------------------------------


def _folded(folded: Sequence[Row], history: History, axis: Axis) -> Lane:
    """How many of the nodes without a row of their own were in each generation."""
    names = {row.story.node for row in folded}
    present: dict[int, int] = {}
    for stay in history.stays:
        if stay.node in names:
            present[stay.generation] = present.get(stay.generation, 0) + 1
    most, base = max(present.values(), default=1), 54.0
    words = f"{plural(len(folded), 'more node')}: how many were in the job"
    parts = [left_words(words, 14)]
    for generation in history.generations:
        many = present.get(generation.number, 0)
        tall = 30.0 * many / most
        title = f"generation {generation.number}: {count(many)} of them"
        parts.append(box(_span(generation, history, axis), base - tall, tall, "area", title=title))
    return Lane(words, [*parts, level(base)], base + 8)


def _kept(marks: Iterable[Mark]) -> dict[str, list[Mark]]:
    """Checkpoints and snapshots by kind, each step once, though every node reports it."""
    found: dict[str, dict[int, Mark]] = {kind: {} for kind in KEPT}
    for mark in marks:
        if mark.kind in found and mark.step is not None:
            found[mark.kind].setdefault(mark.step, mark)
    return {kind: list(steps.values()) for kind, steps in found.items() if steps}


def _kept_lane(kind: str, marks: Sequence[Mark], history: History, axis: Axis) -> Lane:
    words = f"{KEPT[kind]}: {count(history.kept.get(kind, len(marks)))}"
    parts = [left_words(words, 14)]
    for group in together(marks, lambda mark: axis(mark.at), KEPT_APART):
        steps = [count(mark.step or 0) for mark in group]
        title = f"step {steps[0]}" if len(group) == 1 else f"steps {steps[0]} to {steps[-1]}"
        title += f", at {seconds_text(group[0].at)}"
        parts.append(place(kind, axis(group[0].at), 27, title))
    return Lane(words, parts, 40.0)


def _progress(history: History, axis: Axis) -> list[Lane]:
    course = progress(history)
    if not course.values:
        return []
    top, height = 32.0, 110.0
    words = f"Steps done: {count(course.lines[-1][-1][1])}"
    parts = [left_words(words, 14), *strip(course, history, axis, (top, height))]
    return [Lane(words, parts, top + height)]


def _legend(signs: set[str], history: History) -> Markup:
    """What the bands and those signs mean that are in a drawing."""
    meanings = []
    trains = any(generation.trained is not None for generation in history.generations)
    works = "training" if trains else "working"
    if len(history.generations) > MANY:
        meanings.append((swatch("band-b", width=18), works))
    elif history.generations:
        bands = swatch("band-a", "band-b", width=18)
        meanings.append((bands, f"{works}, with the generation's number"))
        if trains:
            meanings.append((swatch("starting", width=18), "starting"))
    meanings += [(picture(name), sign.means) for name, sign in SIGNS.items() if name in signs]
    return element("ul", *(element("li", *meaning) for meaning in meanings), class_="legend")


def _notes(history: History, folded: int) -> list[Markup]:
    said = []
    if folded:
        said.append(f"{count(folded)} nodes share one row; the most eventful have their own.")
    if len(history.generations) > MANY or len(history.marks) > DEEPEST:
        said.append(
            "Signs of one kind that would overlap, and generations too short to be seen, are drawn "
            "as one."
        )
    if history.left_out:
        said.append(
            f"{count(history.left_out)} events are left out: of so many, evenly spread ones are "
            "drawn."
        )
    return [element("p", " ".join(said), class_="soft")] if said else []
