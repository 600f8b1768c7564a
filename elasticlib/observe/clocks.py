"""Lays what several agents told on one axis: by the generations that they began together, and by
their wall clocks only where they share none.

Members of a generation start their workers within a moment of one another, whatever their clocks
say. So a node whose wall clock is wrong lands right, and wall clocks say no more than when it was;
but where they are hours apart it must be seen that what was begun together lasted as long for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from .history import NodeGeneration

APART = 3600.0
"""Seconds by wall clocks within which two that tell of a like generation mean the same one."""
MOMENT, PART = 2.0, 0.01
"""Of those whose wall clocks are further apart: seconds, and part of the time since it began,
within which its end, or another's beginning, came for both, by their own clocks."""

Key = tuple[int, int]
"""A life: the log's place in the sequence, and the life's in the log."""


@attrs.frozen
class Aligned:
    """offsets: what to add to each log's own times for the time of all, in seconds since 1970 by
    the clocks that agree. generations: the lives of each, by its number, in order; where the job
    was begun anew, the count goes on. launches: the numbers at which it was begun."""

    offsets: Sequence[float]
    generations: Mapping[int, Sequence[Key]]
    launches: frozenset[int]


def align(logs: Sequence[Sequence[NodeGeneration]], clocks: Sequence[float]) -> Aligned:
    """logs: the lives that each agent told of, in their order. clocks: of each, its wall clock
    minus its monotonic one."""
    parts = _parts(logs)
    jobs = _together(logs, parts)
    offsets = _offsets(logs, clocks, [keys for job in jobs for keys in job.values()])
    began = {
        id(job): min(logs[s][i].began + offsets[s] for keys in job.values() for s, i in keys)
        for job in jobs
    }
    return _in_order(offsets, sorted(jobs, key=lambda job: began[id(job)]))


def _parts(logs: Sequence[Sequence[NodeGeneration]]) -> dict[Key, Key]:
    """Of each life the first one of its job: where the count begins again, another job did."""
    first = {}
    for s, lives in enumerate(logs):
        head = (s, 0)
        for i, life in enumerate(lives):
            if i and life.number <= lives[i - 1].number:
                head = (s, i)
            first[(s, i)] = head
    return first


def _together(
    logs: Sequence[Sequence[NodeGeneration]], parts: Mapping[Key, Key]
) -> list[dict[int, list[Key]]]:
    """Of each job the lives of its generations, by number, whoever told of them."""
    same: dict[tuple[object, ...], list[Key]] = {}
    for s, lives in enumerate(logs):
        for i, x in enumerate(lives):
            same.setdefault((x.number, x.nodes, x.world, x.restarts, x.cause), []).append((s, i))
    jobs = _Union(parts.values())
    for keys in same.values():
        for group in _by_wall(logs, keys):
            for key in group[1:]:
                jobs.join(parts[group[0]], parts[key])
    found: dict[Key, dict[int, list[Key]]] = {}
    for key, head in parts.items():
        number = logs[key[0]][key[1]].number
        found.setdefault(jobs.of(head), {}).setdefault(number, []).append(key)
    return list(found.values())


def _by_wall(logs: Sequence[Sequence[NodeGeneration]], keys: Sequence[Key]) -> list[list[Key]]:
    """These, like but for their node ranks, as groups that may be of one generation each."""
    groups: list[list[Key]] = []
    taken: list[set[object]] = []
    walls: list[float] = []
    for key in sorted(keys, key=lambda key: logs[key[0]][key[1]].wall):
        life = logs[key[0]][key[1]]
        here = {life.node_rank, f"log {key[0]}"}
        for group, there, wall in zip(groups, taken, walls, strict=True):
            near = life.wall - wall <= APART or _in_step(logs, group[0], key)
            if not here & there and near:
                group.append(key)
                there |= here
                break
        else:
            groups.append([key])
            taken.append(here)
            walls.append(life.wall)
    return groups


def _in_step(logs: Sequence[Sequence[NodeGeneration]], one: Key, other: Key) -> bool:
    """Whether this generation ended, or its neighbour began, after as long a time for both."""
    told = []
    for s, i in (one, other):
        life, found = logs[s][i], {}
        if life.over is not None:
            found["over"] = life.over - life.began
        for near in logs[s][max(0, i - 1) : i + 2]:
            if near.number != life.number:
                found[f"began {near.number}"] = near.began - life.began
        told.append(found)
    pairs = [(told[0][what], told[1][what]) for what in told[0].keys() & told[1].keys()]
    return any(abs(mine - its) <= min(MOMENT, PART * abs(mine)) for mine, its in pairs)


class _Union:
    """Which of some things belong together."""

    def __init__(self, things: Iterable[Key]) -> None:
        self._head = {thing: thing for thing in things}

    def of(self, thing: Key) -> Key:
        while self._head[thing] != thing:
            self._head[thing] = self._head[self._head[thing]]
            thing = self._head[thing]
        return thing

    def join(self, one: Key, other: Key) -> None:
        one, other = sorted((self.of(one), self.of(other)))
        self._head[other] = one


def _offsets(
    logs: Sequence[Sequence[NodeGeneration]],
    clocks: Sequence[float],
    groups: Sequence[Sequence[Key]],
) -> list[float]:
    """Of each log what to add; those that share generations move as one."""
    group_of = {key: g for g, group in enumerate(groups) for key in group}
    when: dict[int, float] = {}
    placed: dict[int, float] = {}
    bodies: list[list[int]] = []
    order = sorted(range(len(logs)), key=lambda s: -len(logs[s]))
    while len(placed) < len(order):
        seed = next(s for s in order if s not in placed)
        body, fresh = [], [(seed, clocks[seed])]
        while fresh:
            for s, offset in fresh:
                body.append(s)
                placed[s] = offset
                for i, life in enumerate(logs[s]):
                    when.setdefault(group_of[(s, i)], life.began + offset)
            fresh = []
            for s in (s for s in order if s not in placed):
                shared = [
                    when[group_of[(s, i)]] - life.began
                    for i, life in enumerate(logs[s])
                    if group_of[(s, i)] in when
                ]
                if shared:
                    fresh.append((s, _median(shared)))
        bodies.append(body)
    for body in bodies:
        # As most of their wall clocks have it.
        shift = _median([clocks[s] - placed[s] for s in body])
        placed.update({s: placed[s] + shift for s in body})
    return [placed[s] for s in range(len(logs))]


def _in_order(offsets: Sequence[float], jobs: Iterable[Mapping[int, Sequence[Key]]]) -> Aligned:
    """One count over all jobs: what is known by number is never put in order by clocks."""
    ordered: dict[int, Sequence[Key]] = {}
    launches: list[dict[int, Sequence[Key]]] = []
    launch: dict[int, Sequence[Key]] = {}
    for job in jobs:
        if not launches or launch.keys() & job.keys():
            # Parts of which no two have a number in common may be of one job, seen by others.
            launch = {}
            launches.append(launch)
        launch.update(job)
    firsts = set()
    for launch in launches:
        before = max(ordered, default=0)
        firsts.add(before + min(launch))
        ordered.update({before + number: launch[number] for number in sorted(launch)})
    return Aligned(offsets, ordered, frozenset(firsts))


def _median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]
