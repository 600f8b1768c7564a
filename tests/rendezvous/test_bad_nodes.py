"""Exclusion of hosts whose workers keep failing: the decision, the membership, real handlers."""

from __future__ import annotations

import attrs
import pytest
from handler_cluster import HandlerCluster, next_change
from hypothesis import given
from hypothesis import strategies as st
from sample_memberships import (
    A,
    B,
    C,
    D,
    create_generation,
    create_node,
    create_view,
    failed_by,
    mark_stopped,
    with_failure,
)

from elasticlib.errors import ConfigError, RendezvousClosedError
from elasticlib.options import MAX_BAD_NODE_WINDOW, RendezvousSettings
from elasticlib.rendezvous.bad_nodes import (
    ExcludedHost,
    FirstFailure,
    add_failure,
    bad_hosts,
    excluded_hosts,
)
from elasticlib.rendezvous.blame import FailureKind
from elasticlib.rendezvous.interface import ChangeKind
from elasticlib.rendezvous.membership import (
    JobPhase,
    Membership,
    NodeRecord,
    end_generation,
)
from elasticlib.rendezvous.node_intent import NodeIntent
from elasticlib.rendezvous.reconcile import ReconcileResult, reconcile
from elasticlib.testing.rendezvous_cluster import report_failure

SETTINGS = RendezvousSettings(2, 4, max_restarts=10, last_call_timeout=2.0)
REASON = "its workers failed first in 3 of the last 5 generations (bad_node_failures, --rdzv-conf)"


# The decision

hosts = st.sampled_from("abcd")


@st.composite
def histories(draw: st.DrawFn, window: int = 5) -> tuple[FirstFailure, ...]:
    """Draw a history as it is recorded, generation by generation; some have no failure."""
    history: tuple[FirstFailure, ...] = ()
    for generation, host in enumerate(draw(st.lists(hosts | st.none(), max_size=12)), 1):
        if host is not None:
            history = add_failure(history, generation, host, window=window)
    return history


@given(histories(), st.lists(hosts), st.integers(1, 4), st.integers(0, 5), st.integers(1, 5))
def test_only_bad_hosts_are_excluded_and_enough_nodes_remain(
    history: tuple[FirstFailure, ...],
    candidates: list[str],
    min_nodes: int,
    limit: int,
    window: int,
) -> None:
    bad = bad_hosts(history, limit=limit, window=window)
    excluded = excluded_hosts(bad, candidates, min_nodes=min_nodes)
    assert set(excluded) <= set(bad)
    remaining = [host for host in candidates if host not in excluded]
    assert not excluded or len(remaining) >= min_nodes
    # No further bad host could be excluded.
    for host in set(bad) - set(excluded):
        assert len([other for other in remaining if other != host]) < min_nodes


@given(histories(), st.integers(0, 5), st.integers(1, 5))
def test_a_host_is_bad_if_it_failed_first_in_enough_of_the_last_generations(
    history: tuple[FirstFailure, ...], limit: int, window: int
) -> None:
    last = history[-1].generation if history else 0
    numbers = range(last - window + 1, last + 1)
    first = {item.generation: item.host for item in history}
    for host in "abcd":
        count = sum(first.get(number) == host for number in numbers)
        is_bad = 0 < limit <= count
        assert bad_hosts(history, limit=limit, window=window).get(host) == (
            count if is_bad else None
        )


@given(histories(), st.permutations("aabbccdd"), st.integers(1, 4))
def test_the_order_of_the_candidates_does_not_matter(
    history: tuple[FirstFailure, ...], candidates: list[str], min_nodes: int
) -> None:
    bad = bad_hosts(history, limit=2, window=5)
    assert excluded_hosts(bad, candidates, min_nodes=min_nodes) == excluded_hosts(
        bad, "aabbccdd", min_nodes=min_nodes
    )


@given(histories(), st.integers(1, 4), st.integers(1, 5))
def test_a_job_on_one_host_excludes_none(
    history: tuple[FirstFailure, ...], num_nodes: int, limit: int
) -> None:
    bad = bad_hosts(history, limit=limit, window=5)
    assert "a" not in excluded_hosts(bad, ["a"] * num_nodes, min_nodes=1)


@given(histories(window=3))
def test_a_history_is_bounded_and_has_one_failure_a_generation(
    history: tuple[FirstFailure, ...],
) -> None:
    assert len(history) <= 3
    numbers = [item.generation for item in history]
    assert numbers == sorted(set(numbers))
    if history:
        last = history[-1]
        assert add_failure(history, last.generation, "z", window=3)[-1].host == "z"
        assert len(add_failure(history, last.generation, "z", window=3)) == len(history)


