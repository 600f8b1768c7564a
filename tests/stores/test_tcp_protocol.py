"""The two sides of a connection, with bytes between them and without sockets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.errors import StoreRejectedError
from elasticlib.stores.interface import Entry
from elasticlib.stores.key_space import MAX_KEY_BYTES, KeySpace, KeySpaceLimits
from elasticlib.stores.tcp_protocol import (
    MAX_HEADER_BYTES,
    NO_NOTIFICATION_BYTES,
    PROTOCOL,
    ClientProtocol,
    EncodedListing,
    Frame,
    FrameReader,
    ServerProtocol,
    decode_entry,
    decode_listing,
    encode,
)

SECRET = b"sixteen bytes are the least"
NONCES = "0" * 64, "1" * 64
FRAME_BYTES = 32 * 1024
LONGEST_HEADER = "\x01" * MAX_KEY_BYTES
"""A key of which JSON makes six characters for each byte."""


class Conversation:
    """A client and the server's side, with a key space that holds what a frame can carry."""

    def __init__(self, secret: bytes | None = None, frame_bytes: int = FRAME_BYTES) -> None:
        self.space = KeySpace(KeySpaceLimits(value_bytes=frame_bytes - MAX_HEADER_BYTES))
        self.client = ClientProtocol("there", "job", "label", secret, NONCES[0])
        self.server = ServerProtocol("job", secret, NONCES[1], frame_bytes)
        self.frame_bytes = frame_bytes

    def shake_hands(self, piece: int = 1_000_000) -> Conversation:
        """Exchange the handshake in pieces of so many bytes."""
        hello = self.client.hello
        for at in range(0, len(hello), piece):
            self.server.receive(hello[at : at + piece])
            assert self.server.next_request() is None
        welcome, proof = self.sent(), b""
        for at in range(0, len(welcome), piece):
            assert not self.client.is_authenticated
            proof = self.client.receive_handshake(welcome[at : at + piece])
        assert self.client.is_authenticated
        for at in range(0, len(proof), piece):
            self.server.receive(proof[at : at + piece])
            assert self.server.next_request() is None
        assert self.sent() == b"", "the proof needs no reply"
        return self

    def sent(self) -> bytes:
        data = bytes(self.server.send_buffer)
        self.server.send_buffer.clear()
        return data

    def ask(self, op: str, value: bytes = b"", **fields: object) -> list[Frame]:
        """Return the replies to a request, each of which has an allowed length."""
        number, data = self.client.encode_request(op, fields, value)
        self.server.receive(data)
        while (request := self.server.next_request()) is not None:
            self.server.execute_request(request, self.space, 1, 0.0)
        frames = FrameReader(self.frame_bytes).feed(self.sent())
        assert {frame.id for frame in frames} <= {number}
        return frames

    def write(self, key: str, value: bytes, expected: int | None = None) -> Frame:
        (answer,) = self.ask("write", value, key=key, ttl=None, expected=expected)
        return answer


@pytest.mark.parametrize("secret", [None, SECRET])
@given(piece=st.integers(1, 300))
def test_a_client_is_authenticated_with_pieces_of_any_size(
    secret: bytes | None, piece: int
) -> None:
    talk = Conversation(secret).shake_hands(piece)
    assert talk.server.is_authenticated
    assert talk.server.label == "label"
    assert talk.write("key", b"value").fields == {"yes": True, "version": 1}


def test_the_first_request_can_follow_the_proof_at_once() -> None:
    talk = Conversation(SECRET)
    talk.server.receive(talk.client.hello)
    assert talk.server.next_request() is None
    proof = talk.client.receive_handshake(talk.sent())
    _, get = talk.client.encode_request("get", {"key": "key"})
    talk.server.receive(proof + get)
    request = talk.server.next_request()
    assert request is not None
    assert request.op == "get"


@pytest.mark.parametrize("early", [b"", encode(Frame("get", 1, {"key": "key"}))])
def test_a_request_before_the_proof_is_never_executed(early: bytes) -> None:
    talk = Conversation(SECRET)
    write = Frame("write", 2, {"key": "key", "ttl": None, "expected": None}, b"value")
    talk.server.receive(talk.client.hello + early + encode(write))
    assert talk.server.next_request() is None
    assert talk.server.is_rejected
    assert not talk.server.is_authenticated
    talk.server.receive(encode(write))
    assert talk.server.next_request() is None
    assert talk.space.version == 0


