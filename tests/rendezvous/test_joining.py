"""`start_join` delivers the generation and its changes to a callback."""

from __future__ import annotations

import queue

import pytest
from test_handlers import Cluster

from elasticlib.errors import RendezvousClosedError
from elasticlib.rendezvous.interface import Change, ChangeKind, RendezvousHandler, RendezvousInfo
from elasticlib.rendezvous.membership import RendezvousSettings
from elasticlib.testing.waiting import wait_until

SECONDS = 60.0
Outcomes = queue.SimpleQueue[RendezvousInfo | Change | Exception]


def joined(handler: RendezvousHandler) -> Outcomes:
    outcomes: Outcomes = queue.SimpleQueue()
    assert handler.start_join(outcomes.put)
    return outcomes


def test_each_member_receives_its_generation_and_then_each_change(cluster: Cluster) -> None:
    limits = RendezvousSettings(1, 2, last_call_timeout=0.0)
    first, second = (cluster.node(name, limits) for name in "ab")
    of_first = joined(first)
    alone = of_first.get(timeout=SECONDS)
    assert isinstance(alone, RendezvousInfo)
    assert alone.world_size == 1
    of_second = joined(second)
    resize = of_first.get(timeout=SECONDS)
    assert isinstance(resize, Change)
    assert resize.kind is ChangeKind.RESIZE
    again = joined(first).get(timeout=SECONDS)
    assert isinstance(again, RendezvousInfo)
    other = of_second.get(timeout=SECONDS)
    assert isinstance(other, RendezvousInfo)
    assert {again.rank, other.rank} == {0, 1}
    assert again.bootstrap_store_info == other.bootstrap_store_info
    assert of_first.empty()  # what the first call was told ended with the second


def test_a_drain_followed_by_the_end_of_the_job_is_reported_as_both(cluster: Cluster) -> None:
    limits = RendezvousSettings(2, 2)
    first, second = (cluster.node(name, limits) for name in "ab")
    of_first, of_second = joined(first), joined(second)
    assert isinstance(of_first.get(timeout=SECONDS), RendezvousInfo)
    assert isinstance(of_second.get(timeout=SECONDS), RendezvousInfo)
    second.report_drain("the test drains it")
    drain = of_first.get(timeout=SECONDS)
    assert isinstance(drain, Change)
    assert drain.kind is ChangeKind.RESIZE
    first.set_closed()
    end = of_first.get(timeout=SECONDS)
    assert isinstance(end, Change)
    assert end.kind is ChangeKind.ABORTED


def test_a_join_of_a_handler_that_is_shut_down_gets_an_error(cluster: Cluster) -> None:
    handler = cluster.node("a", RendezvousSettings(2, 2))
    outcomes = joined(handler)
    handler.shutdown()
    with pytest.raises(RendezvousClosedError, match="left"):
        raise outcomes.get(timeout=SECONDS)  # type: ignore[misc]
    assert outcomes.empty()


def test_the_end_of_the_job_is_the_last_change(cluster: Cluster) -> None:
    handler = cluster.node("a", RendezvousSettings(1, 1))
    outcomes = joined(handler)
    assert isinstance(outcomes.get(timeout=SECONDS), RendezvousInfo)
    handler.report_success()
    change = outcomes.get(timeout=SECONDS)
    assert isinstance(change, Change)
    assert change.kind is ChangeKind.SUCCEEDED
    handler.shutdown()
    assert outcomes.empty()


def test_a_joining_node_learns_whether_its_peers_can_regroup(cluster: Cluster) -> None:
    limits = RendezvousSettings(1, 3, last_call_timeout=0.0)
    first, *others = (cluster.node(name, limits) for name in "abc")
    assert not others[0].peers_can_regroup(), "there is nobody yet"
    of_first = joined(first)
    assert isinstance(of_first.get(timeout=SECONDS), RendezvousInfo)
    first.report_can_regroup()
    wait_until("it to be known", others[0].peers_can_regroup, SECONDS)
    assert others[1].peers_can_regroup(), "to whoever asks for the first time"
    assert others[1].report_slots(0)
    of_other = joined(others[1])
    assert of_first.empty()
    assert others[1].report_slots(2)
    resize = of_first.get(timeout=SECONDS)
    assert isinstance(resize, Change)
    assert resize.kind is ChangeKind.RESIZE
    joined(first)
    info = of_other.get(timeout=SECONDS)
    assert isinstance(info, RendezvousInfo)
    assert info.assignment.local_world_size == 2
    first.set_closed()
    wait_until(
        "a job that is over to have nobody who goes on",
        lambda: not others[0].peers_can_regroup(),
        SECONDS,
    )
