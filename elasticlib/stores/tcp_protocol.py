"""What goes over the connection between a TCP store and its server, for both ends, without sockets.

A frame is a length, a header length, a JSON header of a fixed schema and the raw value; a frame
that is too long, or differs from its schema in any field, is refused before anything acts on it.
First the two ends shake hands: the client says which protocol it speaks, for which job, and who it
is; where there is a secret, the server proves that it knows it, then the client. From then on each
request of the client has a number, which its answer bears too. A long listing is several frames.
`ServerEnd` and `ClientEnd` are the two ends of one connection: bytes in, frames out, and back.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import attrs

from ..errors import ConfigError, ElasticError, LeaseLostError, StoreRejectedError
from .authentication import (
    DIGITS,
    SECRET_ENV,
    SECRET_MISMATCH_HINT,
    HandshakeTranscript,
    Role,
    compute_proof,
    is_hex_digest,
    verify_proof,
)
from .key_space import Entry, KeySpace, Lease, Listing, Watch, WatchResult, check_key, check_ttl

PROTOCOL = 6
MAX_FRAME_BYTES = 8 * 1024 * 1024
HEADER_ROOM = 8 * 1024
"""More than the header of any frame takes that carries one value, whatever its key."""
HANDSHAKE_BYTES = 8 * 1024
"""The longest frame of a client that is not in yet."""
WELCOME_BYTES = 64 * 1024
"""The longest frame of a server that has not welcomed us yet."""
PAGE_BYTES = 1024 * 1024
"""Of a listing in one frame, unless a single entry has more: others are answered between two."""
LABEL_CHARACTERS = 1024
NOT_OURS = "not as an elasticlib store"
"""Says of what answers there that it is something else."""

_OF_HTTP = ("HTTP", "GET ", "HEAD", "POST", "PUT ", "DELE", "OPTI", "CONN", "PATC", "TRAC")
"""How its requests and answers begin."""
_LENGTHS = struct.Struct(">II")
_LENGTH = struct.Struct(">I")

# -- frames ------------------------------------------------------------------------------------


@attrs.frozen
class Frame:
    """One message: a request or its answer, and the number that ties the two together."""

    op: str
    id: int
    fields: Mapping[str, Any] = attrs.field(factory=dict)
    value: bytes = b""


@attrs.frozen
class _Field:
    rule: str
    accepts: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1e9


def _is_row(row: Any) -> bool:
    return (
        type(row) is list
        and len(row) == 3
        and type(row[0]) is str
        and _is_whole(row[1])
        and _is_whole(row[2])
    )


WHOLE = _Field("a whole number from 0 to 2**63 - 1", _is_whole)
MAYBE_WHOLE = _Field("null or a whole number", lambda v: v is None or _is_whole(v))
MAYBE_SECONDS = _Field("null or a number of seconds", lambda v: v is None or _is_seconds(v))
TEXT = _Field("text", lambda v: type(v) is str)
TRUTH = _Field("true or false", lambda v: type(v) is bool)
ROWS = _Field("a list of [key, version, size]", lambda v: type(v) is list and all(map(_is_row, v)))
HEXADECIMAL = _Field(f"{DIGITS} hexadecimal digits", is_hex_digest)

# The fields of hello never change, so that a client of another protocol is refused by number.
SCHEMA: Mapping[str, Mapping[str, _Field]] = {
    "hello": {"protocol": WHOLE, "job": TEXT, "client": TEXT},
    "challenge": {"nonce": HEXADECIMAL},
    "nonce": {"nonce": HEXADECIMAL},
    "proof": {"proof": HEXADECIMAL},
    "response": {"proof": HEXADECIMAL},
    "welcome": {"protocol": WHOLE, "job": TEXT},
    "get": {"key": TEXT},
    "write": {"key": TEXT, "ttl": MAYBE_SECONDS, "expected": MAYBE_WHOLE},
    "delete": {"key": TEXT, "expected": MAYBE_WHOLE},
    "refresh": {"key": TEXT, "version": WHOLE},
    "list": {"prefix": TEXT},
    "watch": {"prefix": TEXT, "after": WHOLE, "listing": TRUTH},
    "unwatch": {"number": WHOLE},
    "answer": {"yes": TRUTH, "version": WHOLE},
    "listing": {"version": WHOLE, "rows": ROWS, "more": TRUTH},
    "error": {"kind": TEXT, "message": TEXT},
}
"""Each request and each answer, with exactly the fields that it has."""

CARRIES_VALUE = frozenset({"write", "answer", "listing"})

to_json = json.JSONEncoder(separators=(",", ":")).encode


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


_from_json = json.JSONDecoder(parse_constant=_no_constant).decode


def encode(frame: Frame) -> bytes:
    """The bytes of a frame. The caller keeps to the schema; the reader checks it."""
    return pack(frame.op, frame.id, to_json(frame.fields), frame.value)


def pack(op: str, number: int, fields: str, value: bytes) -> bytes:
    """The same, of fields that are JSON already, as many frames may have them in common."""
    header = f'{{"op":"{op}","id":{number},{fields[1:]}'.encode()
    total = _LENGTH.size + len(header) + len(value)
    return b"".join((_LENGTHS.pack(total, len(header)), header, value))


def _decode(body: bytes) -> Frame:
    if len(body) < _LENGTH.size:
        raise StoreRejectedError(f"a frame is at least {_LENGTH.size} bytes, got {len(body)}")
    (size,) = _LENGTH.unpack_from(body)
    end = _LENGTH.size + size
    if end > len(body):
        raise StoreRejectedError(f"a header of {size} bytes does not fit a frame of {len(body)}")
    try:
        return _checked(_header(body[_LENGTH.size : end]), body[end:])
    except RecursionError:  # be it in reading the header, or in showing a part of it
        raise StoreRejectedError("a frame's header is JSON of a few levels, got too many") from None


def _header(text: bytes) -> dict[str, Any]:
    try:
        header = _from_json(text.decode())
    except ValueError as error:
        raise StoreRejectedError(f"a frame's header is JSON, got {text[:80]!r}: {error}") from None
    if type(header) is not dict:
        raise StoreRejectedError(f"a frame's header is a JSON object, got {text[:80]!r}")
    return header


def _checked(header: dict[str, Any], value: bytes) -> Frame:
    op, number = header.pop("op", None), header.pop("id", None)
    if type(op) is not str or op not in SCHEMA:
        raise StoreRejectedError(f"a frame's op is one of {', '.join(SCHEMA)}, got {op!r:.80}")
    if not _is_whole(number):
        raise StoreRejectedError(f"{op}: id is {WHOLE.rule}, got {number!r:.80}")
    check_fields(op, header)
    if value and op not in CARRIES_VALUE:
        raise StoreRejectedError(f"{op} carries no value, got {len(value)} bytes")
    return Frame(op, number, header, value)


def check_fields(op: str, fields: Mapping[str, Any]) -> None:
    """StoreRejectedError unless these are the fields of the operation, each as the schema has
    it."""
    schema = SCHEMA[op]
    if fields.keys() != schema.keys():
        raise StoreRejectedError(
            f"{op} has the fields {sorted(schema)}, got {sorted(fields)!s:.200}"
        )
    for name, field in schema.items():
        if not field.accepts(fields[name]):
            raise StoreRejectedError(f"{op}: {name} is {field.rule}, got {fields[name]!r:.80}")


class FrameReader:
    """Puts frames together from the pieces in which they arrive.

    max_bytes: the longest frame that is taken; it may be changed between two frames. unread: what
    has arrived and was not taken yet.
    """

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes
        self.unread = bytearray()

    def receive(self, data: bytes) -> None:
        """More bytes, for `take`."""
        self.unread += data

    def take(self) -> Frame | None:
        """The next frame; None while it is not complete. StoreRejectedError if it is none of
        ours."""
        if len(self.unread) < _LENGTH.size:
            return None
        (total,) = _LENGTH.unpack_from(self.unread)
        if total > self.max_bytes:
            begun = _as_text(bytes(self.unread[: _LENGTH.size]))
            raise StoreRejectedError(
                f"a frame is at most {self.max_bytes} bytes, got {total}{begun}"
            )
        end = _LENGTH.size + int(total)
        if len(self.unread) < end:
            return None
        body = bytes(self.unread[_LENGTH.size : end])
        del self.unread[:end]
        return _decode(body)

    def feed(self, data: bytes) -> list[Frame]:
        """More bytes, and the frames that are complete now."""
        self.receive(data)
        return list(iter(self.take, None))


def _as_text(start: bytes) -> str:
    """What a length may be instead, in words: the first characters of another protocol."""
    text = start.decode("ascii", "replace")
    if not (start.isascii() and text.isprintable()):
        return ""
    http = ": the other end speaks HTTP" * (text in _OF_HTTP)
    return f" (as text {text!r}{http})"


# -- answers -----------------------------------------------------------------------------------

KINDS: Mapping[str, type[ElasticError]] = {
    "refused": StoreRejectedError,
    "lease lost": LeaseLostError,
    "bad argument": ConfigError,
}
"""The errors that a server answers with, by the name that they have in a frame."""

_KIND_OF = {error: kind for kind, error in KINDS.items()}


def error_frame(number: int, error: ElasticError) -> Frame:
    """The answer that raises the same error at the client; 0 is for the whole connection."""
    return Frame("error", number, {"kind": _KIND_OF[type(error)], "message": str(error)})


def error_of(frame: Frame) -> ElasticError:
    """The error that an error frame stands for."""
    return KINDS.get(frame.fields["kind"], StoreRejectedError)(frame.fields["message"])


def answer(number: int, yes: bool, version: int = 0) -> Frame:
    """The answer to what can be said with yes or no, and the version of what was written."""
    return Frame("answer", number, {"yes": yes, "version": version})


def entry_answer(number: int, entry: Entry | None) -> Frame:
    """What stands at the key that was asked for: with version 0, nothing."""
    if entry is None:
        return answer(number, False)
    return Frame("answer", number, {"yes": False, "version": entry.version}, entry.value)


def read_entry(key: str, frame: Frame) -> Entry | None:
    """What stands at the key, by the answer to a `get` or to a `write` that has lost."""
    version = frame.fields["version"]
    return Entry(key, frame.value, version) if version else None


def listing_frame(number: int, version: int, entries: Sequence[Entry], more: bool) -> Frame:
    """Entries in one frame; more: whether others of the same listing are in a next one."""
    rows = [[entry.key, entry.version, len(entry.value)] for entry in entries]
    value = b"".join([entry.value for entry in entries])
    return Frame("listing", number, {"version": version, "rows": rows, "more": more}, value)


def read_listing(frames: Sequence[Frame]) -> Listing:
    """The entries in the frames of one listing. Raises StoreRejectedError where their sizes are not
    the
    value's."""
    entries = []
    for frame in frames:
        at = 0
        for key, version, size in frame.fields["rows"]:
            entries.append(Entry(key, frame.value[at : at + size], version))
            at += size
        if at != len(frame.value):
            raise StoreRejectedError(f"a listing of {at} bytes came with {len(frame.value)}")
    return Listing(tuple(entries), frames[0].fields["version"])


