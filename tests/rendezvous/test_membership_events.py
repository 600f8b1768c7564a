"""The driver as the Membership of an agent: events, topics, watches, the lease of a stuck loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import ClassVar, TypeVar

import attrs
import pytest
from handler_cluster import TIMEOUTS, HandlerCluster

from elasticlib.clock import monotonic
from elasticlib.errors import RendezvousClosedError, StoreConnectionError
from elasticlib.options import RendezvousSettings, RendezvousTimeouts
from elasticlib.rendezvous.blame import Evidence, FailureDetails, FailureKind
from elasticlib.rendezvous.driver import MembershipEvent
from elasticlib.rendezvous.handler import DynamicRendezvousHandler
from elasticlib.rendezvous.interface import (
    ChangeKind,
    Joined,
    MembershipChanged,
    PeerMessages,
    Publish,
    Report,
    ReportKind,
    Topic,
)
from elasticlib.rendezvous.membership import Node
from elasticlib.rendezvous.store_layout import StoreKeys
from elasticlib.stores.interface import CancelWatch, Listing, WatchResult
from elasticlib.stores.memory_store import MemoryStore
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_server import TcpStoreServer
from elasticlib.testing.rendezvous_cluster import FakeBootstrapStore
from elasticlib.testing.waiting import wait_until

TIMEOUT_S = 60.0
Event = TypeVar("Event", Joined, MembershipChanged, PeerMessages)
# No watch is needed, or possible, if nodes poll faster than this.
PATIENT = RendezvousTimeouts(join_timeout=60.0, lease_ttl=1000.0, keep_alive_interval=100.0)


class Agent:
    """An agent's loop, as far as its membership sees it."""

    def __init__(self, handler: DynamicRendezvousHandler) -> None:
        self.handler = handler
        self.membership = handler.membership(slots=handler.node.slots)
        self.events: queue.SimpleQueue[MembershipEvent] = queue.SimpleQueue()
        self.turned_at: Callable[[], float] = monotonic
        self.attempt = 0
        self.membership.open(self.events.put, lambda: self.turned_at())

    def join(self) -> None:
        self.attempt += 1
        self.membership.join(self.attempt)

    def next(self, kind: type[Event]) -> Event:
        """Return the next event, which must be of this kind and of the last attempt."""
        event = self.events.get(timeout=TIMEOUT_S)
        assert isinstance(event, kind), event
        assert event.attempt == self.attempt
        return event

    def wait_for(self, topic: Topic, by_rank: dict[int, bytes]) -> None:
        """Wait until exactly these values of a topic have been delivered."""
        while True:
            event = self.next(PeerMessages)
            if (event.topic, event.by_rank) == (topic, by_rank):
                return


def join_all(*agents: Agent) -> list[Joined]:
    for agent in agents:
        agent.join()
    return [agent.next(Joined) for agent in agents]


def form(
    cluster: HandlerCluster, count: int = 2, timeouts: RendezvousTimeouts | None = None
) -> list[Agent]:
    """Return agents in one generation, ordered by rank."""
    settings = RendezvousSettings(count, count, max_restarts=100)
    rest = () if timeouts is None else (timeouts,)
    agents = [Agent(cluster.handler(name, settings, *rest)) for name in "abc"[:count]]
    joined = join_all(*agents)
    ranks = [event.generation.rank for event in joined]
    assert sorted(ranks) == list(range(count))
    return [agents[ranks.index(rank)] for rank in range(count)]


def test_each_member_receives_its_generation_and_then_each_change(cluster: HandlerCluster) -> None:
    settings = RendezvousSettings(1, 2, last_call_timeout=0.0)
    first, second = (Agent(cluster.handler(name, settings)) for name in "ab")
    (joined,) = join_all(first)
    assert joined.generation.world_size == 1
    second.join()
    assert first.next(MembershipChanged).change.kind is ChangeKind.RESIZE
    first.join()
    again, other = first.next(Joined).generation, second.next(Joined).generation
    assert {again.rank, other.rank} == {0, 1}
    assert again.bootstrap_store_info == other.bootstrap_store_info


def test_a_drain_followed_by_the_end_of_the_job_is_reported_as_both(
    cluster: HandlerCluster,
) -> None:
    first, second = form(cluster)
    second.membership.report(Report(ReportKind.DRAIN, "the test drains it"))
    assert first.next(MembershipChanged).change.kind is ChangeKind.RESIZE
    first.handler.set_closed()
    assert first.next(MembershipChanged).change.kind is ChangeKind.ABORTED