# The membership


def failed(
    *members: NodeRecord, history: str = "", settings: RendezvousSettings = SETTINGS
) -> Membership:
    """Return the membership after the first member failed, and the hosts in `history` before."""
    document = create_generation(*members, settings=settings)
    first = tuple(FirstFailure(number, host) for number, host in enumerate(history, 1))
    document = attrs.evolve(document, generation=len(history) + 1, first_failures=first)
    return end_generation(document, "a: exit code 1", failed_by(members[0], "exit code 1"))


def decide(document: Membership, *live: NodeRecord) -> ReconcileResult:
    return reconcile(create_view(document, *map(mark_stopped, live), since_last_arrival_s=9.0))


def test_the_host_that_failed_first_in_three_of_five_generations_is_excluded() -> None:
    document = failed(A, B, C, history="aba")
    excluded = decide(document, A, B, C).new_membership
    assert excluded is not None
    assert excluded.excluded_hosts == (ExcludedHost("a", REASON),)
    reason = f"a is excluded, because {REASON}; the last failure was a: exit code 1"
    assert excluded.reason == reason
    assert (excluded.phase, excluded.restarts) == (JobPhase.FORMING, 0)
    formed = decide(excluded, A, B, C).new_membership
    assert formed is not None
    assert [member.host for member in formed.members] == ["b", "c"]
    assert (formed.restarts, formed.reason) == (0, excluded.reason)
    # A node that starts on that host later is no candidate either.
    late = create_node("a2")
    late = attrs.evolve(late, host="a")
    assert (
        reconcile(create_view(formed, B, C, late, since_last_arrival_s=9.0)).new_membership is None
    )


@pytest.mark.parametrize("history", ["", "a", "ab", "aabbc"])
def test_fewer_failures_use_a_restart(history: str) -> None:
    formed = decide(failed(A, B, C, history=history), A, B, C).new_membership
    assert formed is not None
    assert (formed.phase, formed.restarts, formed.excluded_hosts) == (JobPhase.ACTIVE, 1, ())
    last = formed.first_failures[-1]
    assert (last.generation, last.host) == (len(history) + 1, "a")
    assert len(formed.first_failures) <= SETTINGS.bad_node_window


def test_a_host_that_the_job_needs_stays_and_the_reason_names_it() -> None:
    formed = decide(failed(A, B, history="aa"), A, B).new_membership
    assert formed is not None
    assert (formed.phase, formed.excluded_hosts) == (JobPhase.ACTIVE, ())
    assert formed.reason == (
        "a: exit code 1; a stays in the job although its workers failed first in 3 of the last 5 "
        "generations (bad_node_failures, --rdzv-conf): without it, 1 of at least 2 nodes would be "
        "here"
    )
    # With a spare, the host is excluded.
    excluded = decide(failed(A, B, history="aa"), A, B, D).new_membership
    assert excluded is not None
    assert [item.host for item in excluded.excluded_hosts] == ["a"]


def test_a_failure_that_a_lost_node_may_have_caused_does_not_count() -> None:
    document = failed(A, B, C, history="aa")
    blamed = decide(document, A, B).new_membership
    assert blamed is not None
    formed = decide(blamed, A, B).new_membership
    assert formed is not None
    assert (formed.excluded_hosts, formed.restarts) == ((), 0)
    assert [item.generation for item in formed.first_failures] == [1, 2]


def mark_evidence(node: NodeRecord, kind: FailureKind) -> NodeRecord:
    return with_failure(node, f"{node.host}: {kind.value}", kind)


COLLECTIVE = FailureKind.COLLECTIVE


@pytest.mark.parametrize("max_restarts", [0, 9])
def test_a_failed_collective_excludes_and_evicts_no_host_and_uses_the_budget(
    max_restarts: int,
) -> None:
    settings = attrs.evolve(SETTINGS, max_restarts=max_restarts)
    document = attrs.evolve(
        failed(A, B, C, history="aa", settings=settings),
        verdict=failed_by(A, "Connection closed by peer", COLLECTIVE),
    )
    after = decide(document, A, B, C).new_membership
    assert after is not None
    assert (after.excluded_hosts, after.evicted) == ((), ())
    assert [item.generation for item in after.first_failures] == [1, 2]
    if max_restarts:
        assert (after.phase, after.restarts) == (JobPhase.ACTIVE, 1)
    else:
        assert after.phase is JobPhase.FAILED
        assert after.reason == "a: Connection closed by peer (0 of 0 restarts used)"