def has_long_answer(request: Frame) -> bool:
    """Whether its answer may carry values."""
    if request.op == "write":
        return request.fields["expected"] is not None  # what it has lost against
    return request.op in ("get", "list", "watch")


def _bytes_in_a_page(entry: Entry) -> int:
    # Twelve bytes are the longest escape of one character in JSON.
    return 12 * len(entry.key) + 50 + len(entry.value)


# -- the server's end --------------------------------------------------------------------------


def _admission(job: str, secret: bytes | None, nonce: str) -> Generator[bytes, Frame, str]:
    """Is sent what a client says, and yields what to answer; ends with the client's label."""
    hello = _due((yield b""), "hello", "a connection begins with hello")
    spoken, label = hello.fields["protocol"], hello.fields["client"]
    if spoken != PROTOCOL:
        raise StoreRejectedError(
            f"speaks protocol {PROTOCOL}, not {spoken}: start all nodes with the same version of "
            "elasticlib"
        )
    if len(label) > LABEL_CHARACTERS:
        raise StoreRejectedError(
            f"a client's label is at most {LABEL_CHARACTERS} long, got {len(label)}"
        )
    if secret is not None:
        said = yield encode(Frame("challenge", hello.id, {"nonce": nonce}))
        asked = _due(said, "nonce", "this client should have sent a nonce")
        exchange = HandshakeTranscript(nonce, asked.fields["nonce"], hello.fields["job"])
        own = compute_proof(secret, Role.SERVER, exchange)
        said = yield encode(Frame("proof", asked.id, {"proof": own}))
        response = _due(said, "response", "this client should have sent a response")
        if not verify_proof(response.fields["proof"], secret, Role.CLIENT, exchange):
            raise StoreRejectedError(f"has another secret than this client: {SECRET_MISMATCH_HINT}")
    # Who names no job asks whose store it is, and learns it by the welcome.
    if job and hello.fields["job"] not in ("", job):
        raise StoreRejectedError(f"serves job {job!r}, not {hello.fields['job']!r}")
    return str(label)


