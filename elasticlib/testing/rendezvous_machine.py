"""Agents that do nothing but rendezvous, and a state machine that has them come, go and ask again.

After each step it waits for what must become of the job, and checks that those who are in it
stand in one world.
"""

from __future__ import annotations

import threading

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from ..errors import RendezvousClosedError
from ..rendezvous.interface import RendezvousInfo
from .rendezvous_cluster import PAUSE, Cluster, Node, in_thread
from .waiting import wait_until

LEAST, MOST, AGENTS = 2, 3, 4
"""Nodes of a generation at least and at most, and how many there are at most: one is a spare."""

NAMES = "abcdefghijklmnopqrstuvwxyz"


class Agent:
    """Meets, holds the generation until it changes, and meets again, until that has an end."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.again = threading.Event()
        self._held: RendezvousInfo | None = None
        self._run = in_thread(self._live)

    @property
    def held(self) -> RendezvousInfo | None:
        """The generation that it holds; None while it seeks one. Raises what went wrong."""
        if self.ended:
            self._run.result()
            return None
        return self._held

    @property
    def ended(self) -> bool:
        """Whether the job is over for it."""
        return self._run.done()

    def hear_of_the_end(self, patience: float) -> None:
        """It ends by itself, and without an error."""
        wait_until(f"{self.node.name} to hear of the end", lambda: self.ended, patience)
        assert self.held is None
        assert self.node.handler.is_closed()

    def _live(self) -> None:
        try:
            while self._meet_and_hold():
                self.again.clear()
        except RendezvousClosedError:
            return

    def _meet_and_hold(self) -> bool:
        """Whether there is anything left to meet for."""
        self._held = None
        self._held = self.node.meet()
        while not self.again.is_set():
            change = self.node.handler.wait_for_change(0.05)
            if change is not None:
                return not change.kind.is_final
            self.again.wait(PAUSE)
        return True


class RendezvousMachine(RuleBasedStateMachine):
    """Any history of a job's agents."""

    def __init__(self, cluster: Cluster, moment: float) -> None:
        super().__init__()
        self._cluster = cluster
        self._moment = moment
        self._agents: list[Agent] = []
        self._closed = False
        # The agents that were here when the job was closed. While one of them is alive, an agent
        # that starts gets the job's result; after that, it would start a new run.
        self._ended_with: list[Agent] = []
        self._came = 0

    def teardown(self) -> None:
        self._cluster.close()

    @precondition(lambda self: len(self._agents) < AGENTS and self._came < len(NAMES))
    @precondition(lambda self: self._ended_with or not self._closed)
    @rule()
    def join(self) -> None:
        node = self._cluster.node(NAMES[self._came], LEAST, MOST, max_restarts=1000)
        self._came += 1
        self._agents.append(Agent(node))
        self._settles()

    @precondition(lambda self: self._agents)
    @rule(which=st.integers(0, AGENTS - 1))
    def leave(self, which: int) -> None:
        agent = self._agents.pop(which % len(self._agents))
        if agent in self._ended_with:
            self._ended_with.remove(agent)
        before = 0 if agent.held is None else agent.held.generation
        assert agent.node.leaves() is True
        self._settles(after=before)
        wait_until(f"{agent.node.name} to end", lambda: agent.ended, self._cluster.patience)

    @precondition(lambda self: self._closed and not self._agents)
    @rule()
    def nothing_more(self) -> None:
        """The history is over, whatever number of steps was to be made."""

    @precondition(lambda self: self._members())
    @rule(which=st.integers(0, MOST - 1))
    def ask_again(self, which: int) -> None:
        members = self._members()
        self._anew(members[which % len(members)])

    @precondition(lambda self: self._members())
    @rule()
    def all_ask_again(self) -> None:
        self._anew(*self._members())

    @precondition(lambda self: self._members())
    @rule(which=st.integers(0, MOST - 1))
    def fail(self, which: int) -> None:
        members = self._members()
        before = _newest(members)
        failed = members[which % len(members)]
        # Consecutive quick failures delay a restart, unless the workers were killed.
        if failed.node.handler.report_failure("the test says so", killed=True):
            self._settles(after=before)

    @precondition(lambda self: self._agents)
    @rule(which=st.integers(0, AGENTS - 1))
    def close(self, which: int) -> None:
        self._agents[which % len(self._agents)].node.handler.set_closed()
        if not self._closed:
            self._closed = True
            self._ended_with = list(self._agents)
        self._settles()

    def _members(self) -> list[Agent]:
        return [agent for agent in self._agents if agent.held is not None]

    def _anew(self, *agents: Agent) -> None:
        before = _newest(agents)
        for agent in agents:
            agent.again.set()
        self._settles(after=before)

    def _settles(self, after: int = 0) -> None:
        """Wait for what must be: all over, nobody in, or one world later than `after`."""
        patience = self._cluster.patience
        if self._closed:
            for agent in self._agents:
                agent.hear_of_the_end(patience)
            return
        size = min(len(self._agents), MOST) if len(self._agents) >= LEAST else 0
        wait_until(
            f"{size} of {len(self._agents)} nodes in one generation after {after}",
            lambda: self._stands(size, after),
            patience,
        )
        members = self._members()
        infos = [info for agent in members if (info := agent.held) is not None]
        if size == 0 and self._agents:
            threading.Event().wait(self._moment)
            assert not self._members(), f"settled below the minimum of {LEAST} nodes"
        elif infos:
            self._cluster.check_one_world([agent.node for agent in members], infos)

    def _stands(self, size: int, after: int) -> bool:
        infos = [info for agent in self._agents if (info := agent.held) is not None]
        numbers = {info.generation for info in infos}
        if not infos or size == 0:
            return len(infos) == size
        return len(infos) == size and len(numbers) == 1 and min(numbers) > after


def _newest(agents: list[Agent] | tuple[Agent, ...]) -> int:
    return max(info.generation for agent in agents if (info := agent.held) is not None)