@pytest.mark.parametrize(
    ("kind", "host"),
    [
        (FailureKind.CRASHED, "c"),
        (FailureKind.RAISED, "c"),
        (FailureKind.ELSEWHERE, "c"),
        (FailureKind.COLLECTIVE, None),
    ],
)
def test_stronger_evidence_than_that_of_the_first_node_decides(
    kind: FailureKind, host: str | None
) -> None:
    document = create_generation(A, B, C, settings=SETTINGS)
    first = mark_evidence(A, COLLECTIVE)
    opened = reconcile(create_view(document, first, B, C)).new_membership
    assert opened is not None
    formed = decide(opened, first, B, mark_evidence(C, kind)).new_membership
    assert formed is not None
    assert [item.host for item in formed.first_failures] == ([host] if host else [])
    assert (formed.phase, formed.restarts) == (JobPhase.ACTIVE, 1)
    assert formed.reason == (f"{host}: c: {kind.value}" if host else "a: a: collective")


def test_a_node_whose_workers_had_exited_before_a_collective_failed_is_named() -> None:
    document = create_generation(A, B, settings=SETTINGS)
    view = create_view(document, mark_evidence(A, COLLECTIVE), B, finished_ids=frozenset({B.id}))
    opened = reconcile(view).new_membership
    assert opened is not None
    assert opened.reason == "b: its workers had exited with code 0 before a: a: collective"
    assert opened.verdict is not None
    assert opened.verdict.named_host == "b"


def test_an_evicted_node_is_remembered_by_its_host() -> None:
    settings = attrs.evolve(SETTINGS, max_restarts=0)
    evicted = decide(failed(A, B, C, history="a", settings=settings), A, B, C).new_membership
    assert evicted is not None
    assert evicted.evicted == (A.id,)
    assert [item.host for item in evicted.first_failures] == ["a", "a"]


@pytest.mark.parametrize("change", [{"bad_node_failures": 0}, {"has_fixed_ranks": True}])
def test_no_host_is_excluded_if_that_is_disabled_or_ranks_are_fixed(
    change: dict[str, int | bool],
) -> None:
    settings = RendezvousSettings(2, 4, max_restarts=10)
    document = failed(A, B, C, history="aaaa", settings=attrs.evolve(settings, **change))
    result = decide(document, A, B, C)
    assert result.new_membership is None or not result.new_membership.excluded_hosts


@pytest.mark.parametrize("limits", [(-1, 5), (6, 5), (3, MAX_BAD_NODE_WINDOW + 1)])
def test_limits_that_contradict_each_other_are_rejected(limits: tuple[int, int]) -> None:
    failures, window = limits
    with pytest.raises(ConfigError, match=r"^bad_node_(failures|window) must be"):
        RendezvousSettings(1, 2, bad_node_failures=failures, bad_node_window=window)


def test_a_node_that_is_not_part_of_the_run_is_not_excluded_from_the_next_one() -> None:
    document = attrs.evolve(
        create_generation(B, C, settings=SETTINGS),
        incarnation="old",
        excluded_hosts=(ExcludedHost("a", REASON),),
    )
    intent = NodeIntent(A)
    final = intent.final_change(document.state)
    assert final is not None
    assert (final.kind, final.kind.job_continues) == (ChangeKind.EXCLUDED, True)
    assert intent.with_node_fields(inactive_incarnation="old").final_change(document.state) is None


# Real handlers


def test_handlers_on_an_excluded_host_get_the_reason(
    cluster: HandlerCluster,
) -> None:
    limits = RendezvousSettings(1, 2, max_restarts=9, bad_node_failures=2, bad_node_window=2)
    handlers = [cluster.handler(name, limits) for name in ("a", "b")]
    for _ in range(2):
        for future in [cluster.join(handler) for handler in handlers]:
            future.result(20)
        assert report_failure(handlers[0], "exit code 1")
        assert all(next_change(handler) for handler in handlers)
    joining = [cluster.join(handler) for handler in handlers]
    with pytest.raises(RendezvousClosedError, match="excluded: the job continues without this"):
        joining[0].result(20)
    assert joining[1].result(20).world_size == 1
    assert next_change(handlers[0]).kind is ChangeKind.EXCLUDED
    handlers[0].shutdown()
    with pytest.raises(RendezvousClosedError, match="2 of the last 2 generations"):
        cluster.join(cluster.handler("a", limits)).result(20)
