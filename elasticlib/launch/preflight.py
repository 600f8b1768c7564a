"""What would keep a job from running, found out beforehand: one list of looks, which `elasticlib
doctor` and `elasticrun --dry-run` both show.

All are taken at once, each in a thread of its own, and none is waited for beyond a limit.
"""

from __future__ import annotations

import contextlib
import queue
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import attrs

from ..clock import monotonic
from ..endpoint import STORE_PORT, join_endpoint, split_endpoint
from ..errors import ConfigError
from ..threads import helper
from ..workers.spec import Entrypoint
from . import looks as at
from .config import TCP_BACKENDS, LaunchConfig
from .endpoints import read_secret
from .looks import Finding as Finding

LIMIT = 12.0
"""Seconds for all looks together."""
Look = Callable[[], Iterable[Finding]]


@attrs.frozen(kw_only=True)
class Subject:
    """What is looked at: this machine and, where they are known, a launch or a place to meet.

    endpoints: of a TCP store. secret: to be shown there. folder: where logs, or a file store, would
    go.
    """

    environment: Mapping[str, str]
    config: LaunchConfig | None = None
    entrypoint: Entrypoint | None = None
    endpoints: tuple[tuple[str, int], ...] = ()
    secret: bytes | None = None
    folder: str | None = None


def of_launch(
    config: LaunchConfig, entrypoint: Entrypoint, environment: Mapping[str, str]
) -> Subject:
    """A launch and the machine that it is on."""
    endpoints, secret = [], None
    if config.rdzv_backend in TCP_BACKENDS and not config.alone:
        endpoints = [split_endpoint(name, STORE_PORT) for name in config.endpoints]
        with contextlib.suppress(ConfigError):  # it is found to be wrong by a look of its own
            secret = read_secret(environment, config.options.secret_file, "")
    return Subject(
        environment=environment,
        config=config,
        entrypoint=entrypoint,
        endpoints=tuple(endpoints),
        secret=secret,
    )


def preflight(subject: Subject) -> list[Finding]:
    """All that is found, in the order of `looks_at`."""
    return taken(looks_at(subject))


def looks_at(subject: Subject) -> dict[str, Look]:
    """By name, in the order in which their findings are shown."""
    environment, config = subject.environment, subject.config
    endpoints = subject.endpoints
    target = endpoints[0] if endpoints else None
    found: dict[str, Look] = {}
    if config is not None and subject.entrypoint is not None:
        found["program"] = partial(at.look_at_program, config, subject.entrypoint)
        found["flags"] = partial(at.look_at_flags, config, environment)
        found["ports"] = partial(at.look_at_ports, config, environment)
        found["meeting place"] = partial(at.look_at_place, config)
    found["versions"] = at.look_at_versions
    found["own name"] = partial(at.look_at_own_name, environment, target)
    found["interface"] = partial(at.look_at_interfaces, environment, target)
    found["bind"] = at.look_at_binding
    for host, port in endpoints:
        found[join_endpoint(host, port)] = partial(
            at.look_at_endpoint, host, port, subject.secret, config
        )
    found["shared memory"] = at.look_at_shared_memory
    if subject.folder is not None:
        found["--log-dir"] = partial(at.look_at_locks, subject.folder, "--log-dir")
    found["temporary"] = partial(at.look_at_locks, tempfile.gettempdir(), "temporary")
    found["limits"] = at.look_at_limits
    found["memory"] = at.look_at_memory
    found["clock"] = at.look_at_clock
    found["signals"] = at.look_at_signals
    if config is None:  # no launch fails for them
        found["leftovers"] = at.look_at_leftovers
    return found


def taken(looks: Mapping[str, Look], limit: float = LIMIT) -> list[Finding]:
    """What all of them find, in their order; a look that takes longer than the limit, in seconds,
    is left to itself and said to."""
    answers: queue.SimpleQueue[tuple[str, list[Finding]]] = queue.SimpleQueue()

    def take(name: str, look: Look) -> None:
        try:
            answers.put((name, list(look())))
        except Exception as error:
            sentence = f"the look failed: {type(error).__name__}: {error}"
            answers.put((name, [Finding(name, None, sentence)]))

    for name, look in looks.items():
        helper(partial(take, name, look), f"look-{name}").start()
    found: dict[str, list[Finding]] = {}
    deadline = monotonic() + limit
    while len(found) < len(looks):
        try:
            name, findings = answers.get(timeout=max(0.0, deadline - monotonic()))
        except queue.Empty:
            break
        found[name] = findings
    late = f"no answer within {limit:g} s: what is looked at hangs, or this machine is busy"
    return [one for name in looks for one in found.get(name, [Finding(name, None, late)])]