def _due(frame: Frame, op: str, rule: str) -> Frame:
    if frame.op != op:
        raise StoreRejectedError(f"{rule}, got {frame.op}")
    return frame


def _perform(space: KeySpace, client: int, request: Frame, now: float) -> Frame:
    """Do what the request asks for; its answer."""
    fields, number = request.fields, request.id
    if request.op == "get":
        return entry_answer(number, space.get(check_key(fields["key"])))
    if request.op == "write":
        return _write(space, client, request, now)
    if request.op == "refresh":
        space.refresh(fields["key"], fields["version"], client, now)
        return answer(number, True)
    if request.op == "unwatch":
        return answer(number, space.unwatch(client, fields["number"]))
    if request.op == "delete":
        return answer(number, space.delete(check_key(fields["key"]), fields["expected"]))
    raise StoreRejectedError(f"{request.op} is no operation here")


def _write(space: KeySpace, client: int, request: Frame, now: float) -> Frame:
    fields, value = request.fields, request.value
    key, ttl, expected = fields["key"], check_ttl(fields["ttl"]), fields["expected"]
    lease = None if ttl is None else Lease(client, float(ttl))
    if expected is None:
        return answer(request.id, True, space.put(key, value, lease, now).version)
    outcome = space.compare_set(key, value, expected, lease, now)
    if outcome.succeeded and outcome.entry is not None:
        return answer(request.id, True, outcome.entry.version)
    return entry_answer(request.id, outcome.entry)


