"""The agents of a job as Ray has them: started on a node, waited for, told and taken back.

It decides nothing: what becomes of an agent is told as an event, and the driver acts on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import attrs

from ...agent.interface import RunResult
from ...clock import monotonic
from ...errors import ConfigError, ElasticError
from .agent import CALLS, NodeAgent, Told
from .options import RayOptions
from .placement import Placed

# Ray ends what an actor has started along with it, and would not spare those who clear up.
KEEP_GUARDIAN = {"RAY_kill_child_processes_on_worker_exit": "false"}


@attrs.frozen
class Began:
    """Ray found room for the agent, and it runs."""

    place: str


@attrs.frozen
class Ended:
    """The agent's run is over, for this node."""

    result: RunResult


@attrs.frozen
class Refused:
    """It cannot run as it was told to, here or elsewhere."""

    error: ElasticError


@attrs.frozen
class Lost:
    """Its process is no more, and what it knew with it."""

    reason: str


Event = Began | Ended | Refused | Lost


@attrs.define
class _Actor:
    handle: Any
    hello: Any
    ran: Any
    placed: Placed
    at: float
    """When it was placed; then, when it began to run."""


class Fleet:
    """All agents of one job that have been asked for and have not ended."""

    def __init__(self, ray: Any, told: Told, options: RayOptions) -> None:
        self._ray = ray
        self._told = ray.put(told)
        self._actors: dict[int, _Actor] = {}
        self._count = 0
        runtime_env = dict(options.runtime_env)
        runtime_env["env_vars"] = {**KEEP_GUARDIAN, **runtime_env.get("env_vars", {})}
        self._options = {
            **options.of_actor(told.config.nproc_per_node),
            "runtime_env": runtime_env,
            "max_concurrency": CALLS,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        self._kind = ray.remote(NodeAgent)

    def rooms(self) -> dict[str, Mapping[str, float]]:
        """The living nodes of the cluster, and all that each of them has."""
        return {n["NodeID"]: n["Resources"] for n in self._ray.nodes() if n["Alive"]}

    def placed(self) -> list[Placed]:
        """All agents, and for how long those wait that do not run."""
        now = monotonic()
        return [
            a.placed if a.placed.waiting is None else attrs.evolve(a.placed, waiting=now - a.at)
            for a in self._actors.values()
        ]

    def start(self, node: str) -> int:
        """Ask for an agent on this node; its number."""
        strategies = self._ray.util.scheduling_strategies
        strategy = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        kind = self._kind.options(scheduling_strategy=strategy, **self._options)
        handle = kind.remote(self._told)
        self._count += 1
        placed = Placed(self._count, node, waiting=0.0)
        hello, ran = handle.hello.remote(), handle.run.remote()
        self._actors[self._count] = _Actor(handle, hello, ran, placed, monotonic())
        return self._count

    def uptime(self, number: int) -> float:
        """Seconds for which an agent has run, or has been waited for."""
        return monotonic() - self._actors[number].at

    def wait(self, seconds: float) -> dict[int, Event]:
        """What has become of agents, by their numbers; at most one event each.

        Waits until there is something, and so many seconds at most. Who has ended, is refused or
        lost is not of the fleet any more when `drop` has been called.
        """
        asked = {}
        for number, actor in self._actors.items():
            asked[actor.ran] = number
            if actor.placed.waiting is not None:
                asked[actor.hello] = number
        ready, _ = self._ray.wait(list(asked), num_returns=1, timeout=seconds)
        return {asked[ref]: self._read(self._actors[asked[ref]], ref) for ref in ready}

    def _read(self, actor: _Actor, ref: Any) -> Event:
        errors = self._ray.exceptions
        try:
            value = self._ray.get(ref)
        except errors.RuntimeEnvSetupError as error:
            return Refused(ConfigError(f"Ray cannot set up the agents' runtime_env: {error}"))
        except errors.RayTaskError as error:
            return Refused(ElasticError(f"an agent broke: {error}"))
        except errors.RayError as error:
            return Lost(f"{type(error).__name__}: {' '.join(str(error).split())}")
        if ref == actor.hello:
            actor.placed, actor.at = attrs.evolve(actor.placed, waiting=None), monotonic()
            return Began(str(value))
        return Refused(value) if isinstance(value, ElasticError) else Ended(value)

    def tell(self, number: int) -> None:
        """All that run, as if this signal had come; those that wait are not waited for."""
        for key, actor in list(self._actors.items()):
            if actor.placed.waiting is None:
                actor.handle.heed.remote(number)
            else:
                self.drop(key)

    def drop(self, number: int) -> None:
        """Take the agent back, whatever it does; its workers end with it."""
        actor = self._actors.pop(number)
        # What is dead already cannot be killed.
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(actor.handle, no_restart=True)

    def end(self) -> None:
        for number in list(self._actors):
            self.drop(number)
