"""What goes through the store comes back the same, and what does not belong is named."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.errors import RendezvousConfigError
from elasticlib.rendezvous.document import (
    Ending,
    Failure,
    Leader,
    Limits,
    Node,
    Note,
    Phase,
    State,
    Why,
)
from elasticlib.rendezvous.layout import (
    decode,
    decode_node,
    decode_shard,
    decode_state,
    encode,
    encode_shard,
    encode_state,
)
from elasticlib.rendezvous.ranks import deal_seats

nodes = st.builds(
    Node,
    id=st.text(min_size=1),
    host=st.text(),
    address=st.text(),
    slots=st.integers(1, 64),
    role=st.text(),
    hint=st.none() | st.integers(0, 9),
    topology=st.text(),
    membership=st.text(),
    rank=st.integers(0, 9),
    runs=st.booleans(),
    stopped=st.text(),
    came_after=st.text(),
    claim=st.none() | st.text(),
    claim_membership=st.text(),
    claim_killed=st.booleans(),
    draining=st.text(),
)
LIMITS = Limits(1, 9, 3, last_call=0.5, spares=2, quorum=True)
states = st.builds(
    State,
    limits=st.just(LIMITS),
    phase=st.sampled_from(Phase),
    generation=st.integers(0, 1 << 40),
    membership=st.text(),
    nodes=st.integers(0, 9),
    restarts=st.integers(0, 9),
    cause=st.text(),
    failure=st.none() | st.builds(Failure, node=st.text(), reason=st.text(), killed=st.booleans()),
    expelled=st.lists(st.text(), max_size=2).map(tuple),
    surplus=st.lists(st.text(), max_size=2).map(tuple),
    supersedes=st.text(),
    planned=st.booleans(),
    quick=st.integers(0, 9),
    why=st.sampled_from(Why),
    ending=st.none() | st.builds(Ending, by=st.text(), at=st.text()),
)


@given(nodes)
def test_a_node_comes_back_as_it_went(node: Node) -> None:
    assert decode_node(encode(node)) == node


@given(states)
def test_a_head_comes_back_as_it_went(state: State) -> None:
    assert decode_state(encode_state(state)) == state


@given(st.lists(nodes, max_size=5, unique_by=lambda node: node.id))
def test_a_shard_comes_back_with_everyones_seat(members: list[Node]) -> None:
    rows = tuple(zip(members, deal_seats(members), strict=True))
    assert decode_shard(encode_shard(rows)) == rows


@given(st.builds(Leader, id=st.text(), host=st.text(), came_after=st.text()))
def test_a_leader_comes_back_as_it_went(leader: Leader) -> None:
    assert decode(Leader, encode(leader), "the leader") == leader


@given(st.builds(Note, reason=st.text(), here=st.lists(st.text()).map(tuple), count=st.just(3)))
def test_a_note_comes_back_as_it_went(note: Note) -> None:
    assert decode(Note, encode(note), "the note") == note


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    for kind in (Leader, Note, Node):
        with pytest.raises(RendezvousConfigError):
            decode(kind, noise, "noise")
    with pytest.raises(RendezvousConfigError):
        decode_state(noise)


@pytest.mark.parametrize("data", [b"{}", b"[1]", b"[[1,2]]", b'[[{},{"rank":0}]]', b"\xff"])
def test_a_shard_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(RendezvousConfigError):
        decode_shard(data)


def spoilt(**fields: object) -> bytes:
    raw = json.loads(encode_state(State(Limits(1, 2))))
    raw.update(fields)
    return json.dumps(raw).encode()


LIMITS_SAID = json.loads(encode_state(State(Limits(1, 2))))["limits"]


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (
            spoilt(format=1),
            "has format 1, this elasticlib reads only format 5: start all nodes with",
        ),
        (spoilt(why=None), "field 'why' is None"),
        (spoilt(generation="3"), "generation"),
        (spoilt(generation=True), "generation"),
        (spoilt(phase="odd"), "odd"),
        (spoilt(failure={}), "failure"),
        (spoilt(ending=[]), "ending"),
        (spoilt(surplus=[None]), "surplus"),
        (spoilt(expelled=[1]), "expelled"),
        (spoilt(extra=1), "extra"),
        (spoilt(limits={}), "limits"),
        (
            spoilt(failure={"node": 1, "reason": "", "killed": False}),
            "the document: field 'failure': field 'node' is 1",
        ),
        (spoilt(generation=1 << 70), "generation"),
        (spoilt(limits={**LIMITS_SAID, "last_call": float("nan")}), "last_call"),
        (spoilt(limits={**LIMITS_SAID, "min_nodes": 0}), "need 1 <= min_nodes"),
    ],
)
def test_an_error_names_the_field(data: bytes, named: str) -> None:
    with pytest.raises(RendezvousConfigError, match=named):
        decode_state(data)
