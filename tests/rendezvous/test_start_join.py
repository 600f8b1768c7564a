"""`start_join` delivers the generation and its changes to a callback."""

from __future__ import annotations

import queue

import pytest
from handler_cluster import HandlerCluster

from elasticlib.errors import RendezvousClosedError
from elasticlib.rendezvous.interface import Change, ChangeKind, RendezvousHandler, RendezvousInfo
from elasticlib.rendezvous.membership import RendezvousSettings
from elasticlib.testing.waiting import wait_until

TIMEOUT_S = 60.0
Outcomes = queue.SimpleQueue[RendezvousInfo | Change | Exception]


def start_join(handler: RendezvousHandler) -> Outcomes:
    outcomes: Outcomes = queue.SimpleQueue()
    assert handler.start_join(outcomes.put)
    return outcomes


def test_each_member_receives_its_generation_and_then_each_change(cluster: HandlerCluster) -> None:
    settings = RendezvousSettings(1, 2, last_call_timeout=0.0)
    first, second = (cluster.handler(name, settings) for name in "ab")
    of_first = start_join(first)
    first_info = of_first.get(timeout=TIMEOUT_S)
    assert isinstance(first_info, RendezvousInfo)
    assert first_info.world_size == 1
    of_second = start_join(second)
    resize = of_first.get(timeout=TIMEOUT_S)
    assert isinstance(resize, Change)
    assert resize.kind is ChangeKind.RESIZE
    again = start_join(first).get(timeout=TIMEOUT_S)
    assert isinstance(again, RendezvousInfo)
    other = of_second.get(timeout=TIMEOUT_S)
    assert isinstance(other, RendezvousInfo)
    assert {again.rank, other.rank} == {0, 1}
    assert again.bootstrap_store_info == other.bootstrap_store_info
    assert of_first.empty()  # The second call has replaced the callback of the first one.


def test_a_drain_followed_by_the_end_of_the_job_is_reported_as_both(
    cluster: HandlerCluster,
) -> None:
    settings = RendezvousSettings(2, 2)
    first, second = (cluster.handler(name, settings) for name in "ab")
    of_first, of_second = start_join(first), start_join(second)
    assert isinstance(of_first.get(timeout=TIMEOUT_S), RendezvousInfo)
    assert isinstance(of_second.get(timeout=TIMEOUT_S), RendezvousInfo)
    second.report_drain("the test drains it")
    drain = of_first.get(timeout=TIMEOUT_S)
    assert isinstance(drain, Change)
    assert drain.kind is ChangeKind.RESIZE
    first.set_closed()
    end = of_first.get(timeout=TIMEOUT_S)
    assert isinstance(end, Change)
    assert end.kind is ChangeKind.ABORTED


def test_a_join_of_a_handler_that_is_shut_down_gets_an_error(cluster: HandlerCluster) -> None:
    handler = cluster.handler("a", RendezvousSettings(2, 2))
    outcomes = start_join(handler)
    handler.shutdown()
    with pytest.raises(RendezvousClosedError, match="left"):
        raise outcomes.get(timeout=TIMEOUT_S)  # type: ignore[misc]
    assert outcomes.empty()


def test_the_end_of_the_job_is_the_last_change(cluster: HandlerCluster) -> None:
    handler = cluster.handler("a", RendezvousSettings(1, 1))
    outcomes = start_join(handler)
    assert isinstance(outcomes.get(timeout=TIMEOUT_S), RendezvousInfo)
    handler.report_success()
    change = outcomes.get(timeout=TIMEOUT_S)
    assert isinstance(change, Change)
    assert change.kind is ChangeKind.SUCCEEDED
    handler.shutdown()
    assert outcomes.empty()


def test_a_joining_node_learns_whether_its_peers_can_regroup(cluster: HandlerCluster) -> None:
    settings = RendezvousSettings(1, 3, last_call_timeout=0.0)
    first, *others = (cluster.handler(name, settings) for name in "abc")
    assert not others[0].peers_can_regroup(), "no node has joined yet"
    of_first = start_join(first)
    assert isinstance(of_first.get(timeout=TIMEOUT_S), RendezvousInfo)
    first.report_can_regroup()
    wait_until("the ability of the first node to regroup", others[0].peers_can_regroup, TIMEOUT_S)
    assert others[1].peers_can_regroup(), "a node learns it with its first read"
    assert others[1].report_slots(0)
    of_other = start_join(others[1])
    assert of_first.empty()
    assert others[1].report_slots(2)
    resize = of_first.get(timeout=TIMEOUT_S)
    assert isinstance(resize, Change)
    assert resize.kind is ChangeKind.RESIZE
    start_join(first)
    info = of_other.get(timeout=TIMEOUT_S)
    assert isinstance(info, RendezvousInfo)
    assert info.assignment.local_world_size == 2
    first.set_closed()
    wait_until(
        "the closed job to have no node that can regroup",
        lambda: not others[0].peers_can_regroup(),
        TIMEOUT_S,
    )
