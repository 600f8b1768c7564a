"""What would keep a job from running, found out beforehand: one list of looks, which `elasticlib
doctor` and `elasticrun --dry-run` both show.

All are taken at once, each in a thread of its own, and none is waited for beyond a limit.
"""

from __future__ import annotations

import contextlib
import queue
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

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


def of_machine(
    environment: Mapping[str, str],
    endpoints: Sequence[tuple[str, int]] = (),
    secret: bytes | None = None,
    config: LaunchConfig | None = None,
) -> dict[str, Look]:
    """By name, in the order in which their findings are shown. endpoints: of a TCP store. secret:
    to be shown there. config: of a launch that would meet there."""
    target = endpoints[0] if endpoints else None
    return {
        "versions": at.look_at_versions,
        "own name": partial(at.look_at_own_name, environment, target),
        "interface": partial(at.look_at_interfaces, environment, target),
        "bind": at.look_at_binding,
        **{
            join_endpoint(host, port): partial(at.look_at_endpoint, host, port, secret, config)
            for host, port in endpoints
        },
        "shared memory": at.look_at_shared_memory,
        "temporary": partial(at.look_at_locks, tempfile.gettempdir(), "temporary"),
        "limits": at.look_at_limits,
        "memory": at.look_at_memory,
        "signals": at.look_at_signals,
    }


def of_launch(
    config: LaunchConfig, entrypoint: Entrypoint, environment: Mapping[str, str]
) -> dict[str, Look]:
    """Of a launch, and of the machine that it is on."""
    endpoints, secret = [], None
    if config.rdzv_backend in TCP_BACKENDS and not config.alone:
        endpoints = [split_endpoint(name, STORE_PORT) for name in config.endpoints]
        with contextlib.suppress(ConfigError):  # it is found to be wrong by a look of its own
            secret = read_secret(environment, config.options.secret_file, "")
    return {
        "program": partial(at.look_at_program, config, entrypoint),
        "flags": partial(at.look_at_flags, config, environment),
        "ports": partial(at.look_at_ports, config, environment),
        "meeting place": partial(at.look_at_place, config),
        **of_machine(environment, endpoints, secret, config),
    }


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
