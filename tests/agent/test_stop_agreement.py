"""What the nodes publish for a common stop, and what follows from all of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.agent.stop_agreement import (
    ANY_CALL,
    NO_CALL,
    StopProposal,
    agree,
    decode_proposal,
    encode_proposal,
)
from elasticlib.workers.interface import DRAIN, RESIZE, STOP_REASONS

proposals = st.builds(
    StopProposal,
    st.none() | st.integers(1, 2**60),
    st.sampled_from(STOP_REASONS),
    st.floats(0, 1e6),
)


@given(proposals)
def test_a_proposal_is_decoded_as_it_was_encoded(proposal: StopProposal) -> None:
    assert decode_proposal(encode_proposal(proposal)) == proposal


def test_an_expired_proposal_leaves_no_time_to_the_others() -> None:
    expired = encode_proposal(StopProposal(1, DRAIN, -3.0))
    assert decode_proposal(expired) == StopProposal(1, DRAIN, 0.0)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"x", b"[]", b'{"call": "x"}', b"[" * 99_999),
        b'{"call":0,"reason":"drain","grace_s":1.0}',
        b'{"call":1,"reason":"tired","grace_s":1.0}',
    ],
)
def test_an_invalid_proposal_is_no_call(data: bytes) -> None:
    assert decode_proposal(data) == NO_CALL


def test_all_stop_at_the_latest_call_for_the_most_urgent_reason_in_the_shortest_time() -> None:
    found = {0: StopProposal(5, DRAIN, 30.0), 1: StopProposal(9, RESIZE, 60.0), 2: ANY_CALL}
    assert agree(found, 4) is None, "a node has not spoken"
    assert agree(found, 3) == StopProposal(9, DRAIN, 30.0)
    assert agree({**found, 3: NO_CALL}, 9) == NO_CALL, "nobody waits for the others"
