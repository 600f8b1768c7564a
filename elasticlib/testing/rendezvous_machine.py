"""State machine of the rendezvous contract suite: agents without workers join and leave at random.

After each step, the machine waits until the job is in the expected state, and checks that all
members are in the same generation.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from ..errors import RendezvousClosedError
from ..rendezvous.blame import FailureKind
from ..rendezvous.interface import RendezvousInfo
from .rendezvous_cluster import POLL_INTERVAL_S, Cluster, HandlerNode, report_failure, run_in_thread
from .waiting import wait_until

MIN_NODES, MAX_NODES = 2, 3  # of a generation
MAX_AGENTS = 4  # at the same time; one of them is a spare
MAX_FAILURES = 2  # of an agent: a handler may exclude a node that fails more often

NAMES = "abcdefghijklmnopqrstuvwxyz"


class MachineAgent:
    """An agent without workers. It joins a generation, waits for a change, and joins the next."""

    def __init__(self, node: HandlerNode) -> None:
        self.node = node
        self.rejoin = threading.Event()  # set by the machine: join again without a change
        self.num_failures = 0
        self._info: RendezvousInfo | None = None
        self._run = run_in_thread(self._join_until_closed)

    @property
    def info(self) -> RendezvousInfo | None:
        """Current generation, or None while the agent joins. Raises the error of the agent."""
        if self.is_finished:
            self._run.result()
            return None
        return self._info

    @property
    def is_finished(self) -> bool:
        return self._run.done()

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait until the agent has learned that the job is closed, and has finished."""
        wait_until(f"{self.node.name} to finish", lambda: self.is_finished, timeout_s)
        assert self.info is None
        assert self.node.handler.is_closed()

    def _join_until_closed(self) -> None:
        try:
            while self._join_and_wait_for_change():
                self.rejoin.clear()
        except RendezvousClosedError:
            return

    def _join_and_wait_for_change(self) -> bool:
        """Return True if the agent must join again, or False if the job is finished."""
        self._info = None
        self._info = self.node.next_rendezvous()
        while not self.rejoin.is_set():
            change = self.node.handler.wait_for_change(0.05)
            if change is not None:
                return not change.kind.is_final
            self.rejoin.wait(POLL_INTERVAL_S)
        return True


class RendezvousMachine(RuleBasedStateMachine):
    """Random actions of the agents of one job."""

    def __init__(self, cluster: Cluster, observation_s: float) -> None:
        super().__init__()
        self._cluster = cluster
        self._observation_s = observation_s
        self._agents: list[MachineAgent] = []  # the agents that have not left
        self._is_closed = False
        # The agents that were alive when the job was closed. While one of them is alive, an agent
        # that starts gets the job's result. Later, it would start a new run.
        self._alive_at_close: list[MachineAgent] = []
        self._num_started = 0

    def teardown(self) -> None:
        self._cluster.close()

    @precondition(lambda self: len(self._agents) < MAX_AGENTS and self._num_started < len(NAMES))
    @precondition(lambda self: self._alive_at_close or not self._is_closed)
    @rule()
    def join(self) -> None:
        name = NAMES[self._num_started]
        node = self._cluster.node(name, MIN_NODES, MAX_NODES, max_restarts=1000)
        self._num_started += 1
        self._agents.append(MachineAgent(node))
        self._wait_until_settled()

    @precondition(lambda self: self._agents)
    @rule(index=st.integers(0, MAX_AGENTS - 1))
    def leave(self, index: int) -> None:
        agent = self._agents.pop(index % len(self._agents))
        if agent in self._alive_at_close:
            self._alive_at_close.remove(agent)
        generation = 0 if agent.info is None else agent.info.generation
        assert agent.node.shutdown() is True
        self._wait_until_settled(after=generation)
        timeout_s = self._cluster.timeout_s
        wait_until(f"{agent.node.name} to finish", lambda: agent.is_finished, timeout_s)

    @precondition(lambda self: self._is_closed and not self._agents)
    @rule()
    def do_nothing(self) -> None:
        """Fill the remaining steps of a history whose job is closed and has no agents left."""

    @precondition(lambda self: self._members())
    @rule(index=st.integers(0, MAX_NODES - 1))
    def one_rejoins(self, index: int) -> None:
        members = self._members()
        self._rejoin(members[index % len(members)])

    @precondition(lambda self: self._members())
    @rule()
    def all_rejoin(self) -> None:
        self._rejoin(*self._members())

    @precondition(lambda self: self._members_that_may_fail())
    @rule(index=st.integers(0, MAX_NODES - 1))
    def fail(self, index: int) -> None:
        generation = _newest_generation(self._members())
        candidates = self._members_that_may_fail()
        failed = candidates[index % len(candidates)]
        failed.num_failures += 1
        # Consecutive quick failures delay a restart, unless the workers were killed.
        if report_failure(failed.node.handler, "failure reported by the test", FailureKind.KILLED):
            self._wait_until_settled(after=generation)

    @precondition(lambda self: self._agents)
    @rule(index=st.integers(0, MAX_AGENTS - 1))
    def close(self, index: int) -> None:
        self._agents[index % len(self._agents)].node.handler.set_closed()
        if not self._is_closed:
            self._is_closed = True
            self._alive_at_close = list(self._agents)
        self._wait_until_settled()

    def _members(self) -> list[MachineAgent]:
        return [agent for agent in self._agents if agent.info is not None]

    def _members_that_may_fail(self) -> list[MachineAgent]:
        return [agent for agent in self._members() if agent.num_failures < MAX_FAILURES]

    def _infos(self) -> list[RendezvousInfo]:
        return [info for agent in self._agents if (info := agent.info) is not None]

    def _rejoin(self, *agents: MachineAgent) -> None:
        generation = _newest_generation(agents)
        for agent in agents:
            agent.rejoin.set()
        self._wait_until_settled(after=generation)

    def _wait_until_settled(self, after: int = 0) -> None:
        """Wait until the job is in the expected state.

        The expected state is: all agents finished if the job is closed; no generation if there are
        fewer agents than MIN_NODES; else one generation with a number above `after`.
        """
        timeout_s = self._cluster.timeout_s
        if self._is_closed:
            for agent in self._agents:
                agent.wait_for_end(timeout_s)
            return
        size = min(len(self._agents), MAX_NODES) if len(self._agents) >= MIN_NODES else 0
        wait_until(
            f"{size} of {len(self._agents)} nodes in one generation after {after}",
            lambda: self._is_settled(size, after),
            timeout_s,
        )
        members, infos = self._members(), self._infos()
        if size == 0 and self._agents:
            threading.Event().wait(self._observation_s)
            assert not self._members(), f"a generation has fewer than {MIN_NODES} nodes"
        elif infos:
            self._cluster.check_single_generation([agent.node for agent in members], infos)

    def _is_settled(self, size: int, after: int) -> bool:
        infos = self._infos()
        numbers = {info.generation for info in infos}
        if not infos or size == 0:
            return len(infos) == size
        return len(infos) == size and len(numbers) == 1 and min(numbers) > after


def _newest_generation(agents: Sequence[MachineAgent]) -> int:
    return max(info.generation for agent in agents if (info := agent.info) is not None)
