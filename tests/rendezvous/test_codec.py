"""What goes through the store comes back the same, and what does not belong is named."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.errors import RendezvousMismatch
from elasticlib.rendezvous.codec import (
    decode_document,
    decode_node,
    encode_document,
    encode_node,
)
from elasticlib.rendezvous.document import Document, Failure, Limits, Node, Phase

nodes = st.builds(
    Node,
    id=st.text(min_size=1),
    host=st.text(),
    address=st.text(),
    slots=st.integers(1, 64),
    role=st.text(),
    hint=st.none() | st.integers(0, 9),
    after=st.integers(0, 9),
    holds=st.integers(0, 9),
    claim=st.none() | st.text(),
    claim_generation=st.integers(0, 9),
)
documents = st.builds(
    Document,
    limits=st.just(Limits(1, 9, 3, last_call=0.5)),
    phase=st.sampled_from(Phase),
    generation=st.integers(0, 1 << 40),
    members=st.lists(nodes, max_size=3).map(tuple),
    restarts=st.integers(0, 9),
    cause=st.text(),
    failure=st.none() | st.builds(Failure, node=st.text(), reason=st.text()),
    expelled=st.lists(st.text(), max_size=2).map(tuple),
)


@given(nodes)
def test_a_node_comes_back_as_it_went(node: Node) -> None:
    assert decode_node(encode_node(node)) == node


@given(documents)
def test_a_document_comes_back_as_it_went(document: Document) -> None:
    assert decode_document(encode_document(document)) == document


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(RendezvousMismatch):
        decode_document(noise)


def spoilt(**fields: object) -> bytes:
    raw = json.loads(encode_document(Document(Limits(1, 2))))
    raw.update(fields)
    return json.dumps(raw).encode()


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (spoilt(format=2), "format 2"),
        (spoilt(generation="3"), "generation"),
        (spoilt(generation=True), "generation"),
        (spoilt(phase="odd"), "odd"),
        (spoilt(members=[{"id": "a"}]), "a member"),
        (spoilt(expelled=[1]), "expelled"),
        (spoilt(extra=1), "extra"),
        (spoilt(limits={}), "limits"),
    ],
)
def test_an_error_names_the_field(data: bytes, named: str) -> None:
    with pytest.raises(RendezvousMismatch, match=named):
        decode_document(data)
