"""The splitting of output into lines without loss or delay, and the tail of a stream."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elasticlib.workers.output import (
    MAX_LINE_BYTES,
    TAIL_BYTES,
    TAIL_LINES,
    LineSplitter,
    TailBuffer,
)

pieces = st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b""]), max_size=30)


@given(pieces)
def test_lines_do_not_depend_on_the_boundaries_of_chunks(chunks: list[bytes]) -> None:
    piecewise, at_once = LineSplitter(), LineSplitter()
    lines = [line for chunk in chunks for line in piecewise.cut(chunk)] + piecewise.rest()
    assert lines == at_once.cut(b"".join(chunks)) + at_once.rest()


@given(pieces)
def test_no_byte_of_a_stream_of_complete_lines_is_lost(chunks: list[bytes]) -> None:
    splitter = LineSplitter()
    text = b"".join(chunks) + b"end\n"
    assert b"".join(splitter.cut(text) + splitter.rest()) == text


def test_carriage_return_ends_a_line_of_a_progress_bar() -> None:
    splitter = LineSplitter()
    assert splitter.cut(b"10%\r20%") == [b"10%\r"]
    assert splitter.cut(b"\r30%\n") == [b"20%\r", b"30%\n"]


def test_endless_line_is_split_at_the_maximum_length() -> None:
    splitter = LineSplitter()
    output = b"".join(line for _ in range(1000) for line in splitter.cut(b"x" * 1000))
    assert len(output) >= 1_000_000 - MAX_LINE_BYTES - 1000


@given(pieces)
def test_tail_of_a_short_stream_is_the_text_that_a_terminal_would_show(
    chunks: list[bytes],
) -> None:
    tail = TailBuffer()
    for chunk in chunks:
        tail.feed(chunk)
    text = b"".join(chunks)
    rows = text.removesuffix(b"\n").split(b"\n") if text else []
    visible = [row.rstrip(b"\r").split(b"\r")[-1].decode() for row in rows]
    assert tail.text() == "\n".join(visible[-TAIL_LINES:])


def test_tail_of_a_long_stream_has_the_last_complete_lines_in_bounded_memory() -> None:
    tail = TailBuffer()
    for number in range(10_000):
        tail.feed(b"%05d %s\n" % (number, b"x" * 900))
    lines = tail.text().splitlines()
    assert [int(line[:5]) for line in lines] == list(range(10_000 - len(lines), 10_000))
    assert len(lines) == TAIL_BYTES // 910
    tail.feed(b"y" * 10**6)
    assert tail.text() == "y" * TAIL_BYTES
