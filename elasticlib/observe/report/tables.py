"""Failures, nodes, settings and versions, as tables that fall into cards where there is no room."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import attrs

from ..history import History, Mark, NodeStory
from ..wording import count, plural, some, spans
from .drawing import picture
from .markup import Markup, cut, element, joined, seconds_text
from .timeline import ENDS, Row, rows

SINGLE = 20
"""Failures that are told one by one; more are told by reason."""
REASONS = 40
NODES = 40
MOST_SPANS = 6
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
    names = {story.node: story.host or story.node for story in history.nodes}
    stays: dict[str, list[tuple[float, int | None]]] = {}
    for stay in history.stays:
        stays.setdefault(stay.node, []).append((stay.began, stay.generation))
    found = []
    ended: dict[str, list[Mark]] = {}
    for mark in history.marks:
        if mark.kind == "worker.ended":
            ended.setdefault(mark.node, []).append(mark)
        if mark.kind == "failure":
            before = [stay for stay in stays.get(mark.node, ()) if stay[0] <= mark.at]
            began, number = max(before, default=(0.0, None))
            workers = {one.rank for one in ended.get(mark.node, ()) if one.at >= began}
            ranks = {mark.rank} if mark.rank is not None else workers
            known = tuple(sorted(rank for rank in ranks if rank is not None))
            found.append(Failure(mark, number, names.get(mark.node, mark.node), known))
    return found


def table(heads: Sequence[str], rows: Iterable[Sequence[tuple[str, str]]]) -> Markup:
    """Rows of (class, content); where there is no room, each cell has its head beside it."""
    head = element("thead", element("tr", *(element("th", words) for words in heads)))
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
    return element("table", head, element("tbody", *body), class_="cards")


def failure_section(history: History) -> Markup:
    found = failures(history)
    if not found:
        return Markup("")
    head = element("h2", "Failures")
    if len(found) <= SINGLE:
        told = [
            (
                ("when", seconds_text(one.mark.at)),
                ("when", "" if one.generation is None else str(one.generation)),
                ("name", one.name),
                ("when", one.ranks),
                ("reason", cut(one.mark.words, REASON)),
            )
            for one in found
        ]
        shown = table(("When", "Generation", "Node", "Rank", "Reason"), told)
        return element("section", head, shown)
    groups: dict[str, list[Failure]] = {}
    for one in found:
        groups.setdefault(_DIGITS.sub("#", one.mark.words), []).append(one)
    most = sorted(groups.values(), key=lambda group: -len(group))
    said = f"{plural(history.failures, 'failure')}, those alike but for numbers together"
    if history.failures > len(found):
        said += f"; of so many, {count(len(found))} evenly spread ones are counted here"
    if len(most) > REASONS:
        rest = sum(map(len, most[REASONS:]))
        said += f"; {plural(rest, 'failure')} for {len(most) - REASONS} rarer reasons not shown"
    shown = table(
        ("Times", "First, last", "Generations", "Nodes", "Ranks", "First reason"),
        map(_grouped, most[:REASONS]),
    )
    return element("section", head, element("p", f"{said}.", class_="soft"), shown)


def _grouped(group: Sequence[Failure]) -> list[tuple[str, str]]:
    first, last = seconds_text(group[0].mark.at), seconds_text(group[-1].mark.at)
    names = list(dict.fromkeys(one.name for one in group))
    known = (one.generation for one in group if one.generation is not None)
    generations = spans(known, MOST_SPANS)
    ranks = spans((rank for one in group for rank in one.workers), MOST_SPANS)
    return [
        ("when", count(len(group))),
        ("", first if len(group) == 1 else f"{first}, {last}"),
        ("", generations),
        ("name", some(names)),
        ("", ranks),
        ("reason", cut(group[0].mark.words, REASON)),
    ]


def node_section(history: History) -> Markup:
    shown, folded = rows(history)
    every = sorted([*shown, *folded], key=lambda row: -row.weight)
    chosen = {row.story.node for row in every[:NODES]}
    order = [story.node for story in history.nodes if story.node in chosen]
    by_node = {row.story.node: row for row in every}
    said = []
    if len(every) > NODES:
        said.append(
            f"{count(len(every))} nodes; the {NODES} with the most to tell are listed, of the "
            f"others {_ends(every[NODES:])}."
        )
    lost = sum(story.events_lost for story in history.nodes)
    if lost:
        said.append(
            f"{plural(lost, 'event')} could not be written: what is told of those nodes has gaps."
        )
    heads = ("Node", "Workers", "From", "Until", "How it ended", "Logs")
    return element(
        "section",
        element("h2", "Nodes"),
        *(element("p", words, class_="soft") for words in said),
        table(heads, (_node(by_node[node]) for node in order)),
    )


def _ends(others: Iterable[Row]) -> str:
    counts: dict[str, int] = {}
    for row in others:
        end = row.story.end
        word = "told of no end" if end is None else ENDS.get(end.state, end.state.value)
        word = "were lost" if row.gone is not None else word
        counts[word] = counts.get(word, 0) + 1
    return ", ".join(f"{count(many)} {word}" for word, many in counts.items())


def _node(row: Row) -> list[tuple[str, str]]:
    story = row.story
    until = row.gone if story.end is None else story.end.at
    logs = element("code", story.folder) if story.folder else Markup("")
    agent = story.node if story.pid is None else f"{story.node}, process {story.pid}"
    name = joined(story.host or story.node, element("div", agent, class_="soft"))
    return [
        ("name", name),
        ("when", count(story.slots)),
        ("when", seconds_text(story.began)),
        ("when", "" if until is None else seconds_text(until)),
        ("reason", _how(row)),
        ("name", logs),
    ]


def _how(row: Row) -> Markup:
    end, lost = row.story.end, row.story.events_lost
    if row.gone is not None:
        words = joined(picture("vanished"), "lost: it was not heard of again")
    elif end is None:
        words = joined("not told")
    else:
        told = f"{end.reason or ENDS.get(end.state, '')} (exit code {end.exit_code})"
        words = joined(picture(end.state.value), cut(told, REASON))
    return joined(words, f"; {plural(lost, 'event')} of it not written") if lost else words


def settings_section(history: History) -> Markup:
    parts = []
    for title, what in (
        ("Settings", [(story, story.settings) for story in history.nodes]),
        ("Versions", [(story, story.versions) for story in history.nodes]),
    ):
        told = _agreed(what)
        if told:
            rows = [(("", name), ("", element("code", value))) for name, value in told]
            parts.append(
                element("div", element("h3", title), table(("Name", "Value"), rows), class_="whole")
            )
    if not parts:
        return Markup("")
    head = element("h2", "Settings and versions")
    return element("section", head, element("div", *parts, class_="charts two"))


def _agreed(told: Iterable[tuple[NodeStory, Mapping[str, str]]]) -> list[tuple[str, str]]:
    """Name and value; where nodes differ, each value with those that have it."""
    found: dict[str, dict[str, list[str]]] = {}
    for story, values in told:
        for name, value in values.items():
            hosts = found.setdefault(name, {}).setdefault(str(value), [])
            hosts.append(story.host or story.node)
    return [
        (
            name,
            next(iter(values))
            if len(values) == 1
            else "; ".join(f"{value} on {some(hosts)}" for value, hosts in values.items()),
        )
        for name, values in found.items()
    ]
