"""Documents are decoded as they were encoded, and malformed ones are rejected by name."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.errors import RendezvousConfigError
from elasticlib.options import RendezvousSettings
from elasticlib.rendezvous.bad_nodes import ExcludedHost, FirstFailure
from elasticlib.rendezvous.blame import Evidence, FailureKind, Verdict
from elasticlib.rendezvous.membership import (
    GenerationTrigger,
    JobAction,
    JobEnd,
    JobPhase,
    JobRequest,
    Leader,
    LeaderStatus,
    MembershipState,
    NodeRecord,
)
from elasticlib.rendezvous.rank_assignment import assign_ranks
from elasticlib.rendezvous.store_layout import (
    decode,
    decode_node,
    decode_shard,
    decode_state,
    encode,
    encode_shard,
    encode_state,
)

evidence = st.builds(
    Evidence,
    kind=st.sampled_from(FailureKind),
    text=st.text(),
    rank=st.integers(-1, 9),
    failed_at_s=st.floats(0, 1e9),
    step=st.integers(-1, 9),
    node=st.text(),
    host=st.text(),
)
nodes = st.builds(
    NodeRecord,
    id=st.text(min_size=1),
    host=st.text(),
    address=st.text(),
    slots=st.integers(1, 64),
    role=st.text(),
    rank_hint=st.none() | st.integers(0, 9),
    topology=st.text(),
    membership_id=st.text(),
    group_rank=st.integers(0, 9),
    may_run_workers=st.booleans(),
    stopped_membership_id=st.text(),
    inactive_incarnation=st.text(),
    evidence=st.none() | evidence,
    evidence_of=st.text(),
    drain_reason=st.text(),
    request=st.none() | st.builds(JobRequest, st.sampled_from(JobAction), st.text(), st.text()),
)
SETTINGS = RendezvousSettings(1, 9, 3, last_call_timeout=0.5, spares=2, quorum=True)
states = st.builds(
    MembershipState,
    settings=st.just(SETTINGS),
    phase=st.sampled_from(JobPhase),
    generation=st.integers(0, 1 << 40),
    membership_id=st.text(),
    num_nodes=st.integers(0, 9),
    restarts=st.integers(0, 9),
    reason=st.text(),
    verdict=st.none()
    | st.builds(Verdict, evidence, st.text(), st.text(), st.lists(st.integers(0, 9)).map(tuple)),
    evicted=st.lists(st.text(), max_size=2).map(tuple),
    rejected_spares=st.lists(st.text(), max_size=2).map(tuple),
    supersedes=st.text(),
    is_planned=st.booleans(),
    quick_failure_count=st.integers(0, 9),
    trigger=st.sampled_from(GenerationTrigger),
    stop_reason=st.text(),
    first_failures=st.lists(
        st.builds(FirstFailure, generation=st.integers(0, 99), host=st.text()), max_size=2
    ).map(tuple),
    excluded_hosts=st.lists(
        st.builds(ExcludedHost, host=st.text(), reason=st.text()), max_size=2
    ).map(tuple),
    job_end=st.none() | st.builds(JobEnd, written_by=st.text(), finished_at=st.text()),
)


@given(nodes)
def test_a_node_is_decoded_as_it_was_encoded(node: NodeRecord) -> None:
    assert decode_node(encode(node)) == node


@given(states)
def test_a_state_is_decoded_as_it_was_encoded(state: MembershipState) -> None:
    assert decode_state(encode_state(state)) == state


@given(st.lists(nodes, max_size=5, unique_by=lambda node: node.id))
def test_a_shard_is_decoded_with_all_rank_assignments(members: list[NodeRecord]) -> None:
    rows = tuple(zip(members, assign_ranks(members), strict=True))
    assert decode_shard(encode_shard(rows)) == rows


@given(st.builds(Leader, id=st.text(), host=st.text(), inactive_incarnation=st.text()))
def test_a_leader_is_decoded_as_it_was_encoded(leader: Leader) -> None:
    assert decode(Leader, encode(leader), "the leader") == leader


@given(
    st.builds(
        LeaderStatus,
        reason=st.text(),
        present_hosts=st.lists(st.text()).map(tuple),
        num_present=st.just(3),
    )
)
def test_a_leader_status_is_decoded_as_it_was_encoded(status: LeaderStatus) -> None:
    assert decode(LeaderStatus, encode(status), "the status") == status


@given(st.binary(max_size=200))
def test_malformed_documents_are_rejected(noise: bytes) -> None:
    for kind in (Leader, LeaderStatus, NodeRecord):
        with pytest.raises(RendezvousConfigError):
            decode(kind, noise, "noise")
    with pytest.raises(RendezvousConfigError):
        decode_state(noise)


@pytest.mark.parametrize("data", [b"{}", b"[1]", b"[[1,2]]", b'[[{},{"rank":0}]]', b"\xff"])
def test_a_malformed_shard_is_rejected(data: bytes) -> None:
    with pytest.raises(RendezvousConfigError):
        decode_shard(data)


def encode_with(**fields: object) -> bytes:
    raw = json.loads(encode_state(MembershipState(RendezvousSettings(1, 2))))
    raw.update(fields)
    return json.dumps(raw).encode()


RAW_SETTINGS = json.loads(encode_state(MembershipState(RendezvousSettings(1, 2))))["settings"]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (
            encode_with(format=1),
            "has format 1, this elasticlib reads only format 8: start all nodes with",
        ),
        (encode_with(trigger=None), "field 'trigger' is None"),
        (encode_with(generation="3"), "generation"),
        (encode_with(generation=True), "generation"),
        (encode_with(phase="odd"), "odd"),
        (encode_with(verdict={}), "verdict"),
        (encode_with(job_end=[]), "job_end"),
        (encode_with(rejected_spares=[None]), "rejected_spares"),
        (encode_with(evicted=[1]), "evicted"),
        (encode_with(extra=1), "extra"),
        (encode_with(settings={}), "settings"),
        (
            encode_with(request=1),
            "the membership needs the fields",
        ),
        (encode_with(generation=1 << 70), "generation"),
        (
            encode_with(settings={**RAW_SETTINGS, "last_call_timeout": float("nan")}),
            "last_call_timeout",
        ),
        (encode_with(settings={**RAW_SETTINGS, "min_nodes": 0}), "must satisfy 1 <= min_nodes"),
    ],
)
def test_an_error_names_the_field(data: bytes, expected: str) -> None:
    with pytest.raises(RendezvousConfigError, match=expected):
        decode_state(data)
