"""Protocol of the TCP store for both sides of a connection. Pure: it needs no socket.

A frame consists of its length, the length of its header, a JSON header of a fixed schema, and a
value. A frame that is too long, or that differs from its schema in any field, is rejected before it
has an effect.

The handshake is one exchange. The client sends `hello` with its protocol version, its job, its
label and a nonce. The server answers with `welcome`, its own nonce and, if there is a secret, its
proof. The client verifies that proof, and sends its own `proof` together with its first request.
Each request has a number, and its reply has the same number. The reply to a watch is sent when the
watched prefix has changed. An error with number 0 ends the connection.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from ..errors import ConfigError, ElasticError, LeaseLostError, StoreRejectedError
from .authentication import (
    HEX_DIGITS,
    SECRET_ENV,
    SECRET_MISMATCH_HINT,
    HandshakeTranscript,
    Role,
    compute_proof,
    is_hex_digest,
    verify_proof,
)
from .key_space import Entry, KeySpace, Lease, Listing, Watch, check_key, check_ttl

PROTOCOL = 7
MAX_FRAME_BYTES = 8 * 1024 * 1024  # length of a frame, and so of the largest listing
MAX_HEADER_BYTES = 8 * 1024  # header of any frame that carries one value with any key
MAX_HANDSHAKE_BYTES = 8 * 1024  # a frame of a peer that is not authenticated
MAX_LABEL_LENGTH = 1024
NO_NOTIFICATION_BYTES = (
    1024 * 1024
)  # a client with more unsent bytes only learns that there is a change
NOT_A_STORE = "not as an elasticlib store"  # part of the error if another program answers

_HTTP_PREFIXES = ("HTTP", "GET ", "HEAD", "POST", "PUT ", "DELE", "OPTI", "CONN", "PATC", "TRAC")
_LENGTHS = struct.Struct(">II")
_LENGTH = struct.Struct(">I")

# -- frames ------------------------------------------------------------------------------------


@attrs.frozen
class Frame:
    """A request or a reply, with the number that connects the two."""

    op: str
    id: int
    fields: Mapping[str, Any] = attrs.field(factory=dict)
    value: bytes = b""


@attrs.frozen
class _Field:
    rule: str
    accepts: Callable[[Any], bool]


def _is_uint63(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1e9


def _is_row(row: Any) -> bool:
    return (
        type(row) is list
        and len(row) == 3
        and type(row[0]) is str
        and _is_uint63(row[1])
        and _is_uint63(row[2])
    )


UINT63 = _Field("an integer from 0 to 2**63 - 1", _is_uint63)
OPTIONAL_UINT63 = _Field("null or an integer >= 0", lambda v: v is None or _is_uint63(v))
OPTIONAL_SECONDS = _Field("null or a number of seconds", lambda v: v is None or _is_seconds(v))
TEXT = _Field("text", lambda v: type(v) is str)
BOOLEAN = _Field("true or false", lambda v: type(v) is bool)
ENTRY_ROWS = _Field(
    "a list of [key, version, size]", lambda v: type(v) is list and all(map(_is_row, v))
)
HEX = _Field(f"{HEX_DIGITS} hexadecimal digits", is_hex_digest)
OPTIONAL_HEX = _Field(
    f"null or {HEX_DIGITS} hexadecimal digits", lambda v: v is None or is_hex_digest(v)
)

# The fields of each operation.
SCHEMA: Mapping[str, Mapping[str, _Field]] = {
    "hello": {"protocol": UINT63, "job": TEXT, "client": TEXT, "nonce": HEX},
    "welcome": {"nonce": HEX, "proof": OPTIONAL_HEX},
    "proof": {"proof": HEX},
    "get": {"key": TEXT},
    "write": {"key": TEXT, "ttl": OPTIONAL_SECONDS, "expected": OPTIONAL_UINT63},
    "delete": {"key": TEXT, "expected": OPTIONAL_UINT63},
    "refresh": {"key": TEXT, "version": UINT63},
    "list": {"prefix": TEXT},
    "watch": {"prefix": TEXT, "after": UINT63, "listing": BOOLEAN},
    "unwatch": {"number": UINT63},
    "answer": {"yes": BOOLEAN, "version": UINT63},
    "listing": {"version": UINT63, "rows": ENTRY_ROWS},
    "error": {"kind": TEXT, "message": TEXT},
}
CARRIES_VALUE = frozenset({"write", "answer", "listing"})

_to_json = json.JSONEncoder(separators=(",", ":")).encode


def _reject_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


_from_json = json.JSONDecoder(parse_constant=_reject_constant).decode


def encode(frame: Frame) -> bytes:
    """Return the bytes of a frame. Only the receiver checks the schema."""
    return _pack(frame.op, frame.id, _to_json(frame.fields), frame.value)


def _pack(op: str, number: int, fields: str, value: bytes) -> bytes:
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
        return _check_frame(_decode_header(body[_LENGTH.size : end]), body[end:])
    except RecursionError:  # from parsing the header or from formatting a part of it
        raise StoreRejectedError("a frame's header is JSON with few levels, got too many") from None


def _decode_header(text: bytes) -> dict[str, Any]:
    try:
        header = _from_json(text.decode())
    except ValueError as error:
        raise StoreRejectedError(f"a frame's header is JSON, got {text[:80]!r}: {error}") from None
    if type(header) is not dict:
        raise StoreRejectedError(f"a frame's header is a JSON object, got {text[:80]!r}")
    return header


def _check_frame(header: dict[str, Any], value: bytes) -> Frame:
    op, number = header.pop("op", None), header.pop("id", None)
    if type(op) is not str or op not in SCHEMA:
        raise StoreRejectedError(f"a frame's op is one of {', '.join(SCHEMA)}, got {op!r:.80}")
    if not _is_uint63(number):
        raise StoreRejectedError(f"{op}: id is {UINT63.rule}, got {number!r:.80}")
    # Another version's hello may have other fields. It gets an error that names the versions.
    version = header.get("protocol")
    if op != "hello" or not _is_uint63(version) or version == PROTOCOL:
        check_fields(op, header)
    if value and op not in CARRIES_VALUE:
        raise StoreRejectedError(f"{op} carries no value, got {len(value)} bytes")
    return Frame(op, number, header, value)


def check_fields(op: str, fields: Mapping[str, Any]) -> None:
    """Raise StoreRejectedError unless the fields match the schema of the operation."""
    schema = SCHEMA[op]
    if fields.keys() != schema.keys():
        raise StoreRejectedError(
            f"{op} has the fields {sorted(schema)}, got {sorted(fields)!s:.200}"
        )
    for name, field in schema.items():
        if not field.accepts(fields[name]):
            raise StoreRejectedError(f"{op}: {name} is {field.rule}, got {fields[name]!r:.80}")


class FrameReader:
    """Assembles frames from the pieces in which their bytes arrive."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes  # longest frame that is accepted
        self.receive_buffer = bytearray()  # bytes after the last frame that `next_frame` returned

    def receive(self, data: bytes) -> None:
        """Append bytes to the receive buffer."""
        self.receive_buffer += data

    def next_frame(self) -> Frame | None:
        """Remove and return the next frame, or return None if it is incomplete.

        Raises:
            StoreRejectedError: The bytes are not a valid frame.
        """
        if len(self.receive_buffer) < _LENGTH.size:
            return None
        (total,) = _LENGTH.unpack_from(self.receive_buffer)
        if total > self.max_bytes:
            text = _describe_prefix(bytes(self.receive_buffer[: _LENGTH.size]))
            raise StoreRejectedError(
                f"a frame is at most {self.max_bytes} bytes, got {total}{text}"
            )
        end = _LENGTH.size + int(total)
        if len(self.receive_buffer) < end:
            return None
        body = bytes(self.receive_buffer[_LENGTH.size : end])
        del self.receive_buffer[:end]
        return _decode(body)

    def feed(self, data: bytes) -> list[Frame]:
        """Append bytes, and return all frames that are complete now."""
        self.receive(data)
        return list(iter(self.next_frame, None))


