"""The two ends of a connection, with bytes between them and no socket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.errors import StoreRejectedError
from elasticlib.stores.interface import Entry, WatchResult
from elasticlib.stores.key_space import MAX_KEY_BYTES, KeySpace, Limits
from elasticlib.stores.tcp_protocol import (
    HEADER_ROOM,
    ClientEnd,
    Frame,
    FrameReader,
    ServerEnd,
    encode,
    read_entry,
    read_listing,
)

SECRET = b"sixteen bytes are the least"
NONCES = "0" * 64, "1" * 64
FRAME_BYTES = 32 * 1024
LONGEST_HEADER = "\x01" * MAX_KEY_BYTES
"""A key of which JSON makes six characters for each byte."""


class Conversation:
    """A client and the server's end, of a keyspace that holds as much as a frame can carry."""

    def __init__(self, secret: bytes | None = None, frame_bytes: int = FRAME_BYTES) -> None:
        self.space = KeySpace(Limits(value_bytes=frame_bytes - HEADER_ROOM))
        self.client = ClientEnd("there", "job", "label", secret, NONCES[0])
        self.server = ServerEnd("job", secret, NONCES[1], frame_bytes)
        self.told: list[tuple[int, WatchResult]] = []
        self.frame_bytes = frame_bytes

    def shake_hands(self, piece: int = 1_000_000) -> Conversation:
        """Both say what they have to say, in pieces of so many bytes."""
        said = self.client.hello
        while not self.client.is_in:
            for at in range(0, len(said), piece):
                self.server.receive(said[at : at + piece])
                assert self.server.next_request() is None
            heard, said = self.sent(), b""
            for at in range(0, len(heard), piece):
                said += self.client.shake_hands(heard[at : at + piece])
        return self

    def sent(self) -> bytes:
        data = bytes(self.server.unsent)
        self.server.unsent.clear()
        return data

    def ask(self, op: str, value: bytes = b"", **fields: object) -> list[Frame]:
        """What the client hears, each frame of which fits what a frame may have."""
        number, data = self.client.ask(op, fields, value)
        self.server.receive(data)
        while self.server.next_request() is not None:
            watched = self.server.perform(self.space, 1, 0.0)
            if watched is not False:
                self.told.append((number, watched))
        reader, frames = FrameReader(self.frame_bytes), list[Frame]()
        while self.server.has_more:
            if not self.server.unsent:
                self.server.add_page()
            frames += reader.feed(self.sent())
        assert {frame.id for frame in frames} <= {number}
        return frames

    def write(self, key: str, value: bytes, expected: int | None = None) -> Frame:
        (answer,) = self.ask("write", value, key=key, ttl=None, expected=expected)
        return answer


@pytest.mark.parametrize("secret", [None, SECRET])
@given(piece=st.integers(1, 300))
def test_a_client_is_let_in_however_its_bytes_are_cut(secret: bytes | None, piece: int) -> None:
    talk = Conversation(secret).shake_hands(piece)
    assert talk.server.is_in
    assert talk.server.label == "label"
    assert talk.write("key", b"value").fields == {"yes": True, "version": 1}


@pytest.mark.parametrize("early", [b"", encode(Frame("get", 1, {"key": "key"}))])
def test_what_comes_before_the_handshake_is_done_is_never_performed(early: bytes) -> None:
    talk = Conversation(SECRET)
    write = Frame("write", 2, {"key": "key", "ttl": None, "expected": None}, b"value")
    talk.server.receive(talk.client.hello + early + encode(write))
    assert talk.server.next_request() is None
    assert talk.server.refused
    assert not talk.server.is_in
    talk.server.receive(encode(write))
    assert talk.server.next_request() is None
    assert talk.space.version == 0


@given(st.binary(min_size=9, max_size=200))
def test_what_is_no_frame_is_the_last_that_is_read_of_a_client(garbage: bytes) -> None:
    talk = Conversation().shake_hands()
    get = encode(Frame("get", 1, {"key": "key"}))
    talk.server.receive(b"\xff" + garbage + get)
    assert talk.server.next_request() is None
    assert talk.server.refused
    assert talk.server.held_bytes == len(talk.server.unsent)
    (error,) = FrameReader().feed(talk.sent())
    assert (error.op, error.id) == ("error", 0)


def test_what_was_written_can_be_read_in_each_way_that_there_is() -> None:
    talk = Conversation().shake_hands()
    longest = b"x" * (FRAME_BYTES - HEADER_ROOM)
    version = talk.write(LONGEST_HEADER, longest).fields["version"]
    entry = Entry(LONGEST_HEADER, longest, version)
    assert read_entry(LONGEST_HEADER, *talk.ask("get", key=LONGEST_HEADER)) == entry
    assert read_entry(LONGEST_HEADER, talk.write(LONGEST_HEADER, b"", expected=7)) == entry
    assert read_listing(talk.ask("list", prefix="")).entries == (entry,)
    assert talk.write("key", longest + b"x").fields["kind"] == "refused"


def test_what_no_frame_can_carry_is_refused_where_it_is_asked() -> None:
    client = Conversation().client
    fields = {"key": "key", "ttl": None, "expected": None}
    with pytest.raises(StoreRejectedError, match=r"a value is at most .* for key 'key'"):
        client.ask("write", fields, b"x" * (8 * 1024 * 1024))
    with pytest.raises(StoreRejectedError, match="key is text"):
        client.ask("get", {"key": 7})


SIZES = st.lists(st.integers(0, 20_000), max_size=30)


@given(SIZES)
def test_a_listing_is_whole_in_pages_that_fit_and_nothing_of_it_is_left(sizes: list[int]) -> None:
    talk = Conversation().shake_hands()
    for number, size in enumerate(sizes):
        talk.write(f"key/{number:02}", b"x" * size)
    pages = talk.ask("list", prefix="key/")
    assert read_listing(pages) == talk.space.list("key/")
    assert [page.fields["more"] for page in pages] == [True] * (len(pages) - 1) + [False]
    assert talk.server.listed_bytes == 0


def test_the_rest_of_a_listing_counts_until_it_is_sent_and_is_of_its_moment() -> None:
    talk = Conversation().shake_hands()
    for number in range(10):
        talk.write(f"key/{number}", b"x" * 20_000)
    before = talk.space.list("")
    _, data = talk.client.ask("list", {"prefix": ""})
    talk.server.receive(data)
    assert talk.server.next_request() is not None
    talk.server.perform(talk.space, 1, 0.0)
    assert 9 * 20_000 <= talk.server.listed_bytes < 10 * 20_000
    frames = talk.client.feed(talk.sent())
    talk.space.delete("key/9", None)
    while talk.server.has_more:
        talk.server.add_page()
        frames += talk.client.feed(talk.sent())
    assert read_listing(frames) == before


def test_a_watch_is_told_once_and_one_that_was_ended_says_whether_it_was() -> None:
    talk = Conversation().shake_hands()
    assert talk.ask("watch", prefix="key", after=0, listing=False) == []
    (ended,) = talk.ask("unwatch", number=2)  # no such watch is left to be told
    assert ended.fields["yes"] is True
    (ended,) = talk.ask("unwatch", number=1)
    assert ended.fields["yes"] is False
    talk.write("key", b"")
    assert talk.told == []
    assert talk.ask("watch", prefix="key", after=0, listing=True) == []
    assert talk.told == [(5, talk.space.list("key"))]
