"""The rows of the timeline, one a node: when it was there, in which generations, what befell it.

Where nodes are many, those with the most to tell have rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from ..history import Generation, History, JobState, Mark, NodeStory, Stay
from .markup import Markup, cut, short
from .scale import Axis, Label, inside
from .signs import place
from .strokes import box, left_words, level, right_words, words_at
from .wording import count_text, plural, seconds_text, spans_text

ROWS = 24
BANDS = 3000
"""Of all rows together, at most: generations x rows."""
FEWEST = 6
NARROWEST = 0.25
"""Per cent of the width below which bands of generations melt into one."""
APART = 1.6
"""Per cent of the width between two signs of one kind, below which they are one."""
BAND = 14.0
IN_ROWS = ("failure", "drain.asked", "lost")
ENDS = {
    JobState.SUCCEEDED: "succeeded",
    JobState.FAILED: "failed",
    JobState.PREEMPTED: "drained",
    JobState.STOPPED: "stopped",
}


@attrs.frozen
class Row:
    """A node with what is drawn of it. gone: when it fell silent, if it left without a word."""

    story: NodeStory
    stays: tuple[Stay, ...]
    marks: tuple[Mark, ...]
    gone: float | None

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
    last = max((generation.began for generation in history.generations), default=0.0)
    every = []
    for story in history.nodes:
        # Who told of no end is lost where others went on, or where all is over.
        lost = story.end is None and (last > story.seen or history.state.over)
        mine, told = stays.get(story.node, ()), marks.get(story.node, ())
        every.append(Row(story, tuple(mine), tuple(told), story.seen if lost else None))
    room = max(FEWEST, min(ROWS, BANDS // max(1, len(history.generations))))
    if len(every) <= room + 1:
        return every, []
    telling = sorted(range(len(every)), key=lambda at: (-every[at].weight, at))
    chosen = set(telling[:room])
    kept = [row for at, row in enumerate(every) if at in chosen]
    return kept, [row for at, row in enumerate(every) if at not in chosen]


def row_lane(
    row: Row, made: Mapping[int, Generation], until: float, axis: Axis, top: float
) -> tuple[list[Markup], float]:
    """Its markup and lower end: a line of words, and below it the node's time. made: the
    generations by number; until: the end of the history."""
    story, middle = row.story, top + 30
    name = story.host or story.node
    told = f"{name} ({story.node}), {plural(story.slots, 'worker')}"
    if story.folder:
        told += f", logs in {story.folder}"
    ended = story.end.at if story.end is not None else until
    last = ended if row.gone is None else row.gone
    found = [
        left_words(short(name, 24), top + 14, told=told),
        right_words(_end_words(row), top + 14, told=_end_told(row)),
        level(middle, "life", span=(axis(story.began), axis(last))),
    ]
    if row.gone is not None:
        found.append(level(middle, "lost", span=(axis(row.gone), axis(until))))
    found += _bands(row.stays, made, until, axis, middle)
    found += _signs(row, axis, middle)
    return found, top + 46


def _end_words(row: Row) -> str:
    if row.gone is not None:
        return f"lost at {seconds_text(row.gone)}"
    end = row.story.end
    return (
        "" if end is None else f"{ENDS.get(end.state, end.state.value)} at {seconds_text(end.at)}"
    )


def _end_told(row: Row) -> str:
    end = row.story.end
    return "" if end is None else cut(f"{end.reason} (exit code {end.exit_code})", 300)


def _bands(
    stays: Sequence[Stay], made: Mapping[int, Generation], until: float, axis: Axis, middle: float
) -> list[Markup]:
    found = []
    for group in _melted(stays, until, axis):
        first, last = group[0], group[-1]
        left, right = axis(first.began), axis(until if last.ended is None else last.ended)
        shade = "ab"[first.generation % 2 == 0]
        words = spans_text(stay.generation for stay in group)
        told = _told(group, made, until)
        trained = _trained(first, made)
        if len(group) == 1 and (trained is None or axis(trained) - left > NARROWEST):
            found.append(box((left, right), middle - BAND / 2, BAND, "starting", told=told))
            left = right if trained is None else axis(trained)
        if right - left > 0:
            found.append(box((left, right), middle - BAND / 2, BAND, f"band-{shade}", told=told))
        rung = inside(right - left, words)
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


def _melted(stays: Iterable[Stay], until: float, axis: Axis) -> list[list[Stay]]:
    """Stays one by one, and those too narrow to be seen together with their neighbours."""
    groups: list[list[Stay]] = []
    narrow = False
    for stay in stays:
        end = axis(until if stay.ended is None else stay.ended)
        thin = end - axis(stay.began) < NARROWEST
        if groups and thin and narrow and end - axis(groups[-1][0].began) < 4 * NARROWEST:
            groups[-1].append(stay)
        else:
            groups.append([stay])
        narrow = thin
    return groups


def _told(group: Sequence[Stay], made: Mapping[int, Generation], until: float) -> str:
    first, last = group[0], group[-1]
    numbers = spans_text(stay.generation for stay in group)
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


def together(marks: Iterable[Mark], where: Callable[[Mark], float]) -> list[list[Mark]]:
    """Marks in order, those that would lie on each other in one group."""
    groups: list[list[Mark]] = []
    for mark in marks:
        if groups and where(mark) - where(groups[-1][0]) < APART:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    return groups


def _sign_told(group: Sequence[Mark]) -> str:
    first = group[0]
    rank = "" if first.rank is None else f", rank {first.rank}"
    words = f"{first.kind} at {seconds_text(first.at)}{rank}: {cut(first.words, 300)}"
    more = len(group) - 1
    return f"{words} (and {count_text(more)} more)" if more else words
