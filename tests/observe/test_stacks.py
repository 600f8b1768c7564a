"""Stacks that a node sends: their encoding, and the text for an operator."""

from __future__ import annotations

import contextlib
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.observe.formatting import group_stacks
from elasticlib.observe.requests import (
    LEFT_TEXT,
    MAX_BODY_BYTES,
    Answer,
    Request,
    RequestKind,
    RequestResult,
    TargetNode,
    encode_request,
)
from elasticlib.observe.stacks import (
    MAX_STACK_LENGTH,
    NodeStacks,
    decode_stacks,
    encode_stacks,
    stack_lines,
)

COUNTS = st.integers(0, 10**6)
TEXTS = st.dictionaries(COUNTS, st.text(max_size=50), max_size=4)
STACKS = st.builds(NodeStacks, TEXTS, st.lists(COUNTS, max_size=3).map(tuple), TEXTS)
INVALID = st.sampled_from(
    [None, True, -1, 3, 1e400, "", "x", [], ["x"], [{}], {}, {"1": 2}, {"x": ""}, [[[]]]]
)


@given(STACKS)
def test_decoding_returns_the_encoded_stacks(stacks: NodeStacks) -> None:
    assert decode_stacks(encode_stacks(stacks)) == stacks


@given(
    STACKS,
    INVALID,
    st.binary(max_size=40),
    st.sampled_from(["version", "texts", "unresponsive_ranks", "unsupported"]),
)
def test_stacks_with_an_invalid_field_are_rejected_or_valid(
    stacks: NodeStacks, value: object, noise: bytes, name: str
) -> None:
    data = zlib.decompress(encode_stacks(stacks))
    for truncated in (data[:-1], noise):
        with pytest.raises(ValueError, match="stacks must"):
            decode_stacks(zlib.compress(truncated))
    with contextlib.suppress(ValueError):
        changed = json.dumps({**json.loads(data), name: value}).encode()
        decoded = decode_stacks(zlib.compress(changed))
        assert decode_stacks(encode_stacks(decoded)) == decoded


def test_data_that_would_fill_the_memory_is_rejected() -> None:
    with pytest.raises(ValueError, match="more than 67108864 bytes"):
        decode_stacks(zlib.compress(b" " * (64 * 1024 * 1024 + 1)))
    with pytest.raises(ValueError, match="stacks must have at most"):
        decode_stacks(b"x" * (MAX_BODY_BYTES + 1))


def test_long_stacks_are_truncated_to_the_limits() -> None:
    (text,) = decode_stacks(
        encode_stacks(NodeStacks({0: "x" * 2 * MAX_STACK_LENGTH}))
    ).texts.values()
    assert len(text) == MAX_STACK_LENGTH + len("...\n")
    # The text is nearly incompressible, and the stacks of all ranks exceed the limit.
    pieces = [f"{zlib.crc32(str(n).encode()):08x}" for n in range(8192)]
    noise = {
        rank: "".join(pieces[rank:] + pieces[:rank])[:: 1 + rank % 3] * 3 for rank in range(64)
    }
    assert len(encode_stacks(NodeStacks(noise))) <= MAX_BODY_BYTES


def test_some_ranks_are_taken_from_the_stacks_of_all() -> None:
    stacks = NodeStacks({0: "a", 1: "b"}, (2, 3), {4: "pid 4", 5: "pid 5"})
    assert stacks.of(frozenset({0, 3, 5, 9})) == NodeStacks({0: "a"}, (3,), {5: "pid 5"})
    assert stacks.of(None) == stacks


# -- text ------------------------------------------------------------------------------------------

STACK = 'Stack (most recent call first):\n  File "train.py", line 9 in step\n'


def test_equal_stacks_are_shown_once_and_rare_ones_first() -> None:
    internal = '  File "/here/elasticlib/workers/run_program.py", line 60 in run\n'
    texts = {0: STACK, 1: STACK + internal, 2: STACK.replace("line 9", "line 7"), 3: STACK}
    assert [group.ranks for group in group_stacks(texts)] == [(2,), (0, 1, 3)]
    assert "elasticlib" not in group_stacks(texts)[1].text


def test_ranks_and_nodes_without_stacks_are_named() -> None:
    request = Request("0" * 16, RequestKind.STACKS, "", "job", "run", 1, "ann", 5.0)
    assert len(encode_request(request)) < 512
    nodes = tuple(TargetNode(f"id{n}", f"h{n}", n) for n in range(3))
    answers = {"id0": Answer("h0", True, "sends 1 stack", 9), "id2": Answer("h2", False, LEFT_TEXT)}
    stacks = {"id0": NodeStacks({0: STACK}, unresponsive_ranks=(1,), unsupported={4: "pid 9"})}
    result = RequestResult(request, nodes, answers)
    text = "\n".join(stack_lines(result, stacks, frozenset({0, 1, 6})))
    assert "h0: rank 1 returned no stack within 1 s" in text
    assert "h0: rank 4 (pid 9) is not a Python process started by elasticlib" in text
    assert "h1: no response" in text
    assert "h2: has left the job" in text
    assert "no node that answered has a worker of rank 6" in text