def _describe_prefix(start: bytes) -> str:
    """Describe the bytes of an invalid length if they are text, as of another protocol, or ""."""
    text = start.decode("ascii", "replace")
    if not (start.isascii() and text.isprintable()):
        return ""
    http = ": the other end speaks HTTP" * (text in _HTTP_PREFIXES)
    return f" (as text {text!r}{http})"


# -- replies -----------------------------------------------------------------------------------

ERROR_KINDS: Mapping[str, type[ElasticError]] = {
    "refused": StoreRejectedError,
    "lease lost": LeaseLostError,
    "bad argument": ConfigError,
}
_KIND_OF = {error: kind for kind, error in ERROR_KINDS.items()}


def error_frame(number: int, error: ElasticError) -> Frame:
    """Return the reply that raises an error of the same class and text in the client."""
    return Frame("error", number, {"kind": _KIND_OF[type(error)], "message": str(error)})


def decode_error(frame: Frame) -> ElasticError:
    """Return the error that an error frame contains."""
    return ERROR_KINDS.get(frame.fields["kind"], StoreRejectedError)(frame.fields["message"])


def decode_entry(key: str, frame: Frame) -> Entry | None:
    """Return the entry at the key from the reply to a `get` or to a `write` that failed."""
    version = frame.fields["version"]
    return Entry(key, frame.value, version) if version else None