class ServerEnd(FrameReader):
    """What one client sends becomes requests, one at a time, and answers become bytes for it.

    Until the client is in, nothing but the handshake is listened to; where there is a secret, a
    client that has not proved to know it learns nothing of the server but the protocol, and that
    the server knows it. Whoever breaks the rules is told so and refused: nothing more is read.

    Args:
        job: whose store it is; "" for anybody's.
        secret: what the client must prove to know, if any.
        nonce: fresh for each connection.
        frame_bytes: the longest frame of a client that is in, and of an answer.

    label: what the client calls itself. is_in: whether it was let in, and not refused since.
    request: what `next_request` found, until `perform`. performed: how many were. unsent: bytes for
    the client; who sends some takes them away. listed_bytes: what is left of a listing, as of its
    moment.
    """

    def __init__(self, job: str, secret: bytes | None, nonce: str, frame_bytes: int) -> None:
        super().__init__(min(frame_bytes, HANDSHAKE_BYTES))
        self.label = ""
        self.is_in = False
        self.refused = False
        self.request: Frame | None = None
        self.performed = 0
        self.unsent = bytearray()
        self.listed_bytes = 0
        self._job = job
        self._frame_bytes = frame_bytes
        self._admission = _admission(job, secret, nonce)
        next(self._admission)
        self._listed = 0, 0
        self._rest: tuple[Entry, ...] = ()

    # -- what arrives -------------------------------------------------------------------------

    @property
    def has_half_a_frame(self) -> bool:
        return self.request is None and bool(self.unread)

    @property
    def held_bytes(self) -> int:
        """What lies in both directions."""
        size = len(self.unsent) + len(self.unread)
        return size if self.request is None else size + len(self.request.value)

    def next_request(self) -> Frame | None:
        """The first request that is not handled, once it is complete."""
        try:
            while self.request is None and (frame := self.take()) is not None:
                if not self.is_in:
                    self._admit(frame)
                else:
                    self.request = frame
        except StoreRejectedError as error:
            self.refuse(error)
        return self.request

    def perform(self, space: KeySpace, client: int, now: float) -> WatchResult:
        """Do what the request asks for, and answer it.

        Returns:
            What `space.watch` returns if the request is a watch, else False.
        """
        request, self.request = self.request, None
        self.performed += 1
        if request is None:
            return False
        fields = request.fields
        try:
            if request.op == "list":
                self._begin_listing(request.id, space.list(fields["prefix"]))
            elif request.op == "watch":
                prefix, after, listing = fields["prefix"], fields["after"], fields["listing"]
                return space.watch(Watch(client, request.id, prefix, after, listing))
            else:
                self.send(_perform(space, client, request, now))
        except (StoreRejectedError, LeaseLostError, ConfigError) as error:
            self.send(error_frame(request.id, error))
        return False

    def refuse(self, error: StoreRejectedError, number: int = 0) -> None:
        """Say why, and read nothing more."""
        self.is_in, self.refused = False, True
        self.request = None
        self.unread = bytearray()
        self.send(error_frame(number, error))

    def _admit(self, frame: Frame) -> None:
        try:
            self.unsent += self._admission.send(frame)
        except StopIteration as done:
            self.label, self.is_in = done.value, True
            self.max_bytes = self._frame_bytes
            self.send(Frame("welcome", 0, {"protocol": PROTOCOL, "job": self._job}))
        except StoreRejectedError as error:
            self.refuse(error, frame.id)

    # -- what goes out ------------------------------------------------------------------------

    @property
    def has_more(self) -> bool:
        """Whether there is anything to send."""
        return bool(self.unsent or self._rest)

    def send(self, frame: Frame) -> None:
        """Put a frame behind those still to be sent."""
        self.unsent += encode(frame)

    def _begin_listing(self, number: int, listing: Listing) -> None:
        self._listed = number, listing.version
        self._rest = listing.entries
        self.listed_bytes = sum(map(_bytes_in_a_page, listing.entries))
        self.add_page()

    def add_page(self) -> None:
        """Put the next page of the listing behind what is to be sent; there is at least one."""
        entries, at = self._rest, 0
        room = min(PAGE_BYTES, self._frame_bytes - HEADER_ROOM)
        if self.listed_bytes <= room:
            at, self.listed_bytes = len(entries), 0
        while at < len(entries) and (not at or room >= _bytes_in_a_page(entries[at])):
            room -= (size := _bytes_in_a_page(entries[at]))
            self.listed_bytes -= size
            at += 1
        page, self._rest = entries[:at], entries[at:]
        self.send(listing_frame(*self._listed, page, bool(self._rest)))


