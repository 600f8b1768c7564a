"""A live job goes on whatever another client writes under its keys."""

from __future__ import annotations

import json

import pytest
from handler_cluster import HandlerCluster, next_change, read_state
from hypothesis import given
from hypothesis import strategies as st
from sample_memberships import A, B, C, create_generation, create_view
from stepwise_cluster import KEYS, StepwiseCluster

from elasticlib.errors import RendezvousConfigError
from elasticlib.options import RendezvousSettings
from elasticlib.rendezvous.blame import FailureKind
from elasticlib.rendezvous.interface import ChangeKind
from elasticlib.rendezvous.membership import JobPhase, Leader, MembershipState
from elasticlib.rendezvous.node import UnreadableJobError
from elasticlib.rendezvous.rank_assignment import natural_sort_key
from elasticlib.rendezvous.reconcile import reconcile
from elasticlib.rendezvous.store_layout import (
    FORMAT,
    OtherFormatError,
    decode_node,
    encode,
    encode_state,
)
from elasticlib.testing.rendezvous_cluster import report_failure

SETTINGS = RendezvousSettings(1, 3, max_restarts=1000, last_call_timeout=0.0, bad_node_failures=0)
IDS = ("n0-1", "n1-1", "n2-1")


def form_cluster(count: int = 2) -> StepwiseCluster:
    cluster = StepwiseCluster()
    cluster.add(count, SETTINGS)
    cluster.form_generation()
    return cluster


def settle(cluster: StepwiseCluster) -> None:
    """Let time pass until all nodes must be in one generation, and check that they are."""
    cluster.step_all(30, seconds=1.0)
    document = cluster.form_generation()
    assert document.phase is JobPhase.ACTIVE
    assert document.member_ids == {node.id for node in cluster.nodes}
    assert len(document.incarnation) > 0


texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def damaged(draw: st.DrawFn, valid: bytes) -> bytes:
    """Return a value that a program of another version or a faulty one might have written."""
    raw = json.loads(valid)
    if isinstance(raw, dict):
        name = draw(st.sampled_from(sorted(raw)))
        raw[name] = draw(json_values)
    return json.dumps(raw).encode()


@st.composite
def entries(draw: st.DrawFn, membership_id: str) -> tuple[str, bytes]:
    """Return a key under any prefix of the job, and any value."""
    rest = draw(texts | st.sampled_from(["0", "1", "x", "-1", "9" * 5000, *IDS]))[:200]
    owned = [KEYS.state, KEYS.leader, KEYS.remembered_state, KEYS.leader_status]
    owned += [KEYS.master_endpoint(membership_id), KEYS.shard(membership_id, 0)]
    prefixes = [
        KEYS.job_prefix,
        KEYS.watched_prefix,
        KEYS.node(),
        KEYS.shard(),
        KEYS.shard(membership_id),
        KEYS.master_endpoint(),
        f"{KEYS.exchange_prefix(membership_id)}stop/",
        KEYS.exchange_prefix(),
        KEYS.detail(membership_id),
    ]
    # Who has finished or left is shown by the key alone. No other client may write that.
    others = [KEYS.finished(membership_id), KEYS.left(membership_id), KEYS.finished(), KEYS.left()]
    prefixed = st.sampled_from(prefixes).map(lambda prefix: prefix + rest)
    if rest not in IDS:
        prefixed |= st.sampled_from(others).map(lambda prefix: prefix + rest)
    key = draw(st.sampled_from(owned) | prefixed)
    state = encode_state(MembershipState(SETTINGS)).replace(
        f'"format":{FORMAT}'.encode(), f'"format":{draw(st.sampled_from([0, 7, 99]))}'.encode()
    )
    values = st.binary(max_size=50) | json_values.map(lambda value: json.dumps(value).encode())
    if key == KEYS.state:
        values |= st.just(state) | damaged(state)
    return key, draw(values)


@given(st.data())
def test_a_job_goes_on_whatever_is_written_under_its_keys(data: st.DataObject) -> None:
    cluster = form_cluster()
    for _ in range(data.draw(st.integers(1, 4))):
        document = cluster.document()
        assert document is not None
        for _ in range(data.draw(st.integers(1, 3))):
            cluster.memory.set(*data.draw(entries(document.membership_id)))
            cluster.step_all(data.draw(st.integers(0, 2)), seconds=0.1)
        if data.draw(st.booleans()):
            cluster.nodes[0].fail(killed=True)
        settle(cluster)
    cluster.add(1, SETTINGS)
    settle(cluster)


