"""The client and the server side of the protocol exchange bytes without sockets."""

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
    """A client and a server with a key space. The test transfers all bytes between them."""

    def __init__(self, secret: bytes | None = None, frame_bytes: int = FRAME_BYTES) -> None:
        self.space = KeySpace(KeySpaceLimits(value_bytes=frame_bytes - MAX_HEADER_BYTES))
        self.client = ClientProtocol("there", "job", "label", secret, NONCES[0])
        self.server = ServerProtocol("job", secret, NONCES[1], frame_bytes)
        self.frame_bytes = frame_bytes

    def complete_handshake(self, piece: int = 1_000_000) -> Conversation:
        """Complete the handshake, in pieces of `piece` bytes."""
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

    def request(self, op: str, value: bytes = b"", **fields: object) -> list[Frame]:
        """Return the replies to a request, and check that each has an allowed length."""
        number, data = self.client.encode_request(op, fields, value)
        self.server.receive(data)
        while (request := self.server.next_request()) is not None:
            self.server.execute_request(request, self.space, 1, 0.0)
        frames = FrameReader(self.frame_bytes).feed(self.sent())
        assert {frame.id for frame in frames} <= {number}
        return frames

    def write(self, key: str, value: bytes, expected: int | None = None) -> Frame:
        (answer,) = self.request("write", value, key=key, ttl=None, expected=expected)
        return answer


@pytest.mark.parametrize("secret", [None, SECRET])
@given(piece=st.integers(1, 300))
def test_a_client_is_authenticated_with_pieces_of_any_size(
    secret: bytes | None, piece: int
) -> None:
    conversation = Conversation(secret).complete_handshake(piece)
    assert conversation.server.is_authenticated
    assert conversation.server.label == "label"
    assert conversation.write("key", b"value").fields == {"yes": True, "version": 1}


def test_the_first_request_can_follow_the_proof_at_once() -> None:
    conversation = Conversation(SECRET)
    conversation.server.receive(conversation.client.hello)
    assert conversation.server.next_request() is None
    proof = conversation.client.receive_handshake(conversation.sent())
    _, get = conversation.client.encode_request("get", {"key": "key"})
    conversation.server.receive(proof + get)
    request = conversation.server.next_request()
    assert request is not None
    assert request.op == "get"


@pytest.mark.parametrize("early", [b"", encode(Frame("get", 1, {"key": "key"}))])
def test_a_request_before_the_proof_is_never_executed(early: bytes) -> None:
    conversation = Conversation(SECRET)
    write = Frame("write", 2, {"key": "key", "ttl": None, "expected": None}, b"value")
    conversation.server.receive(conversation.client.hello + early + encode(write))
    assert conversation.server.next_request() is None
    assert conversation.server.is_rejected
    assert not conversation.server.is_authenticated
    conversation.server.receive(encode(write))
    assert conversation.server.next_request() is None
    assert conversation.space.version == 0


@given(st.binary(min_size=9, max_size=200))
def test_nothing_is_read_after_an_invalid_frame(garbage: bytes) -> None:
    conversation = Conversation().complete_handshake()
    get = encode(Frame("get", 1, {"key": "key"}))
    conversation.server.receive(b"\xff" + garbage + get)
    assert conversation.server.next_request() is None
    assert conversation.server.is_rejected
    assert conversation.server.buffered_bytes == len(conversation.server.send_buffer)
    (error,) = FrameReader().feed(conversation.sent())
    assert (error.op, error.id) == ("error", 0)


def test_a_hello_of_another_version_with_other_fields_is_rejected_with_both_versions() -> None:
    conversation = Conversation()
    conversation.server.receive(encode(Frame("hello", 0, {"protocol": 6, "job": "", "client": ""})))
    assert conversation.server.next_request() is None
    (error,) = FrameReader().feed(conversation.sent())
    assert f"speaks protocol {PROTOCOL}, not 6: start all nodes" in error.fields["message"]


def test_each_value_that_can_be_written_can_be_read_in_each_way() -> None:
    conversation = Conversation().complete_handshake()
    longest = b"x" * (FRAME_BYTES - MAX_HEADER_BYTES)
    version = conversation.write(LONGEST_HEADER, longest).fields["version"]
    entry = Entry(LONGEST_HEADER, longest, version)
    assert decode_entry(LONGEST_HEADER, *conversation.request("get", key=LONGEST_HEADER)) == entry
    assert (
        decode_entry(LONGEST_HEADER, conversation.write(LONGEST_HEADER, b"", expected=7)) == entry
    )
    assert decode_listing(*conversation.request("list", prefix="")).entries == (entry,)
    assert conversation.write("key", longest + b"x").fields["kind"] == "refused"


def test_a_request_that_no_frame_can_carry_is_rejected_by_the_client() -> None:
    client = Conversation().client
    fields = {"key": "key", "ttl": None, "expected": None}
    with pytest.raises(StoreRejectedError, match=r"a value is at most .* for key 'key'"):
        client.encode_request("write", fields, b"x" * (8 * 1024 * 1024))
    with pytest.raises(StoreRejectedError, match="key is text"):
        client.encode_request("get", {"key": 7})


@given(st.lists(st.integers(0, 8_000), max_size=10))
def test_a_listing_is_one_frame_or_an_error_that_names_the_limit(sizes: list[int]) -> None:
    conversation = Conversation().complete_handshake()
    for number, size in enumerate(sizes):
        conversation.write(f"key/{number:02}", b"x" * size)
    expected = conversation.space.list("key/")
    (reply,) = conversation.request("list", prefix="key/")
    if reply.op == "listing":
        assert decode_listing(reply) == expected
    else:
        assert EncodedListing.of(expected).size > FRAME_BYTES
        assert f"a listing is at most {FRAME_BYTES} bytes" in reply.fields["message"]


def test_a_watch_gets_one_reply_and_unwatch_returns_whether_it_did() -> None:
    conversation = Conversation().complete_handshake()
    assert conversation.request("watch", prefix="key", after=0, listing=False) == []
    (reply,) = conversation.request("unwatch", number=2)  # There is no watch with this number.
    assert reply.fields["yes"] is True
    (reply,) = conversation.request("unwatch", number=1)
    assert reply.fields["yes"] is False
    conversation.write("key", b"")
    (reply,) = conversation.request("watch", prefix="key", after=0, listing=True)
    assert decode_listing(reply) == conversation.space.list("key")


def test_a_client_with_much_unread_data_is_notified_without_the_listing() -> None:
    conversation = Conversation().complete_handshake()
    listing = EncodedListing.of(conversation.space.list(""))
    conversation.server.notify(1, listing)
    assert FrameReader().feed(conversation.sent())[0].op == "listing"
    conversation.server.send_buffer += b"x" * (NO_NOTIFICATION_BYTES + 1)
    conversation.server.notify(2, listing)
    (reply,) = FrameReader().feed(conversation.sent()[NO_NOTIFICATION_BYTES + 1 :])
    assert reply.op == "answer"