@given(st.binary(min_size=9, max_size=200))
def test_nothing_is_read_after_an_invalid_frame(garbage: bytes) -> None:
    talk = Conversation().shake_hands()
    get = encode(Frame("get", 1, {"key": "key"}))
    talk.server.receive(b"\xff" + garbage + get)
    assert talk.server.next_request() is None
    assert talk.server.is_rejected
    assert talk.server.buffered_bytes == len(talk.server.send_buffer)
    (error,) = FrameReader().feed(talk.sent())
    assert (error.op, error.id) == ("error", 0)


def test_a_hello_of_another_version_with_other_fields_is_rejected_with_both_versions() -> None:
    talk = Conversation()
    talk.server.receive(encode(Frame("hello", 0, {"protocol": 6, "job": "", "client": ""})))
    assert talk.server.next_request() is None
    (error,) = FrameReader().feed(talk.sent())
    assert f"speaks protocol {PROTOCOL}, not 6: start all nodes" in error.fields["message"]


def test_each_value_that_can_be_written_can_be_read_in_each_way() -> None:
    talk = Conversation().shake_hands()
    longest = b"x" * (FRAME_BYTES - MAX_HEADER_BYTES)
    version = talk.write(LONGEST_HEADER, longest).fields["version"]
    entry = Entry(LONGEST_HEADER, longest, version)
    assert decode_entry(LONGEST_HEADER, *talk.ask("get", key=LONGEST_HEADER)) == entry
    assert decode_entry(LONGEST_HEADER, talk.write(LONGEST_HEADER, b"", expected=7)) == entry
    assert decode_listing(*talk.ask("list", prefix="")).entries == (entry,)
    assert talk.write("key", longest + b"x").fields["kind"] == "refused"


def test_a_request_that_no_frame_can_carry_is_rejected_by_the_client() -> None:
    client = Conversation().client
    fields = {"key": "key", "ttl": None, "expected": None}
    with pytest.raises(StoreRejectedError, match=r"a value is at most .* for key 'key'"):
        client.encode_request("write", fields, b"x" * (8 * 1024 * 1024))
    with pytest.raises(StoreRejectedError, match="key is text"):
        client.encode_request("get", {"key": 7})


@given(st.lists(st.integers(0, 8_000), max_size=10))
def test_a_listing_is_one_frame_or_an_error_that_names_the_limit(sizes: list[int]) -> None:
    talk = Conversation().shake_hands()
    for number, size in enumerate(sizes):
        talk.write(f"key/{number:02}", b"x" * size)
    expected = talk.space.list("key/")
    (reply,) = talk.ask("list", prefix="key/")
    if reply.op == "listing":
        assert decode_listing(reply) == expected
    else:
        assert EncodedListing.of(expected).size > FRAME_BYTES
        assert f"a listing is at most {FRAME_BYTES} bytes" in reply.fields["message"]


def test_a_watch_gets_one_reply_and_unwatch_returns_whether_it_did() -> None:
    talk = Conversation().shake_hands()
    assert talk.ask("watch", prefix="key", after=0, listing=False) == []
    (reply,) = talk.ask("unwatch", number=2)  # there is no such watch
    assert reply.fields["yes"] is True
    (reply,) = talk.ask("unwatch", number=1)
    assert reply.fields["yes"] is False
    talk.write("key", b"")
    (reply,) = talk.ask("watch", prefix="key", after=0, listing=True)
    assert decode_listing(reply) == talk.space.list("key")


def test_a_client_with_much_unread_data_is_notified_without_the_listing() -> None:
    talk = Conversation().shake_hands()
    listing = EncodedListing.of(talk.space.list(""))
    talk.server.notify(1, listing)
    assert FrameReader().feed(talk.sent())[0].op == "listing"
    talk.server.send_buffer += b"x" * (NO_NOTIFICATION_BYTES + 1)
    talk.server.notify(2, listing)
    (reply,) = FrameReader().feed(talk.sent()[NO_NOTIFICATION_BYTES + 1 :])
    assert reply.op == "answer"
