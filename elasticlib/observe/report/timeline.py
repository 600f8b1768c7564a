"""The run as small pictures above one axis of time: how many work, who, what is saved, how far.

Each lane is a drawing of its own with its own words, so that a printer can break between them, and
all have the same width, so that they are one picture. A node has a row of its own, or where nodes
are many, those with the most to tell have one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from ..history import Generation, History, JobState, Mark, NodeStory, Stay
from ..wording import count, plural, spans
from .curves import foot, progress, strip
from .drawing import (
    Axis,
    Label,
    Lane,
    box,
    drawn,
    inside,
    left_words,
    legend,
    level,
    place,
    placed,
    right_words,
    time_ticks,
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
SHORT = 17
"""Characters of a node's name on a narrow page."""
BAND = 14.0
SIGN = 18.0
"""Pixels of a band that signs at its ends may cover."""
MOST_SPANS = 6
MANY = 60
"""Generations, above which rows do not tell them apart."""
IN_ROWS = ("failure", "drain.asked", "lost")
ENDS = {
    JobState.SUCCEEDED: "succeeded",
    JobState.FAILED: "failed",
    JobState.PREEMPTED: "drained",
    JobState.STOPPED: "stopped",
}


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
        """How much it has to tell."""
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
    room = max(FEWEST, min(ROWS, BANDS // max(1, len(history.generations))))
    if len(every) <= room + 1:
        return every, []
    telling = sorted(range(len(every)), key=lambda at: (-every[at].weight, at))
    chosen = set(telling[:room])
    kept = [row for at, row in enumerate(every) if at in chosen]
    return kept, [row for at, row in enumerate(every) if at not in chosen]


def row_lane(row: Row, history: History, axis: Axis) -> Lane:
    """A line of words, and below it the node's time."""
    story, middle = row.story, 30.0
    name = story.host or story.node
    told = f"{name} ({story.node}), {plural(story.slots, 'worker')}"
    if story.folder:
        told += f", logs in {story.folder}"
    ended = history.until if story.end is None else story.end.at
    if row.gone is not None:
        ended = row.gone
    elif story.end is None and history.state.over:
        ended = story.seen
    end_words = _end_words(row, history.state.over)
    found = [
        *_names(name, told),
        right_words(end_words, 14, told=_end_told(row)),
        level(middle, "life", span=(axis(story.began), axis(ended))),
    ]
    if row.gone is not None:
        found.append(level(middle, "lost", span=(axis(row.gone), axis(history.until))))
    found += _bands(row.stays, history, axis, middle)
    found += _signs(row, axis, middle)
    words = f"{name}: {plural(len(row.stays), 'generation')}, {_counted(row)}{end_words or 'there'}"
    return Lane(words, found, 44.0)


def _names(name: str, told: str) -> list[Markup]:
    """The node's name, or as much of it as there is room for beside its end."""
    if len(name) <= SHORT:
        return [left_words(name, 14, told=told)]
    narrow = left_words(short(name, SHORT), 14, "halo n0", told=told)
    return [narrow, left_words(short(name, 3 * SHORT), 14, "halo w1", told=told)]


def _counted(row: Row) -> str:
    failures = max(row.story.failures, sum(mark.kind == "failure" for mark in row.marks))
    return f"{plural(failures, 'failure')}, " if failures else ""


def _end_words(row: Row, over: bool) -> str:
    """over: whether the job is."""
    if row.gone is not None:
        return f"lost at {seconds_text(row.gone)}"
    end = row.story.end
    if end is None:
        return "its end is not told" if over else ""
    return f"{ENDS.get(end.state, '')} at {seconds_text(end.at)}"


def _end_told(row: Row) -> str:
    end = row.story.end
    return "" if end is None else cut(f"{end.reason} (exit code {end.exit_code})", 300)


def _bands(stays: Sequence[Stay], history: History, axis: Axis, middle: float) -> list[Markup]:
    made = {generation.number: generation for generation in history.generations}
    many = len(made) > MANY
    found = []
    for group in _melted(stays, history.until, axis, many):
        first, last = group[0], group[-1]
        left = axis(first.began)
        right = axis(history.until if last.ended is None else last.ended)
        shade = "b" if many or first.generation % 2 == 0 else "a"
        told = _stays_told(group, made, history.until)
        trained = _trained(first, made)
        place = (middle - BAND / 2, BAND)
        if len(group) == 1 and (trained is None or axis(trained) - left > NARROWEST):
            found.append(box((left, right), *place, "starting", told=told))
            left = right if trained is None else axis(trained)
        if right > left:
            found.append(box((left, right), *place, f"band-{shade}", told=told))
        words = str(first.generation)
        rung = None if many or len(group) > 1 else inside(right - left, words, room=SIGN)
        if rung is not None:
            label = Label((left + right) / 2, words)
            found.append(words_at(label, middle + 4, f"on-{shade} {rung}"))
    return found


def _trained(stay: Stay, made: Mapping[int, Generation]) -> float | None:
    """When training began in this stay: at once, where workers never tell of it."""
    generation = made.get(stay.generation)
    if generation is None or all(one.trained is None for one in made.values()):
        return stay.began
    return generation.trained


def _melted(stays: Iterable[Stay], until: float, axis: Axis, many: bool) -> list[list[Stay]]:
    """Stays one by one; those too narrow to be seen together with their neighbours; and where
    generations are many, all that only gaps too narrow part."""
    groups: list[list[Stay]] = []
    narrow, before = False, 0.0
    for stay in stays:
        left, right = axis(stay.began), axis(until if stay.ended is None else stay.ended)
        thin = right - left < NARROWEST
        near = many and left - before < NARROWEST
        if groups and (near or (thin and narrow and right - axis(groups[-1][0].began) < 1)):
            groups[-1].append(stay)
        else:
            groups.append([stay])
        narrow, before = thin, right
    return groups


def _stays_told(group: Sequence[Stay], made: Mapping[int, Generation], until: float) -> str:
    first, last = group[0], group[-1]
    numbers = spans((stay.generation for stay in group), MOST_SPANS)
    ended = until if last.ended is None else last.ended
    lasted = seconds_text(max(0.0, ended - first.began))
    if len(group) > 1:
        return f"generations {numbers}, {lasted} in all"
    ranks = f"ranks {first.ranks[0]} to {first.ranks[1]}"
    words = f"generation {numbers}: node {first.node_rank}, {ranks}, {lasted}"
    generation = made.get(first.generation)
    return words if generation is None else f"{words}; {cut(generation.cause, 120)}"


def _signs(row: Row, axis: Axis, middle: float) -> list[Markup]:
    found = []
    kinds = sorted({mark.kind for mark in row.marks})
    for kind in kinds:
        for group in together([m for m in row.marks if m.kind == kind], lambda m: axis(m.at)):
            found.append(place(kind, axis(group[0].at), middle, _sign_told(group)))
    end = row.story.end
    if end is not None:
        told = f"{ENDS.get(end.state, '')} at {seconds_text(end.at)}: {cut(end.reason, 300)}"
        found.append(place(end.state.value, axis(end.at), middle, told))
    if row.gone is not None:
        told = f"last heard of at {seconds_text(row.gone)}"
        found.append(place("vanished", axis(row.gone), middle, told))
    return found


def together(
    marks: Iterable[Mark], where: Callable[[Mark], float], apart: float = APART
) -> list[list[Mark]]:
    """Marks in order, those that would lie on each other in one group."""
    groups: list[list[Mark]] = []
    for mark in marks:
        if groups and where(mark) - where(groups[-1][0]) < apart:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    return groups


def _sign_told(group: Sequence[Mark]) -> str:
    first = group[0]
    rank = "" if first.rank is None else f", rank {first.rank}"
    words = f"{first.kind} at {seconds_text(first.at)}{rank}: {cut(first.words, 300)}"
    more = len(group) - 1
    return f"{words} (and {count(more)} more)" if more else words


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
        told = _generation_told(generation, history)
        hovers.append(box(span, top - 16, height + 16, "hover", told=told))
    heights = dict(labels)
    for label, rung in placed([label for label, _ in labels], 11):
        found.append(words_at(label, heights[label], f"value halo {rung}"))
    words = f"Timeline of {plural(len(history.nodes), 'node')} and "
    words += f"{plural(len(history.generations), 'generation')} in {seconds_text(history.until)}"
    parts = [*found, level(base), *hovers]
    return Lane(words, parts, base + 6, told=_described(history), rules=top)


def _generation_told(generation: Generation, history: History) -> str:
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
    parts = [left_words(words, 14), *strip(course, history, axis, (top, height))]
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
