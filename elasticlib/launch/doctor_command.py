"""`elasticlib doctor`: what on this machine would keep a job from running, and what to do about it.

All looks are taken at once, each in a thread of its own, and none is waited for beyond a limit.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from ..clock import monotonic
from ..endpoint import STORE_PORT, split_endpoint
from ..errors import ConfigError
from ..threads import helper
from ..visible import visible
from .endpoints import read_secret

if TYPE_CHECKING:
    from .checks import Finding

LIMIT = 12.0
"""Seconds for all looks together."""
VERSION = 1
_WORDS = {True: "ok", False: "BAD", None: "note"}
Look = Callable[[], "Iterator[Finding]"]


def add_doctor(commands: Any) -> None:
    """Add the subcommand to those of `elasticlib`."""
    parser = commands.add_parser(
        "doctor",
        help="look for what would keep a job from running here",
        description="Look at this machine, and at an endpoint, for what would keep a job from "
        "running, and say what to do about it. Exit status: 0 if nothing is bad, 1 if something "
        "is, 2 for a command line or a secret that makes no sense.",
    )
    parser.add_argument(
        "--rdzv-endpoint",
        type=_endpoint,
        metavar="HOST[:PORT]",
        help=f"where the nodes of the job meet (port {STORE_PORT} by default)",
    )
    parser.add_argument("--secret-file", metavar="PATH", help="holds the job's secret, if any")
    parser.add_argument("--log-dir", metavar="DIR", help="where logs, or a file store, would go")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.set_defaults(run=_run)


def _endpoint(text: str) -> tuple[str, int]:
    try:
        return split_endpoint(text, STORE_PORT)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _run(chosen: argparse.Namespace) -> int:
    try:
        secret = read_secret(os.environ, chosen.secret_file, "--secret-file")
    except ConfigError as error:
        print(f"elasticlib doctor: error: {error}", file=sys.stderr)
        return 2
    findings = taken(_looks(chosen.rdzv_endpoint, chosen.log_dir, secret))
    if chosen.json:
        said = [attrs.asdict(finding) for finding in findings]
        print(json.dumps({"version": VERSION, "findings": said}, indent=2))
    else:
        width = max(len(finding.check) for finding in findings)
        for found in findings:
            print(f"{_WORDS[found.good]:4}  {found.check:{width}}  {visible(found.sentence)}")
    return 1 if any(finding.good is False for finding in findings) else 0


def _looks(
    target: tuple[str, int] | None, log_dir: str | None, secret: bytes | None
) -> dict[str, Look]:
    """By name, in the order in which they are told."""
    # Here, as the other commands are not to wait for what the looks import.
    from . import diagnosis
    from . import network_diagnosis as network

    found: dict[str, Look] = {"versions": diagnosis.look_at_versions}
    found["own name"] = partial(network.look_at_own_name, os.environ, target)
    found["interface"] = partial(network.look_at_interfaces, os.environ, target)
    found["bind"] = network.look_at_binding
    if target is not None:
        found["endpoint"] = partial(network.look_at_endpoint, *target, secret)
    found["shared memory"] = diagnosis.look_at_shared_memory
    if log_dir is not None:
        found["--log-dir"] = partial(diagnosis.look_at_locks, log_dir, "--log-dir")
    temporary = tempfile.gettempdir()
    found["temporary"] = partial(diagnosis.look_at_locks, temporary, "temporary")
    found["limits"] = diagnosis.look_at_limits
    found["memory"] = diagnosis.look_at_memory
    found["clock"] = diagnosis.look_at_clock
    found["signals"] = diagnosis.look_at_signals
    found["leftovers"] = diagnosis.look_at_leftovers
    return found


def taken(looks: dict[str, Look], limit: float = LIMIT) -> list[Finding]:
    """What all of them find, in their order; a look that takes longer than the limit, in seconds,
    is left to itself and said to."""
    from .checks import Finding

    answers: queue.SimpleQueue[tuple[str, list[Finding]]] = queue.SimpleQueue()
    for name, look in looks.items():
        helper(partial(_take, name, look, answers.put), f"look-{name}").start()
    found: dict[str, list[Finding]] = {}
    deadline = monotonic() + limit
    while len(found) < len(looks):
        try:
            name, findings = answers.get(timeout=max(0.0, deadline - monotonic()))
        except queue.Empty:
            break
        found[name] = findings
    late = f"not found out within {limit:g} s: what it looks at hangs, or this machine is busy"
    return [one for name in looks for one in found.get(name, [Finding(name, None, late)])]


def _take(name: str, look: Look, put: Callable[[tuple[str, list[Finding]]], None]) -> None:
    try:
        put((name, list(look())))
    except Exception as error:
        from .checks import Finding

        sentence = f"could not be found out: {type(error).__name__}: {error}"
        put((name, [Finding(name, None, sentence)]))
