"""`elasticlib logs`: the lines that a run's workers wrote, each with its rank before it.

What is shown are the files of `--redirects` and `--tee`: of this machine, or of all nodes whose
folders lie in the same log directory. Without -f they come rank by rank, as the lines bear no time.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import ConfigError, ElasticError
from ..observe.runs import STREAMS, Attempt, Kept, Neighbours, NodeLogs, Tail, find_runs
from ..observe.wording import ranks_of, spans
from ..visible import visible_line
from ..workers.output import parse_ranks
from .command_tools import complain, on_terminal, typed

LOOK_SECONDS = 0.2
LOOKS_FOR_NODES = 20
"""So many looks at the files go by between two looks for folders of other nodes."""
ALL = -1
COLOURS = (36, 33, 32, 35, 34, 31)
_KEEP = "start it with --tee 3 (files and console) or --redirects 3 (files only)"


def add_logs(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show the lines of a run's workers, each with its global rank before it, and of several "
        "nodes with the node's name. Exit status: 0 done, 1 no such run or nothing kept, 2 a wrong "
        "command line."
    )
    parser.add_argument(
        "name",
        nargs="?",
        default="",
        metavar="RUN",
        help="a run's id, its folder or a log directory (default: the newest running "
        "job here, else the newest)",
    )
    ranks, count, attempt = typed(parse_ranks), typed(_count), typed(_attempt)
    parser.add_argument(
        "-r", "--ranks", type=ranks, metavar="R,R-R", help="only these global ranks"
    )
    parser.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="go on as lines come, until the run is over; if a node on "
        "another machine was killed this never ends: press Ctrl-C",
    )
    parser.add_argument(
        "-n",
        "--lines",
        type=count,
        metavar="LINES",
        help="start with the last LINES of each file",
    )
    parser.add_argument("--stream", choices=sorted(STREAMS), default="both")
    parser.add_argument(
        "--attempt",
        type=attempt,
        metavar="N|all",
        help="of this start of the workers, 0 for the first (default: the newest and, with -f, "
        "those that come)",
    )
    parser.set_defaults(run=_run)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"a number of lines from 0, got {text!r}")
    return int(text)


def _attempt(text: str) -> int:
    if text != "all" and not (text.isascii() and text.isdigit()):
        raise ConfigError(f"an attempt is a number from 0, or all, got {text!r}")
    return ALL if text == "all" else int(text)


def _run(chosen: argparse.Namespace) -> int:
    try:
        logs = _Logs(chosen, [NodeLogs(events) for events in find_runs(chosen.name)])
        return logs.follow() if chosen.follow else logs.show()
    except ElasticError as error:
        return complain("logs", error, 1)
    except KeyboardInterrupt:
        return 0


class _Logs:
    """Of these nodes of one run and those beside them; the files that are shown, and how far."""

    def __init__(self, chosen: argparse.Namespace, nodes: list[NodeLogs]) -> None:
        self._ranks: frozenset[int] | None = chosen.ranks
        self._attempt, self._streams, self._last = chosen.attempt, chosen.stream, chosen.lines
        self._neighbours = Neighbours()
        self._nodes = self._neighbours.beside(nodes)
        self._out, self._coloured = sys.stdout.buffer, on_terminal()
        self._tails: dict[Path, tuple[Kept, Tail]] = {}
        self._shown: set[int] = set()
        # Of each node the first of its attempts that have not been looked at to their end.
        self._newest: dict[Path, int] = {}

    def show(self) -> int:
        """What is there now."""
        self._open()
        for kept, tail in self._tails.values():
            self._print(kept, tail.lines())
            self._print(kept, tail.rest())
        return self._missing()

    def follow(self) -> int:
        """What comes as well, until all nodes are over, or the attempt that was asked for."""
        looks, pause = 0, threading.Event()
        while True:
            # Asked before the files are read: what was written until then is read.
            over = all(self._over(node) for node in self._nodes)
            if over:
                self._look()  # one whose process is gone may have told more before
            self._open()
            self._last = None  # of files that come to be there nothing was written before
            for kept, tail in self._tails.values():
                self._print(kept, tail.lines())
            self._newest = {node.events: max(0, len(node.attempts) - 1) for node in self._nodes}
            self._close_old()
            if over:
                break
            pause.wait(LOOK_SECONDS)
            looks += 1
            if looks % LOOKS_FOR_NODES == 0:
                self._nodes = self._neighbours.beside(self._nodes)
            self._look()
        for kept, tail in self._tails.values():
            self._print(kept, tail.rest())
        return self._missing()

    def _print(self, kept: Kept, lines: Iterable[bytes]) -> None:
        """Each with its rank before it, and of several nodes with its node's name."""
        head = f"[{kept.rank}]"
        if len(self._nodes) > 1:
            alike = sum(node.host == kept.node.host for node in self._nodes) > 1
            name = kept.node.node if alike else kept.node.host
            head = visible_line(f"[{kept.rank} {name}]")
        if self._coloured:
            head = f"\x1b[{COLOURS[kept.rank % len(COLOURS)]}m{head}\x1b[0m"
        prefix = head.encode() + b" "
        for line in lines:
            self._out.write(prefix + line + b"\n")
        self._out.flush()

    def _look(self) -> None:
        for node in self._nodes:
            node.look()

    def _over(self, node: NodeLogs) -> bool:
        newest = node.attempts[-1].number if node.attempts else -1
        return node.over or (self._attempt not in (None, ALL) and newest > self._attempt)

    def _open(self) -> None:
        """Begin with the files that have come to be there."""
        for kept in self._kept():
            if kept.path in self._tails:
                self._tails[kept.path] = (kept, self._tails[kept.path][1])
            elif kept.path.is_file():
                tail = Tail(kept.path)
                if self._last is not None:
                    tail.skip_to_last(self._last)
                self._tails[kept.path] = (kept, tail)

    def _close_old(self) -> None:
        """An attempt that another has followed writes no more."""
        wanted = {kept.path for kept in self._kept()}
        for path in self._tails.keys() - wanted:
            kept, tail = self._tails.pop(path)
            self._print(kept, tail.rest())
            self._shown.add(kept.rank)

    def _kept(self) -> Iterator[Kept]:
        for node in self._nodes:
            for attempt in self._chosen(node):
                for kept in node.kept(attempt, self._streams):
                    if self._ranks is None or kept.rank in self._ranks:
                        yield kept

    def _chosen(self, node: NodeLogs) -> list[Attempt]:
        if self._attempt == ALL:
            return node.attempts
        if self._attempt is None:
            return node.attempts[self._newest.get(node.events, -1) :]
        return [attempt for attempt in node.attempts if attempt.number == self._attempt]

    def _missing(self) -> int:
        """Say why nothing was shown, or which ranks are not there; the exit status."""
        name = self._nodes[0].run
        there = {attempt for node in self._nodes for attempt in self._chosen(node)}
        known = {rank for one in there for rank in range(one.first, one.last + 1)}
        lacking = sorted(set(self._ranks or ()) - known)
        if not there:
            numbers = sorted({one.number for node in self._nodes for one in node.attempts})
            some = "attempts" if len(numbers) > 1 else "attempt"
            which = f"has {some} {spans(numbers)}, and not {self._attempt}"
            which = which if numbers else "has started no workers"
            return complain("logs", f"run {name} {which}", 1)
        world = max(one.world for one in there)
        if self._ranks is None and world > len(known):
            away = f"{world - len(known)} of its {world} workers ran on other nodes"
            complain("logs", f"run {name}: {away}, whose logs are not here", 0)
        if lacking:
            there_are = f"{ranks_of(known)} there, not {spans(lacking)}"
            complain("logs", f"run {name} has {there_are}", 1)
        shown = self._shown | {kept.rank for kept, _ in self._tails.values()}
        asked = known if self._ranks is None else known & self._ranks
        if asked and not shown:
            whose = f"run {name}" if self._ranks is None else ranks_of(asked)
            return complain("logs", f"no output of {whose} was kept; {_KEEP}", 1)
        if asked - shown:
            complain("logs", f"no output of {ranks_of(asked - shown)} was kept; {_KEEP}", 1)
        return 1 if lacking else 0