def test_a_node_that_is_lost_during_a_planned_stop_is_reported_to_those_that_wait_for_it(
    cluster: HandlerCluster,
) -> None:
    agents = form(cluster, 3, attrs.evolve(TIMEOUTS, loop_timeout=1.0))
    drained, killed, waiting = agents
    drained.membership.report(Report(ReportKind.DRAIN, "the test drains it"))
    for agent in agents:
        assert agent.next(MembershipChanged).change.kind is ChangeKind.RESIZE
    # The lease of this node ends, as if its agent had been killed.
    killed.turned_at = lambda: float("-inf")
    change = waiting.next(MembershipChanged).change
    assert change.kind is ChangeKind.GENERATION_ENDED
    assert "was lost (killed, or cut off)" in change.reason


def test_a_join_of_a_membership_that_is_closed_gets_the_reason(cluster: HandlerCluster) -> None:
    agent = Agent(cluster.handler("a", RendezvousSettings(2, 2)))
    agent.join()
    assert agent.membership.close(TIMEOUT_S)
    event = agent.next(MembershipChanged)
    assert isinstance(event.error, RendezvousClosedError)
    assert event.change.kind is ChangeKind.ABORTED
    agent.join()
    assert agent.next(MembershipChanged).change == event.change
    assert agent.membership.close(TIMEOUT_S)
    assert agent.events.empty()


def test_the_end_of_the_job_is_the_last_change(cluster: HandlerCluster) -> None:
    (agent,) = form(cluster, 1)
    agent.membership.report(Report(ReportKind.SUCCESS))
    assert agent.next(MembershipChanged).change.kind is ChangeKind.SUCCEEDED
    agent.handler.shutdown()
    assert agent.events.empty()


def test_a_joining_node_learns_whether_its_peers_can_regroup(cluster: HandlerCluster) -> None:
    settings = RendezvousSettings(1, 2, last_call_timeout=0.0)
    first, second = (Agent(cluster.handler(name, settings)) for name in "ab")
    assert second.membership.prepare() == (False, False), "no node has joined yet"
    join_all(first)
    first.membership.report(Report(ReportKind.CAN_REGROUP))
    first.membership.report(Report(ReportKind.TAKES_NOTICES))
    wait_until(
        "what the first node reports",
        lambda: second.membership.prepare() == (True, True),
        TIMEOUT_S,
    )
    second.membership.report(Report(ReportKind.SLOTS, slots=0))
    second.join()
    second.membership.report(Report(ReportKind.SLOTS, slots=2))
    assert first.next(MembershipChanged).change.kind is ChangeKind.RESIZE
    first.join()
    assert second.next(Joined).generation.assignment.local_world_size == 2


def test_all_nodes_receive_the_verdict_with_the_details_of_the_failure(
    cluster: HandlerCluster,
) -> None:
    settings = RendezvousSettings(3, 3, max_restarts=1)
    agents = [Agent(cluster.handler(name, settings)) for name in "abc"]
    raised = Evidence(FailureKind.RAISED, "ValueError: x", rank=1, failed_at_s=1.0)
    details = FailureDetails(rank=1, local_rank=0, pid=7, returncode=3, traceback="Traceback ...")
    for number in (1, 2):
        joined = join_all(*agents)
        if number == 2:
            verdicts = {event.generation.verdict for event in joined}
            assert len(verdicts) == 1
            (verdict,) = verdicts
            assert verdict is not None
            assert (verdict.named_host, verdict.details) == ("b", None)
        # The first node to report has only noticed that its peer is gone.
        collective = Evidence(FailureKind.COLLECTIVE, "Connection closed by peer", rank=0)
        agents[0].membership.report(
            Report(
                ReportKind.FAILURE, evidence=collective, details=FailureDetails(message="not kept")
            )
        )
        agents[1].membership.report(Report(ReportKind.FAILURE, evidence=raised, details=details))
        for agent in agents:
            assert agent.next(MembershipChanged).change.kind is ChangeKind.GENERATION_ENDED
    for agent in agents:
        agent.join()
    for agent in agents:
        change = agent.next(MembershipChanged).change
        assert change.kind is ChangeKind.FAILED
        assert change.reason == "b: ValueError: x (1 of 1 restarts used)"
        assert change.verdict is not None
        assert (change.verdict.named_host, change.verdict.evidence.rank) == ("b", 1)
        assert change.verdict.followers == (0,)
        assert change.verdict.details == details