# -- the client's end --------------------------------------------------------------------------


class ClientEnd(FrameReader):
    """How a client is let in, and makes sure that it is where it wanted to be; from then on
    requests become bytes, and what arrives becomes answers.

    With a secret, the client talks to nobody who has not shown that it knows it too, and proves
    nothing to them either; a server that asks for none is refused like one with another.

    Args:
        name: the server's address, which the errors give.
        job, label: whose store it is to be, and who this client is.
        nonce: fresh for each connection.

    is_in: whether it was let in. hello: what to send first.
    """

    def __init__(self, name: str, job: str, label: str, secret: bytes | None, nonce: str) -> None:
        super().__init__(WELCOME_BYTES)
        self.is_in = False
        self._name = name
        self._numbers = itertools.count(1)
        greeting = Frame("hello", 0, {"protocol": PROTOCOL, "job": job, "client": label})
        self._entry = self._enter(encode(greeting), job, secret, nonce)
        self.hello = next(self._entry)

    def shake_hands(self, data: bytes) -> bytes:
        """What to send on having received this, until the client is in.

        Raises:
            StoreRejectedError: it is no store of ours, says no to us, or does not know our secret.
        """
        self.receive(data)
        said = b""
        while not self.is_in:
            try:
                frame = self.take()
            except StoreRejectedError as error:
                raise self._not_ours(str(error)) from None
            if frame is None:
                break
            try:
                said += self._entry.send(frame)
            except StopIteration:
                self.is_in = True
                self.max_bytes = MAX_FRAME_BYTES
        return said

    def _enter(
        self, hello: bytes, job: str, secret: bytes | None, nonce: str
    ) -> Generator[bytes, Frame, None]:
        """Yields what to send, and is sent what the server says; ends once the client is in."""
        if secret is None:
            if self._due((yield hello), "welcome", "challenge").op == "challenge":
                raise StoreRejectedError(
                    f"{self._name} asks for a shared secret, and this client has none: "
                    f"{SECRET_MISMATCH_HINT}"
                )
            return
        # Both at once, which saves a round trip; who asks for no secret has refused by then.
        said = yield hello + encode(Frame("nonce", 0, {"nonce": nonce}))
        challenge = self._due(said, "challenge", "welcome")
        if challenge.op == "welcome":
            raise StoreRejectedError(
                f"{self._name} asks for no secret, and this client has one: "
                f"{SECRET_MISMATCH_HINT}, or unset {SECRET_ENV} here"
            )
        exchange = HandshakeTranscript(challenge.fields["nonce"], nonce, job)
        proof = self._due((yield b""), "proof")
        if not verify_proof(proof.fields["proof"], secret, Role.SERVER, exchange):
            raise StoreRejectedError(
                f"{self._name} has another secret than this client, or is not our store: "
                f"{SECRET_MISMATCH_HINT}"
            )
        own = compute_proof(secret, Role.CLIENT, exchange)
        self._due((yield encode(Frame("response", 0, {"proof": own}))), "welcome")

    def _due(self, frame: Frame, *ops: str) -> Frame:
        if frame.op == "error":
            raise StoreRejectedError(f"{self._name} {frame.fields['message']}")
        if frame.op not in ops:
            raise self._not_ours(frame.op)
        return frame

    def _not_ours(self, what: str) -> StoreRejectedError:
        return StoreRejectedError(f"{self._name} answers, but {NOT_OURS}: {what}")

    def ask(self, op: str, fields: Mapping[str, Any], value: bytes = b"") -> tuple[int, bytes]:
        """The number and the bytes of a request.

        Raises:
            StoreRejectedError: no frame can carry it. The server would end the connection over it.
        """
        if len(value) > MAX_FRAME_BYTES - HEADER_ROOM:
            raise StoreRejectedError(
                f"a value is at most {MAX_FRAME_BYTES - HEADER_ROOM} bytes, got {len(value)} "
                f"for key {fields['key']!r}"
            )
        check_fields(op, fields)
        number = next(self._numbers)
        return number, encode(Frame(op, number, fields, value))
