"""The rows of the timeline, one a node: when it was there, in which generations, what befell it.

Where nodes are many, those with the most to tell have rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from ..history import Generation, History, JobState, Mark, NodeStory, Stay
from ..wording import count, plural, spans
from .lane import Lane
from .markup import Markup, cut, seconds_text, short
from .scale import Axis, Label, inside
from .signs import place
from .strokes import box, left_words, level, right_words, words_at

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
        told = _told(group, made, history.until)
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


def _told(group: Sequence[Stay], made: Mapping[int, Generation], until: float) -> str:
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
