"""The end of a job, its result for later nodes, and a new run with the same run id."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import Future

import attrs
import pytest
from counted import LEASE, Crew
from test_handlers import Cluster, change

from elasticlib.errors import RendezvousClosedError
from elasticlib.rendezvous.handler import DynamicRendezvousHandler as Handler
from elasticlib.rendezvous.interface import (
    ChangeKind,
    RendezvousHandler,
    RendezvousInfo,
)
from elasticlib.rendezvous.membership import JobPhase, MembershipState, RendezvousSettings
from elasticlib.rendezvous.store_layout import StoreKeys, decode_state

FULL = RendezvousSettings(2, 2)
ROOM = RendezvousSettings(2, 3, last_call_timeout=0.0)
SAID = r"\(reported by [ab] at \d{4}-\d\d-\d\d.\d\d:\d\d:\d\d"


def state_of(cluster: Cluster) -> MembershipState:
    entry = cluster.store.get(StoreKeys("run").state)
    assert entry is not None
    return decode_state(entry.value)


def met(futures: list[Future[RendezvousInfo]]) -> list[int]:
    """The generations in which they met."""
    return [future.result(20).generation for future in futures]


def job_of_two(cluster: Cluster, limits: RendezvousSettings, names: str = "ab") -> list[Handler]:
    """Two nodes of one generation."""
    handlers = [cluster.node(name, limits) for name in names]
    assert met([cluster.join(handler) for handler in handlers]) == [1, 1]
    return handlers


def succeed(handlers: list[Handler]) -> None:
    for handler in handlers:
        handler.report_success()
    assert [change(handler).kind for handler in handlers] == [ChangeKind.SUCCEEDED] * len(handlers)


def crew_that_succeeded() -> Crew:
    """Two nodes of a full job that is over, who are still there."""
    crew = Crew()
    crew.add(2, FULL)
    crew.settle()
    for member in crew.members:
        member.finish()
        member.part.write_reports(member.seen)
    crew.turns()
    return crew


def leave(handlers: Sequence[RendezvousHandler]) -> None:
    assert all(handler.shutdown() for handler in handlers)


def turned_away(cluster: Cluster, name: str, limits: RendezvousSettings) -> str:
    """Return the error that a node gets that joins now."""
    with pytest.raises(RendezvousClosedError) as closed:
        cluster.join(cluster.node(name, limits)).result(20)
    return str(closed.value)


@pytest.mark.parametrize("limits", [FULL, ROOM], ids=["was full", "had room"])
def test_nodes_that_start_after_all_nodes_of_a_run_have_left_start_a_new_run(
    cluster: Cluster, limits: RendezvousSettings
) -> None:
    incarnations = set()
    for names in ("ab", "cd", "ef"):
        handlers = job_of_two(cluster, limits, names)
        incarnations.add(state_of(cluster).incarnation)
        succeed(handlers)
        leave(handlers)
    assert len(incarnations) == 3


@pytest.mark.parametrize("limits", [FULL, ROOM], ids=["was full", "had room"])
def test_a_new_run_after_a_failed_one_has_its_own_restart_budget(
    cluster: Cluster, limits: RendezvousSettings
) -> None:
    limits = attrs.evolve(limits, max_restarts=1)
    handlers = job_of_two(cluster, limits)
    handlers[1].report_failure("exit code 6")
    assert all(change(handler).kind is ChangeKind.GENERATION_ENDED for handler in handlers)
    assert met([cluster.join(handler) for handler in handlers]) == [2, 2]
    handlers[1].report_failure("exit code 7")
    assert all(change(handler).kind is ChangeKind.GENERATION_ENDED for handler in handlers)
    for future in [cluster.join(handler) for handler in handlers]:
        with pytest.raises(RendezvousClosedError, match="failed: b: exit code 7"):
            future.result(20)
    leave(handlers)
    again = [cluster.node(name, limits) for name in "cd"]
    infos = [future.result(20) for future in [cluster.join(handler) for handler in again]]
    assert [(info.generation, info.restarts) for info in infos] == [(1, 0), (1, 0)]


def test_nodes_that_start_after_a_closed_run_start_a_new_run(cluster: Cluster) -> None:
    handlers = job_of_two(cluster, FULL)
    handlers[0].set_closed()
    assert [change(handler).kind for handler in handlers] == [ChangeKind.ABORTED] * 2
    leave(handlers)
    job_of_two(cluster, FULL, "cd")


def test_a_node_that_starts_while_nodes_of_an_ended_run_remain_gets_its_result(
    cluster: Cluster,
) -> None:
    handlers = job_of_two(cluster, FULL)
    succeed(handlers)
    heard = turned_away(cluster, "c", FULL)
    assert re.search(f"succeeded: 2 nodes done; no workers ran on this node {SAID}", heard), heard
    assert state_of(cluster).phase.is_terminal


def test_a_node_that_starts_without_a_leader_gets_the_result_of_an_ended_run() -> None:
    crew = crew_that_succeeded()
    crew.lose(crew.leader)
    crew.add(1, FULL)
    late = crew.members[-1]
    state = late.part.read(crew.now).state
    assert state is not None
    assert state.phase is JobPhase.SUCCEEDED
    assert late.part.intent.final_change(state) is not None


def test_a_leader_that_joined_late_reports_the_result_to_later_nodes() -> None:
    crew = Crew()
    crew.add(3, ROOM)
    crew.settle()
    crew.lose(crew.leader)
    crew.add(1, ROOM)
    # It came while nobody led, so that it leads before it knows that the job goes on.
    newcomer = crew.members[-1]
    newcomer.turn()
    crew.settle()
    assert newcomer is crew.leader
    newcomer.part.intent = attrs.evolve(newcomer.part.intent, close_reason="by the test")
    assert newcomer.part.write_reports(newcomer.seen)
    assert not newcomer.part.intent.close_reason
    crew.turns()
    crew.add(1, ROOM)
    crew.members[-1].turn()
    crew.turns(3)
    late = crew.members[-1]
    assert late.part.intent.final_change(late.seen.state) is not None


def test_a_leader_of_a_new_run_yields_when_a_node_of_the_old_run_returns() -> None:
    crew = crew_that_succeeded()
    old = list(crew.members)
    crew.members.clear()
    for _ in range(20):
        # By steps: what a store sees as a pause of its own ends no lease.
        crew.now += LEASE / 10
        crew.memory.list("")
    crew.add(2, FULL)
    first, second = crew.members
    empty = first.part.read(crew.now)
    first.part.publish(crew.now)
    assert first.part.try_become_leader(empty)
    old[1].turn()
    second.turn()
    crew.turns(3)
    for member in (first, second):
        assert member.part.intent.final_change(member.seen.state) is not None


def test_a_late_node_gets_the_reason_of_a_failed_run_and_the_node_that_reported_it(
    cluster: Cluster,
) -> None:
    handlers = job_of_two(cluster, ROOM)
    handlers[0].report_failure("exit code 3")
    assert all(change(handler).kind is ChangeKind.GENERATION_ENDED for handler in handlers)
    for future in [cluster.join(handler) for handler in handlers]:
        with pytest.raises(RendezvousClosedError, match="a: exit code 3") as closed:
            future.result(20)
        assert "no workers ran on this node" not in str(closed.value)
    leave(handlers[:1])
    heard = turned_away(cluster, "c", ROOM)
    assert re.search(rf"failed: a: exit code 3 .*no workers ran on this node {SAID}", heard), heard
    assert "to run it again, start it once all of its nodes have ended" in heard


def test_nodes_get_the_result_while_a_run_is_ending_and_start_a_new_run_after_it(
    cluster: Cluster,
) -> None:
    handlers = job_of_two(cluster, ROOM)
    succeed(handlers)
    leave(handlers[:1])
    for name in "cd":
        assert "succeeded: 2 nodes done; no workers ran" in turned_away(cluster, name, ROOM)
    assert change(handlers[1]).kind is ChangeKind.SUCCEEDED
    leave(handlers[1:])
    # Those that got the result without having been in the run do not keep it alive.
    job_of_two(cluster, ROOM, "ef")


def test_the_result_names_the_node_and_the_time(cluster: Cluster) -> None:
    handlers = job_of_two(cluster, FULL)
    handlers[1].set_closed()
    assert change(handlers[0]).reason == "closed by b"
    ending = state_of(cluster).job_end
    assert ending is not None
    assert ending.written_by == "b"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d.\d\d:\d\d:\d\d.*", ending.finished_at)
