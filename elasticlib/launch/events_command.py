"""The command `elasticlib events`: print the events of a run, and follow them."""

from __future__ import annotations

import argparse
import sys
import threading

from ..errors import ElasticError
from ..observe.event_text import format_event
from ..observe.job_status import EXIT_UNKNOWN
from ..observe.journal import EventStream
from ..observe.runs import AliveAgents, find_runs, launch_members
from .cli_output import print_error

POLL_INTERVAL_S = 0.5


def add_events(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `elasticlib events`."""
    parser.description = (
        "Print the events of a run's agents, one per line: local time, node, generation, kind and "
        "description. The events of several agents are sorted by time."
    )
    parser.epilog = (
        "exit status: 0 success, 1 the events cannot be read, 2 invalid command line, 4 no such "
        "run, 130 interrupted (0 with --follow)"
    )
    parser.add_argument(
        "named",
        nargs="?",
        default="",
        metavar="RUN",
        help="id of the run, its log directory, or a file of its events (default: the newest "
        "running job on this machine, or the newest)",
    )
    parser.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="print new events until all agents of the run on this machine have ended",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the lines of events.jsonl, one event each"
    )
    parser.set_defaults(run=_events)


def _events(args: argparse.Namespace) -> int:
    try:
        stream, pause = EventStream(find_runs(args.named)), threading.Event()
        _print_new(stream, as_json=args.json)
        while args.follow and _has_running_agent(stream):
            pause.wait(POLL_INTERVAL_S)
            stream.add(launch_members(stream.paths))
            _print_new(stream, as_json=args.json)
        # An agent that was killed may have recorded more just before.
        _print_new(stream, as_json=args.json)
        return 0
    except ElasticError as error:
        return print_error("events", error, EXIT_UNKNOWN)
    except BrokenPipeError:
        raise
    except OSError as error:
        return print_error("events", f"cannot read {error.filename}: {error.strerror}", 1)
    except KeyboardInterrupt:
        return 0 if args.follow else 130


def _print_new(stream: EventStream, *, as_json: bool) -> None:
    for event in stream.read():
        sys.stdout.write(f"{event.to_json() if as_json else format_event(event)}\n")
    sys.stdout.flush()


def _has_running_agent(stream: EventStream) -> bool:
    """Return True if an agent may still record events, as far as this machine knows."""
    agents = AliveAgents()
    return not all(agents.is_known_dead(path, start) for path, start in stream.unfinished.items())