# Topics


def test_all_nodes_receive_the_last_value_of_each_node(cluster: HandlerCluster) -> None:
    first, second = form(cluster)
    first.membership.publish(Publish(Topic.STOP, b"1"))
    for agent in (first, second):
        agent.wait_for(Topic.STOP, {0: b"1"})
    second.membership.publish(Publish(Topic.STOP, b"2"))
    first.membership.publish(Publish(Topic.STOP, b"3"))
    first.membership.publish(Publish(Topic.HANG, b"h"))
    for agent in (first, second):
        agent.wait_for(Topic.STOP, {0: b"3", 1: b"2"})
    second.wait_for(Topic.HANG, {0: b"h"})


def test_a_value_that_is_published_just_before_a_join_reaches_the_others(
    cluster: HandlerCluster,
) -> None:
    first, second = form(cluster)
    first.membership.publish(Publish(Topic.OVER, b"x"))
    first.join()
    found: list[MembershipEvent] = []
    while not found or not isinstance(found[-1], PeerMessages):
        found.append(second.events.get(timeout=TIMEOUT_S))
    assert found[-1] == PeerMessages(second.attempt, Topic.OVER, {0: b"x"})


def test_values_are_of_one_generation_only(cluster: HandlerCluster) -> None:
    agents = form(cluster)
    agents[0].membership.publish(Publish(Topic.OVER, b"old"))
    for agent in agents:
        agent.wait_for(Topic.OVER, {0: b"old"})
    agents[0].membership.report(Report(ReportKind.FAILURE, "exit code 1"))
    for agent in agents:
        agent.next(MembershipChanged)
    ranks = [event.generation.rank for event in join_all(*agents)]
    agents[0].membership.publish(Publish(Topic.OVER, b"new"))
    for agent in agents:
        assert agent.next(PeerMessages).by_rank == {ranks[0]: b"new"}


def test_a_value_is_published_again_if_the_store_has_lost_it(cluster: HandlerCluster) -> None:
    first, second = form(cluster)
    first.membership.publish(Publish(Topic.STOP, b"1"))
    second.wait_for(Topic.STOP, {0: b"1"})
    for entry in cluster.store.list(f"{StoreKeys('run').exchange_prefix()}").entries:
        cluster.store.delete(entry.key)
    second.wait_for(Topic.STOP, {0: b"1"})


def test_keys_of_no_node_are_dropped(cluster: HandlerCluster) -> None:
    first, second = form(cluster)
    snapshot = second.membership.node.snapshot
    assert snapshot is not None
    prefix = StoreKeys("run").exchange_prefix(snapshot.membership_id)
    for rest in (
        "stop/x",
        "stop/2",
        "stop/01",
        "stop/-1",
        f"stop/{'9' * 900}",
        "stop/٣",
        "x/0",
        "stop",
    ):
        cluster.store.set(prefix + rest, b"garbage")
    first.membership.publish(Publish(Topic.STOP, b"1"))
    assert second.next(PeerMessages).by_rank == {0: b"1"}


def test_a_node_alone_receives_its_own_values(cluster: HandlerCluster) -> None:
    (agent,) = form(cluster, 1)
    agent.membership.publish(Publish(Topic.STOP, b"1"))
    assert agent.next(PeerMessages).by_rank == {0: b"1"}


# Watches


class WaitRaises(MemoryStore):
    """A user's store, which can only wait, and whose `wait` raises now and then."""

    num_failures = 0

    def watch(
        self,
        prefix: str,
        *,
        after: int,
        callback: Callable[[WatchResult], None],
        with_listing: bool = False,
    ) -> CancelWatch | None:
        del prefix, after, callback, with_listing
        return None

    def wait(self, prefix: str, *, after: int, timeout: float) -> bool:
        type(self).num_failures += 1
        if self.num_failures % 3 == 1:
            raise ZeroDivisionError("a fault of the user's store")
        return super().wait(prefix, after=after, timeout=timeout)


class WatchRaises(MemoryStore):
    """A user's store whose `watch` raises."""

    def watch(
        self,
        prefix: str,
        *,
        after: int,
        callback: Callable[[WatchResult], None],
        with_listing: bool = False,
    ) -> CancelWatch | None:
        del prefix, after, callback, with_listing
        raise ZeroDivisionError("a fault of the user's store")