def decode_listing(frame: Frame) -> Listing:
    """Return the listing in a frame, or raise StoreRejectedError if its sizes do not match."""
    entries, start = [], 0
    for key, version, size in frame.fields["rows"]:
        entries.append(Entry(key, frame.value[start : start + size], version))
        start += size
    if start != len(frame.value):
        raise StoreRejectedError(f"a listing of {start} bytes came with {len(frame.value)}")
    return Listing(tuple(entries), frame.fields["version"])


@attrs.frozen
class EncodedListing:
    """A listing that is encoded once and sent to any number of clients."""

    fields: str
    value: bytes

    @classmethod
    def of(cls, listing: Listing) -> EncodedListing:
        rows = [[entry.key, entry.version, len(entry.value)] for entry in listing.entries]
        value = b"".join([entry.value for entry in listing.entries])
        return cls(_to_json({"version": listing.version, "rows": rows}), value)

    @property
    def size(self) -> int:
        """An upper bound of the length of the frame that contains the listing."""
        return len(self.fields) + len(self.value) + 100

    def frame(self, number: int) -> bytes:
        """Return the bytes of the frame that replies to the given request."""
        return _pack("listing", number, self.fields, self.value)


def _answer(number: int, yes: bool, version: int = 0) -> Frame:
    return Frame("answer", number, {"yes": yes, "version": version})


def _entry_answer(number: int, entry: Entry | None) -> Frame:
    """Return the reply to a `get`, or to a `write` that failed, with the entry at the key."""
    if entry is None:
        return _answer(number, False)
    return Frame("answer", number, {"yes": False, "version": entry.version}, entry.value)


# -- server ------------------------------------------------------------------------------------