@pytest.mark.parametrize("kind", ["state", "leader", "remembered", "endpoint", "shard"])
def test_a_damaged_entry_is_replaced_and_the_generation_goes_on(kind: str) -> None:
    cluster = form_cluster()
    before = cluster.document()
    assert before is not None
    key = {
        "state": KEYS.state,
        "leader": KEYS.leader,
        "remembered": KEYS.remembered_state,
        "endpoint": KEYS.master_endpoint(before.membership_id),
        "shard": KEYS.shard(before.membership_id, 0),
    }[kind]
    old = cluster.memory.get(key)
    cluster.memory.set(key, b"\xff")
    cluster.step_all(10, seconds=1.0)
    for node in cluster.nodes:
        if kind == "endpoint" and node.last_snapshot.assignment.group_rank == 0:  # type: ignore[union-attr]
            node.local_node.write_endpoint(node.last_snapshot, "127.0.0.1:1")
    new = cluster.memory.get(key)
    if kind == "remembered":
        assert new is None
    elif kind == "leader":
        assert new is not None
        assert new.value in [encode(Leader(node.id, node.name)) for node in cluster.nodes]
    else:
        assert old is not None
        assert new is not None
        assert new.value == old.value
    assert cluster.document() == before


def test_a_node_that_starts_waits_while_the_membership_is_damaged() -> None:
    cluster = form_cluster(1)
    (member,) = cluster.nodes
    cluster.memory.set(KEYS.state, b"\xff")
    cluster.nodes.clear()
    cluster.add(1, SETTINGS)
    (late,) = cluster.nodes
    for _ in range(3):
        with pytest.raises(UnreadableJobError, match="waits for a member that replaces it"):
            late.step()
    member.poll()
    late.step()
    cluster.nodes.append(member)
    settle(cluster)


def test_a_node_that_starts_fails_at_another_format_with_the_remedy() -> None:
    cluster = form_cluster(1)
    entry = cluster.memory.get(KEYS.state)
    assert entry is not None
    other = entry.value.replace(f'"format":{FORMAT}'.encode(), b'"format":99')
    cluster.memory.set(KEYS.state, other)
    (member,) = cluster.nodes
    cluster.add(1, SETTINGS)
    with pytest.raises(OtherFormatError, match="start all nodes with the same version"):
        cluster.nodes[1].step()
    member.poll()
    cluster.nodes.pop()
    settle(cluster)


def test_only_members_finish_or_leave_a_generation() -> None:
    document = create_generation(A, B)
    ids = frozenset({"x", C.id, A.id + "/"})
    view = create_view(document, A, B, C, finished_ids=ids, left_ids=ids, since_last_arrival_s=9.0)
    resized = reconcile(view).new_membership
    assert resized is not None
    assert resized.reason == "c joined"


@given(st.text(), st.integers(0, 10**4).map(lambda count: "9" * count))
def test_names_with_any_digits_can_be_sorted(text: str, digits: str) -> None:
    keys = [natural_sort_key(name) for name in (text, digits, f"{text}{digits}", "node2", "node10")]
    assert sorted(keys)
    assert natural_sort_key("node2") < natural_sort_key("node10")


def test_a_node_with_an_invalid_number_of_workers_is_rejected() -> None:
    with pytest.raises(RendezvousConfigError, match="0 or more slots, got -1"):
        decode_node(encode(A).replace(b'"slots":1', b'"slots":-1'))


def test_no_handler_ends_when_each_key_of_its_job_is_damaged(cluster: HandlerCluster) -> None:
    settings = RendezvousSettings(2, 3, max_restarts=99, last_call_timeout=0.0, bad_node_failures=0)
    handlers = [cluster.handler(name, settings) for name in "ab"]
    infos = cluster.join_all(handlers)
    for kind in (
        "state",
        "leader",
        "remembered",
        "status",
        "endpoint",
        "shard",
        "node",
        "finished",
    ):
        membership_id = read_state(cluster).membership_id
        key = {
            "state": KEYS.state,
            "leader": KEYS.leader,
            "remembered": KEYS.remembered_state,
            "status": KEYS.leader_status,
            "endpoint": KEYS.master_endpoint(membership_id),
            "shard": KEYS.shard(membership_id, 0),
            "node": KEYS.node("a-1"),
            "finished": KEYS.finished(membership_id, "x"),
        }[kind]
        cluster.store.set(key, b"\xff")
        report_failure(handlers[1], "killed", FailureKind.KILLED)
        assert all(next_change(handler).kind is ChangeKind.GENERATION_ENDED for handler in handlers)
        before, infos = infos, cluster.join_all(handlers)
        assert infos[0].generation > before[0].generation
    # A new node is admitted, and a job with a key of no member under `finished/` is resized.
    joining = cluster.join(cluster.handler("c", settings))
    assert {next_change(handler).kind for handler in handlers} == {ChangeKind.RESIZE}
    assert {info.world_size for info in cluster.join_all(handlers)} == {3}
    assert joining.result(20).world_size == 3
