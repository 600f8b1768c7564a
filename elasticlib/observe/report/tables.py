"""Failures, nodes, settings and versions, as tables that fall into cards where there is no room."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

import attrs

from ..event import Mark
from ..history import History, NodeStory, Stay
from ..wording import count, plural, some, spans
from .drawing import picture
from .markup import Markup, cut, element, joined, seconds_text
from .timeline import ENDS, MOST_SPANS, Row, rows

SINGLE = 20
"""Failures that are listed one by one; more are counted by reason."""
REASONS = 40
NODES = 40
REASON = 600
"""Characters of one reason that are shown, at most."""
_DIGITS = re.compile(r"\d+")


@attrs.frozen
class Failure:
    """generation: in which it was, if that is known; name: of the node, for people; workers: its
    ranks."""

    mark: Mark
    generation: int | None
    name: str
    workers: tuple[int, ...] = ()

    @property
    def ranks(self) -> str:
        return spans(self.workers, MOST_SPANS)


def failures(history: History) -> list[Failure]:
    """Return the failures in order of time, each with its generation and the ranks that failed.

    An agent reports a failure without a rank, after the ends of its workers. So the ranks are those
    of the workers that ended since the node's generation began.
    """
    names = {story.node: story.host or story.node for story in history.nodes}
    coming: dict[str, list[Stay]] = {}  # generations of each node, the next one last
    for stay in sorted(history.stays, key=attrgetter("began", "generation"), reverse=True):
        coming.setdefault(stay.node, []).append(stay)
    found, generations, ended = [], dict[str, int](), dict[str, set[int]]()
    for mark in history.marks:
        stays = coming.get(mark.node, [])
        while stays and stays[-1].began <= mark.at:
            generations[mark.node] = stays.pop().generation
            ended.pop(mark.node, None)
        if mark.kind == "worker.ended" and mark.rank is not None:
            ended.setdefault(mark.node, set()).add(mark.rank)
        elif mark.kind == "failure":
            ranks = ended.get(mark.node, ()) if mark.rank is None else (mark.rank,)
            name = names.get(mark.node, mark.node)
            workers = tuple(sorted(ranks))
            found.append(Failure(mark, generations.get(mark.node), name, workers))
    return found


def table(
    heads: Sequence[str], rows: Iterable[Sequence[tuple[str, str]]], *, cards: bool = True
) -> Markup:
    """Rows of (class, content); the first says of which class the heads are. cards: each cell has
    its head beside it where there is no room for a table."""
    rows = list(rows)
    classes = [name for name, _ in rows[0]] if rows else [""] * len(heads)
    head = (element("th", words, class_=name) for words, name in zip(heads, classes, strict=True))
    body = [
        element(
            "tr",
            *(
                element("td", content and element("div", content), class_=name, data_label=words)
                for words, (name, content) in zip(heads, row, strict=True)
            ),
        )
        for row in rows
    ]
    parts = (element("thead", element("tr", *head)), element("tbody", *body))
    return element("table", *parts, class_="cards" if cards else None)


def failure_section(history: History) -> Markup:
    found = failures(history)
    if not found:
        return Markup("")
    head = element("h2", "Failures")
    if len(found) <= SINGLE:
        shown = table(("When", "Generation", "Node", "Rank", "Reason"), map(_single, found))
        return element("section", head, shown)
    groups: dict[str, list[Failure]] = {}
    for one in found:
        groups.setdefault(_DIGITS.sub("#", one.mark.words), []).append(one)
    most = sorted(groups.values(), key=lambda group: -len(group))
    said = f"{plural(history.failures, 'failure')}; those whose reasons differ only in numbers are "
    said += "counted together."
    if history.failures > len(found):
        said += f" Of so many, {count(len(found))} evenly spread ones are counted."
    if len(most) > REASONS:
        rest = plural(sum(map(len, most[REASONS:])), "failure")
        said += f" {rest} with {len(most) - REASONS} rarer reasons are not listed."
    shown = table(
        ("Times", "First, last", "Generations", "Nodes", "Ranks", "First reason"),
        map(_grouped, most[:REASONS]),
    )
    return element("section", head, element("p", said, class_="soft"), shown)


def _single(one: Failure) -> list[tuple[str, str]]:
    return [
        ("when", seconds_text(one.mark.at)),
        ("when", "" if one.generation is None else str(one.generation)),
        ("name", one.name),
        ("when", one.ranks),
        ("reason", cut(one.mark.words, REASON)),
    ]


def _grouped(group: Sequence[Failure]) -> list[tuple[str, str]]:
    first, last = seconds_text(group[0].mark.at), seconds_text(group[-1].mark.at)
    names = list(dict.fromkeys(one.name for one in group))
    generations = (one.generation for one in group if one.generation is not None)
    return [
        ("when", count(len(group))),
        ("", first if len(group) == 1 else f"{first}, {last}"),
        ("", spans(generations, MOST_SPANS)),
        ("name", some(names)),
        ("", spans((rank for one in group for rank in one.workers), MOST_SPANS)),
        ("reason", cut(group[0].mark.words, REASON)),
    ]


def node_section(history: History) -> Markup:
    shown, folded = rows(history)
    every = sorted([*shown, *folded], key=lambda row: -row.weight)
    listed = {row.story.node: row for row in every[:NODES]}
    said = []
    if len(every) > NODES:
        said.append(
            f"{count(len(every))} nodes; the {NODES} most eventful are listed. Of the others, "
            f"{_ends(every[NODES:])}."
        )
    lost = sum(story.events_lost for story in history.nodes)
    if lost:
        said.append(f"{plural(lost, 'event')} could not be written: what is shown has gaps.")
    heads = ("Node", "Workers", "From", "Until", "How it ended", "Logs")
    order = [story.node for story in history.nodes if story.node in listed]
    return element(
        "section",
        element("h2", "Nodes"),
        *(element("p", words, class_="soft") for words in said),
        table(heads, (_node(listed[node]) for node in order)),
    )


def _ends(others: Iterable[Row]) -> str:
    counts: dict[str, int] = {}
    for row in others:
        end = row.story.end
        word = "ended in a way that is not known" if end is None else ENDS.get(end.state, "ended")
        word = "were lost" if row.gone is not None else word
        counts[word] = counts.get(word, 0) + 1
    return ", ".join(f"{count(many)} {word}" for word, many in counts.items())


def _node(row: Row) -> list[tuple[str, str]]:
    story = row.story
    until = row.gone if story.end is None else story.end.at
    agent = story.node if story.pid is None else f"{story.node}, process {story.pid}"
    return [
        ("name", joined(story.host or story.node, element("div", agent, class_="soft"))),
        ("when", count(story.slots)),
        ("when", seconds_text(round(story.began, 2))),
        ("when", "" if until is None else seconds_text(until)),
        ("reason", _how(row)),
        ("name", element("code", story.folder) if story.folder else ""),
    ]


def _how(row: Row) -> Markup:
    end, lost = row.story.end, row.story.events_lost
    if row.gone is not None:
        words = joined(picture("vanished"), "lost: never heard from again")
    elif end is None:
        words = joined("not known")
    else:
        said = f"{end.reason or ENDS.get(end.state, '')} (exit code {end.exit_code})"
        words = joined(picture(end.state.value), cut(said, REASON))
    return joined(words, f"; {plural(lost, 'event')} not written") if lost else words


def settings_section(history: History) -> Markup:
    parts = []
    for title, values in (
        ("Settings", [(story, story.settings) for story in history.nodes]),
        ("Versions", [(story, story.versions) for story in history.nodes]),
    ):
        rows = [
            [("", name), ("", element("code", value))] for name, value in _agreed(values).items()
        ]
        if rows:
            shown = table(("Name", "Value"), rows, cards=False)
            parts.append(element("div", element("h3", title), shown))
    if not parts:
        return Markup("")
    head = element("h2", "Settings and versions")
    return element("section", head, element("div", *parts, class_="charts two"))


def _agreed(every: Iterable[tuple[NodeStory, Mapping[str, str]]]) -> dict[str, str]:
    """Value by name; where nodes differ, each value with those that have it."""
    found: dict[str, dict[str, list[str]]] = {}
    for story, values in every:
        for name, value in values.items():
            hosts = found.setdefault(name, {}).setdefault(str(value), [])
            hosts.append(story.host or story.node)
    return {
        name: next(iter(values))
        if len(values) == 1
        else "; ".join(f"{value} on {some(hosts)}" for value, hosts in values.items())
        for name, values in found.items()
    }