class ServerProtocol(FrameReader):
    """The server's side of one connection: received bytes become requests, replies become bytes.

    Before a client is authenticated, only handshake frames are read. A client that violates the
    protocol gets one error, and nothing more is read from it.

    Args:
        job: The job of the store; "" serves any job.
        secret: The secret that the client must prove to know, if any.
        nonce: A new nonce for each connection.
        max_frame_bytes: Longest frame of an authenticated client, and longest reply.
    """

    def __init__(self, job: str, secret: bytes | None, nonce: str, max_frame_bytes: int) -> None:
        super().__init__(min(max_frame_bytes, MAX_HANDSHAKE_BYTES))
        self.label = ""  # name that the client gave itself
        self.is_authenticated = False  # requests of this client are executed
        self.is_rejected = False  # the connection is to be closed after the error is sent
        self.send_buffer = bytearray()  # bytes that the connection has not accepted yet
        self._transcript: HandshakeTranscript | None = None  # set by hello, if there is a secret
        self._job = job
        self._secret = secret
        self._nonce = nonce
        self._max_frame_bytes = max_frame_bytes

    @property
    def buffered_bytes(self) -> int:
        """Number of bytes in both buffers."""
        return len(self.send_buffer) + len(self.receive_buffer)

    def next_request(self) -> Frame | None:
        """Process the handshake, and return the next complete request, or None.

        An invalid frame rejects the client.
        """
        try:
            while not self.is_rejected and (frame := self.next_frame()) is not None:
                if self.is_authenticated:
                    return frame
                if self._transcript is None:
                    self._receive_hello(frame)
                else:
                    self._receive_proof(frame, self._transcript)
        except StoreRejectedError as error:
            self.reject(error)
        return None

    def execute_request(self, request: Frame, space: KeySpace, client: int, now: float) -> None:
        """Execute a request, and append its reply to the send buffer.

        Args:
            request: What `next_request` returned.
            space: The keys of the store.
            client: The owner of the client's leases and watches in the key space.
            now: Monotonic time in seconds.
        """
        fields, number = request.fields, request.id
        try:
            if request.op == "list":
                self._send_listing(number, fields["prefix"], space)
            elif request.op == "watch":
                watch = Watch(client, number, fields["prefix"], fields["after"], fields["listing"])
                result = space.watch(watch)
                if isinstance(result, Listing):
                    self.notify(number, EncodedListing.of(result))
                elif result:
                    self.notify(number, None)
            else:
                self.send(_execute(space, client, request, now))
        except (StoreRejectedError, LeaseLostError, ConfigError) as error:
            self.send(error_frame(number, error))

    def notify(self, number: int, listing: EncodedListing | None) -> None:
        """Reply to a watch that its prefix has changed.

        The reply contains the listing if it fits into a frame and few earlier bytes are unsent.
        """
        if (
            listing is not None
            and listing.size <= self._max_frame_bytes
            and len(self.send_buffer) <= NO_NOTIFICATION_BYTES
        ):
            self.send_buffer += listing.frame(number)
        else:
            self.send(_answer(number, True))

    def send(self, frame: Frame) -> None:
        """Append a frame to the send buffer."""
        self.send_buffer += encode(frame)

    def reject(self, error: StoreRejectedError) -> None:
        """Send an error that ends the connection, and ignore everything else from the client."""
        self.is_authenticated, self.is_rejected = False, True
        self.receive_buffer = bytearray()
        self.send(error_frame(0, error))

    def _receive_hello(self, frame: Frame) -> None:
        if frame.op != "hello":
            raise StoreRejectedError(f"a connection begins with hello, got {frame.op}")
        version = frame.fields.get("protocol")
        if version != PROTOCOL:
            raise StoreRejectedError(
                f"speaks protocol {PROTOCOL}, not {version}: start all nodes with the same "
                "version of elasticlib"
            )
        job, label = frame.fields["job"], frame.fields["client"]
        if len(label) > MAX_LABEL_LENGTH:
            raise StoreRejectedError(
                f"a client's label is at most {MAX_LABEL_LENGTH} long, got {len(label)}"
            )
        # A client that is not authenticated does not learn the name of the job.
        if self._job and job not in ("", self._job):
            own = f"serves job {self._job!r}" if self._secret is None else "serves another job"
            raise StoreRejectedError(f"{own}, not {job!r}")
        self.label = label
        transcript = HandshakeTranscript(self._nonce, frame.fields["nonce"], job)
        proof = None
        if self._secret is None:
            self._accept_client()
        else:
            self._transcript = transcript
            proof = compute_proof(self._secret, Role.SERVER, transcript)
        self.send(Frame("welcome", 0, {"nonce": self._nonce, "proof": proof}))

    def _receive_proof(self, frame: Frame, transcript: HandshakeTranscript) -> None:
        if frame.op != "proof":
            raise StoreRejectedError(f"this client must send its proof before {frame.op}")
        if self._secret is not None and not verify_proof(
            frame.fields["proof"], self._secret, Role.CLIENT, transcript
        ):
            raise StoreRejectedError(f"has another secret than this client: {SECRET_MISMATCH_HINT}")
        self._accept_client()

    def _accept_client(self) -> None:
        self.is_authenticated = True
        self.max_bytes = self._max_frame_bytes

    def _send_listing(self, number: int, prefix: str, space: KeySpace) -> None:
        listing = space.list(prefix)
        size = listing.size
        # The sum is checked first, because a listing of the whole store would need much memory.
        if size <= self._max_frame_bytes:
            encoded = EncodedListing.of(listing)
            size = encoded.size
            if size <= self._max_frame_bytes:
                self.send_buffer += encoded.frame(number)
                return
        raise StoreRejectedError(
            f"a listing is at most {self._max_frame_bytes} bytes, got {size} under {prefix!r}: "
            "list a longer prefix, or store less"
        )


def _execute(space: KeySpace, client: int, request: Frame, now: float) -> Frame:
    fields, number = request.fields, request.id
    if request.op == "get":
        return _entry_answer(number, space.get(check_key(fields["key"])))
    if request.op == "write":
        return _execute_write(space, client, request, now)
    if request.op == "refresh":
        space.refresh(fields["key"], fields["version"], client, now)
        return _answer(number, True)
    if request.op == "unwatch":
        return _answer(number, space.unwatch(client, fields["number"]))
    if request.op == "delete":
        return _answer(number, space.delete(check_key(fields["key"]), fields["expected"]))
    raise StoreRejectedError(f"{request.op} is not a request")


