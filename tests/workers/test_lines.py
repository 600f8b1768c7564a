"""A stream cut into lines: nothing lost, nothing late, nothing that grows."""

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
def test_what_is_shown_does_not_depend_on_where_chunks_end(chunks: list[bytes]) -> None:
    piecewise, whole = LineSplitter(), LineSplitter()
    shown = [line for chunk in chunks for line in piecewise.cut(chunk)] + piecewise.rest()
    assert shown == whole.cut(b"".join(chunks)) + whole.rest()


@given(pieces)
def test_no_byte_of_a_stream_that_ends_its_line_is_lost(chunks: list[bytes]) -> None:
    lines = LineSplitter()
    text = b"".join(chunks) + b"end\n"
    assert b"".join(lines.cut(text) + lines.rest()) == text


def test_a_progress_bar_is_shown_as_it_moves() -> None:
    lines = LineSplitter()
    assert lines.cut(b"10%\r20%") == [b"10%\r"]
    assert lines.cut(b"\r30%\n") == [b"20%\r", b"30%\n"]


def test_a_line_without_an_end_is_cut_before_it_grows_for_ever() -> None:
    lines = LineSplitter()
    shown = b"".join(line for _ in range(1000) for line in lines.cut(b"x" * 1000))
    assert len(shown) >= 1_000_000 - MAX_LINE_BYTES - 1000


@given(pieces)
def test_the_tail_of_a_short_stream_is_all_of_it_as_a_terminal_shows_it(
    chunks: list[bytes],
) -> None:
    tail = TailBuffer()
    for chunk in chunks:
        tail.feed(chunk)
    text = b"".join(chunks)
    rows = text.removesuffix(b"\n").split(b"\n") if text else []
    shown = [row.rstrip(b"\r").split(b"\r")[-1].decode() for row in rows]
    assert tail.text() == "\n".join(shown[-TAIL_LINES:])


def test_of_a_long_stream_the_tail_keeps_whole_last_lines_in_bounded_memory() -> None:
    tail = TailBuffer()
    for number in range(10_000):
        tail.feed(b"%05d %s\n" % (number, b"x" * 900))
    lines = tail.text().splitlines()
    assert [int(line[:5]) for line in lines] == list(range(10_000 - len(lines), 10_000))
    assert len(lines) == TAIL_BYTES // 910
    tail.feed(b"y" * 10**6)
    assert tail.text() == "y" * TAIL_BYTES