@pytest.mark.parametrize("kind", [WaitRaises, WatchRaises])
def test_an_exception_of_a_store_costs_one_watch(
    cluster: HandlerCluster, kind: type[MemoryStore]
) -> None:
    cluster.store = kind()
    agents = form(cluster, 2, PATIENT)
    for _ in range(3):
        agents[1].membership.publish(Publish(Topic.STOP, b"1"))
        for agent in agents:
            agent.wait_for(Topic.STOP, {agents[1].membership.node.intent.node.group_rank: b"1"})
        killed = Evidence(FailureKind.KILLED, "killed by SIGKILL")  # its restart has no delay
        agents[0].membership.report(Report(ReportKind.FAILURE, evidence=killed))
        for agent in agents:
            assert agent.next(MembershipChanged).change.kind is ChangeKind.GENERATION_ENDED
        join_all(*agents)


class CountsWatches(TcpStore):
    """A store that counts open watches. None ends without a change or a cancellation."""

    open_watches: ClassVar[set[object]] = set()

    def watch(
        self,
        prefix: str,
        *,
        after: int,
        callback: Callable[[WatchResult], None],
        with_listing: bool = False,
    ) -> CancelWatch:
        token = object()

        def on_end(result: WatchResult) -> None:
            self.open_watches.discard(token)
            callback(result)

        self.open_watches.add(token)
        cancel = super().watch(prefix, after=after, callback=on_end, with_listing=with_listing)

        def cancel_once() -> None:
            self.open_watches.discard(token)
            cancel()

        return cancel_once


def test_the_number_of_watches_keys_and_threads_does_not_grow_with_the_generations(
    cluster: HandlerCluster,
) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(TcpStoreServer("127.0.0.1", 0))
        for name in "ab":
            store = stack.enter_context(CountsWatches(server.host, server.port))
            node = Node(id=f"{name}-1", host=name, address="127.0.0.1", slots=1)
            handler = DynamicRendezvousHandler(
                store,
                "run",
                node,
                RendezvousSettings(2, 2),
                timeouts=PATIENT,
                open_bootstrap_store=FakeBootstrapStore,
            )
            stack.callback(handler.shutdown)
            cluster.handlers.append(handler)
        agents = [Agent(handler) for handler in cluster.handlers]  # type: ignore[arg-type]
        counts = set()
        for _ in range(20):
            join_all(*agents)
            agents[0].membership.publish(Publish(Topic.STOP, b"1"))
            for agent in agents:
                assert agent.next(PeerMessages).topic is Topic.STOP
            counts.add(len(store.list("").entries))
            agents[0].membership.report(Report(ReportKind.RESTART, "a request"))
            for agent in agents:
                assert agent.next(MembershipChanged).change.kind is ChangeKind.RESTART
        assert len(counts) <= 2, counts
        assert len(CountsWatches.open_watches) <= 4
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("rendezvous") == 2
        assert names.count("rendezvous-watch") == 0
        for agent in agents:
            agent.handler.shutdown()
        assert not CountsWatches.open_watches


# The lease


def test_the_lease_of_a_loop_that_does_not_turn_is_withdrawn_until_it_turns(
    cluster: HandlerCluster,
) -> None:
    timeouts = RendezvousTimeouts(
        join_timeout=60.0, lease_ttl=30.0, keep_alive_interval=0.05, loop_timeout=1.0
    )
    stuck, other = form(cluster, 2, timeouts)
    stopped_at = monotonic()
    stuck.turned_at = lambda: stopped_at
    assert "lost" in other.next(MembershipChanged).change.reason
    assert monotonic() - stopped_at < 20.0
    stuck.turned_at = monotonic
    stuck.next(MembershipChanged)
    join_all(stuck, other)


def test_a_store_that_is_unreachable_blocks_no_caller(cluster: HandlerCluster) -> None:
    called, released = threading.Event(), threading.Event()

    class Blocked(MemoryStore):
        def list(self, prefix: str) -> Listing:
            del prefix
            called.set()
            released.wait(TIMEOUT_S)
            raise StoreConnectionError("unreachable")

    cluster.store = Blocked()
    agent = Agent(cluster.handler("a", RendezvousSettings(1, 1)))
    started_at = monotonic()
    agent.join()
    assert called.wait(TIMEOUT_S)
    agent.membership.report(Report(ReportKind.DRAIN, "x"))
    agent.membership.publish(Publish(Topic.STOP, b"1"))
    assert not agent.membership.close(0.1)
    assert monotonic() - started_at < 30.0
    assert agent.next(MembershipChanged).change.kind is ChangeKind.ABORTED
    released.set()