def _execute_write(space: KeySpace, client: int, request: Frame, now: float) -> Frame:
    fields, value = request.fields, request.value
    key, ttl, expected = fields["key"], check_ttl(fields["ttl"]), fields["expected"]
    lease = None if ttl is None else Lease(client, float(ttl))
    if expected is None:
        return _answer(request.id, True, space.put(key, value, lease, now).version)
    result = space.compare_set(key, value, expected, lease, now)
    if result.succeeded and result.entry is not None:
        return _answer(request.id, True, result.entry.version)
    return _entry_answer(request.id, result.entry)


# -- client ------------------------------------------------------------------------------------


class ClientProtocol(FrameReader):
    """The client's side of one connection: requests become bytes, received bytes become replies.

    A client with a secret sends no request, and no proof, to a server that has not proved that it
    knows the secret. A server without a secret is rejected like one with another secret.

    Args:
        address: The address of the server, for error messages.
        job: The job whose store is expected; "" accepts any.
        label: The name of this client at the server.
        secret: The secret that the server must prove to know, if any.
        nonce: A new nonce for each connection.
    """

    def __init__(
        self, address: str, job: str, label: str, secret: bytes | None, nonce: str
    ) -> None:
        super().__init__(MAX_HANDSHAKE_BYTES)
        self.is_authenticated = False  # the server has been verified
        self._address = address
        self._job = job
        self._secret = secret
        self._nonce = nonce
        self._numbers = itertools.count(1)  # numbers of the requests
        fields = {"protocol": PROTOCOL, "job": job, "client": label, "nonce": nonce}
        self.hello = encode(Frame("hello", 0, fields))  # first bytes to send

    def receive_handshake(self, data: bytes) -> bytes:
        """Process the server's part of the handshake.

        Returns:
            The bytes to send before the first request, once `is_authenticated` is True; else b"".

        Raises:
            StoreRejectedError: The peer is not an elasticlib store, rejects this client, or does
                not know the secret.
        """
        self.receive(data)
        try:
            frame = self.next_frame()
        except StoreRejectedError as error:
            raise self._not_a_store_error(str(error)) from None
        if frame is None:
            return b""
        if frame.op == "error":
            raise StoreRejectedError(f"{self._address} {frame.fields['message']}")
        if frame.op != "welcome":
            raise self._not_a_store_error(frame.op)
        own_proof = self._verify_server(frame)
        self.is_authenticated = True
        self.max_bytes = MAX_FRAME_BYTES
        return own_proof

    def _verify_server(self, welcome: Frame) -> bytes:
        """Verify the server's proof. Return the bytes of this client's own proof, or b""."""
        proof = welcome.fields["proof"]
        if self._secret is None:
            if proof is not None:
                raise StoreRejectedError(
                    f"{self._address} asks for a shared secret, and this client has none: "
                    f"{SECRET_MISMATCH_HINT}"
                )
            return b""
        if proof is None:
            raise StoreRejectedError(
                f"{self._address} asks for no secret, and this client has one: "
                f"{SECRET_MISMATCH_HINT}, or unset {SECRET_ENV} here"
            )
        transcript = HandshakeTranscript(welcome.fields["nonce"], self._nonce, self._job)
        if not verify_proof(proof, self._secret, Role.SERVER, transcript):
            raise StoreRejectedError(
                f"{self._address} has another secret than this client, or is not our store: "
                f"{SECRET_MISMATCH_HINT}"
            )
        own = compute_proof(self._secret, Role.CLIENT, transcript)
        return encode(Frame("proof", 0, {"proof": own}))

    def _not_a_store_error(self, reason: str) -> StoreRejectedError:
        return StoreRejectedError(f"{self._address} answers, but {NOT_A_STORE}: {reason}")

    def encode_request(
        self, op: str, fields: Mapping[str, Any], value: bytes = b""
    ) -> tuple[int, bytes]:
        """Return the number and the bytes of a new request.

        Raises:
            StoreRejectedError: The server would end the connection over this request.
        """
        if len(value) > MAX_FRAME_BYTES - MAX_HEADER_BYTES:
            raise StoreRejectedError(
                f"a value is at most {MAX_FRAME_BYTES - MAX_HEADER_BYTES} bytes, got {len(value)} "
                f"for key {fields['key']!r}"
            )
        check_fields(op, fields)
        number = next(self._numbers)
        return number, encode(Frame(op, number, fields, value))
