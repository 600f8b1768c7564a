"""What is asked of agents and what they answer: read back as it was, and nothing else is read."""

from __future__ import annotations

import contextlib
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.observe.history import JobState
from elasticlib.observe.question import (
    LONGEST_STACKS,
    LONGEST_TEXTS,
    Answer,
    Question,
    Stacks,
    What,
    decode_answer,
    decode_question,
    decode_stacks,
    encode_answer,
    encode_question,
    encode_stacks,
)
from elasticlib.observe.story import NodeStatus, WorkerStatus

COUNTS = st.integers(0, 10**6)
SECONDS = st.floats(0, 1e6)
WORKERS = st.builds(
    WorkerStatus,
    COUNTS,
    COUNTS,
    st.text(max_size=20),
    st.booleans(),
    st.none() | COUNTS,
    st.none() | SECONDS,
    st.none() | SECONDS,
    st.none() | COUNTS,
)
STANDINGS = st.builds(
    NodeStatus,
    st.text(max_size=20),
    st.text(max_size=20),
    state=st.sampled_from(JobState),
    generation=COUNTS,
    node_rank=st.none() | COUNTS,
    reason=st.text(max_size=50),
    workers=st.lists(WORKERS, max_size=3).map(tuple),
)
ANSWERS = st.builds(Answer, COUNTS, STANDINGS, SECONDS, SECONDS, st.none() | SECONDS)
QUESTIONS = st.builds(Question, st.sampled_from(What), COUNTS, st.none() | st.frozensets(COUNTS))
TEXTS = st.dictionaries(COUNTS, st.text(max_size=50), max_size=4)
STACKS = st.builds(Stacks, TEXTS, st.lists(COUNTS, max_size=3).map(tuple), TEXTS)


@given(QUESTIONS)
def test_a_question_is_read_as_it_was_asked(question: Question) -> None:
    assert decode_question(encode_question(question)) == question


@given(ANSWERS)
def test_an_answer_is_read_as_it_was_given(answer: Answer) -> None:
    assert decode_answer(encode_answer(answer)) == answer


@given(STACKS)
def test_stacks_are_read_as_they_were_written(stacks: Stacks) -> None:
    assert decode_stacks(encode_stacks(stacks)) == stacks


WRONG = st.sampled_from(
    [None, True, -1, 3, 1e400, "", "x", [], ["x"], [{}], {}, {"1": 2}, {"x": ""}, [[[]]]]
)


@given(ANSWERS, STACKS, QUESTIONS, st.data())
def test_what_is_not_whole_is_refused_and_nothing_else_happens(
    answer: Answer, stacks: Stacks, question: Question, data: st.DataObject
) -> None:
    packed = encode_stacks(stacks)
    kinds = (
        (decode_answer, encode_answer(answer), False),
        (decode_question, encode_question(question), False),
        (decode_stacks, zlib.decompress(packed), True),
    )
    for decode, whole, pack in kinds:
        said = json.loads(whole)
        said[data.draw(st.sampled_from(sorted(said)))] = data.draw(WRONG)
        changed = json.dumps(said).encode()
        for wrong in (data.draw(st.binary(max_size=40)), changed, whole[:-1]):
            with contextlib.suppress(ValueError):
                decode(zlib.compress(wrong) if pack else wrong)


def test_what_would_fill_the_memory_is_refused_before_it_does() -> None:
    with pytest.raises(ValueError, match="cut short, or more than"):
        decode_stacks(zlib.compress(b" " * (64 * 1024 * 1024 + 1)))
    with pytest.raises(ValueError, match="a question is at most"):
        decode_question(b"[" * 70_000)
    with pytest.raises(ValueError, match="is JSON"):
        decode_answer(b"[" * 70_000)


def test_long_stacks_are_cut_and_many_are_cut_more() -> None:
    (text,) = decode_stacks(encode_stacks(Stacks({0: "x" * 2 * LONGEST_STACKS}))).texts.values()
    assert len(text) == LONGEST_STACKS + len("...\n")
    # Text that hardly packs, of more ranks than there is room for.
    pieces = [f"{zlib.crc32(str(n).encode()):08x}" for n in range(8192)]
    noise = {
        rank: "".join(pieces[rank:] + pieces[:rank])[:: 1 + rank % 3] * 3 for rank in range(64)
    }
    assert len(encode_stacks(Stacks(noise))) <= LONGEST_TEXTS
