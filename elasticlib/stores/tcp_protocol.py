"""What goes over the connection between a TCP store and its server, for both ends, without sockets.

A frame is a length, a header length, a JSON header of a fixed schema and the raw value; a frame
that is too long, or differs from its schema in any field, is refused before anything acts on it.
First the two ends shake hands: the client says which protocol it speaks, for which job, and who it
is; where there is a secret, the server proves that it knows it, then the client. From then on each
request of the client has a number, which its answer bears too. A long listing is several frames.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from ..errors import ConfigError, ElasticError, LeaseLost, StoreRefused
from .keyspace import Entry, Listing
from .secret import DIGITS, HOW, VARIABLE, Exchange, Role, is_digits, prove, proves

PROTOCOL = 5
MAX_FRAME_BYTES = 8 * 1024 * 1024
HANDSHAKE_BYTES = 8 * 1024
"""The longest frame of a client that is not in yet."""
WELCOME_BYTES = 64 * 1024
"""The longest frame of a server that has not welcomed us yet."""
PAGE_BYTES = 1024 * 1024
"""Of a listing in one frame, unless a single entry has more: others are answered between two."""
LABEL_CHARACTERS = 1024
NOT_OURS = "not as an elasticlib store"
"""Says of what answers there that it is something else."""

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
HEXADECIMAL = _Field(f"{DIGITS} hexadecimal digits", is_digits)

# hello stays as it is in every protocol, so that one of another protocol is refused by number.
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
    "changed": {"prefix": TEXT, "after": WHOLE},
    "watch": {"prefix": TEXT, "after": WHOLE, "listing": TRUTH},
    "unwatch": {"number": WHOLE},
    "answer": {"yes": TRUTH, "version": WHOLE},
    "listing": {"version": WHOLE, "rows": ROWS, "more": TRUTH},
    "error": {"kind": TEXT, "message": TEXT},
}
"""Each request and each answer, with exactly the fields that it has."""

CARRIES_VALUE = frozenset({"write", "listing"})

_to_json = json.JSONEncoder(separators=(",", ":")).encode


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


_from_json = json.JSONDecoder(parse_constant=_no_constant).decode


def encode(frame: Frame) -> bytes:
    """The bytes of a frame. The caller keeps to the schema; the reader checks it."""
    return pack(frame.op, frame.id, _to_json(frame.fields), frame.value)


def pack(op: str, number: int, fields: str, value: bytes) -> bytes:
    """The same, of fields that are JSON already."""
    header = f'{{"op":"{op}","id":{number},{fields[1:]}'.encode()
    total = _LENGTH.size + len(header) + len(value)
    return b"".join((_LENGTHS.pack(total, len(header)), header, value))


def pack_fields(frame: Frame) -> str:
    """The fields of a frame for `pack`, where many have them in common."""
    return _to_json(frame.fields)


def _decode(body: bytes) -> Frame:
    if len(body) < _LENGTH.size:
        raise StoreRefused(f"a frame is at least {_LENGTH.size} bytes, got {len(body)}")
    (size,) = _LENGTH.unpack_from(body)
    end = _LENGTH.size + size
    if end > len(body):
        raise StoreRefused(f"a header of {size} bytes does not fit a frame of {len(body)}")
    try:
        return _checked(_header(body[_LENGTH.size : end]), body[end:])
    except RecursionError:  # be it in reading the header, or in showing a part of it
        raise StoreRefused("a frame's header is JSON of a few levels, got too many") from None


def _header(text: bytes) -> dict[str, Any]:
    try:
        header = _from_json(text.decode())
    except ValueError as error:
        raise StoreRefused(f"a frame's header is JSON, got {text[:80]!r}: {error}") from None
    if type(header) is not dict:
        raise StoreRefused(f"a frame's header is a JSON object, got {text[:80]!r}")
    return header


def _checked(header: dict[str, Any], value: bytes) -> Frame:
    op, number = header.pop("op", None), header.pop("id", None)
    if type(op) is not str or op not in SCHEMA:
        raise StoreRefused(f"a frame's op is one of {', '.join(SCHEMA)}, got {op!r:.80}")
    if not _is_whole(number):
        raise StoreRefused(f"{op}: id is {WHOLE.rule}, got {number!r:.80}")
    check_fields(op, header)
    if value and op not in CARRIES_VALUE:
        raise StoreRefused(f"{op} carries no value, got {len(value)} bytes")
    return Frame(op, number, header, value)


def check_fields(op: str, fields: Mapping[str, Any]) -> None:
    """StoreRefused unless these are the fields of the operation, each as the schema has it."""
    schema = SCHEMA[op]
    if fields.keys() != schema.keys():
        raise StoreRefused(f"{op} has the fields {sorted(schema)}, got {sorted(fields)!s:.200}")
    for name, field in schema.items():
        if not field.accepts(fields[name]):
            raise StoreRefused(f"{op}: {name} is {field.rule}, got {fields[name]!r:.80}")


class FrameReader:
    """Puts frames together from the pieces in which they arrive.

    max_bytes: the longest frame that is taken; it may be changed between two frames.
    """

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    @property
    def held_bytes(self) -> int:
        """Bytes that have arrived and were not taken yet, as a frame or as a part of one."""
        return len(self._buffer)

    @property
    def unread(self) -> bytes:
        """What has arrived and was not taken."""
        return bytes(self._buffer)

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete now; StoreRefused for bytes that are none of ours."""
        self.add(data)
        return list(iter(self.take, None))

    def add(self, data: bytes) -> None:
        """More bytes, for `take`."""
        self._buffer += data

    def take(self) -> Frame | None:
        """The next frame; None while it is not complete. StoreRefused as `feed`."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (total,) = _LENGTH.unpack_from(self._buffer)
        if total > self.max_bytes:
            raise StoreRefused(f"a frame is at most {self.max_bytes} bytes, got {total}")
        end = _LENGTH.size + int(total)
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return _decode(body)

    def forget(self) -> None:
        """Drop what has arrived."""
        self._buffer = bytearray()


# -- answers -----------------------------------------------------------------------------------

KINDS: Mapping[str, type[ElasticError]] = {
    "refused": StoreRefused,
    "lease lost": LeaseLost,
    "bad argument": ConfigError,
}
"""The errors that a server answers with, by the name that they have in a frame."""

_KIND_OF = {error: kind for kind, error in KINDS.items()}


def has_long_answer(request: Frame) -> bool:
    """Whether its answer may carry values."""
    if request.op == "write":
        return request.fields["expected"] is not None  # what it has lost against
    return request.op in ("get", "list", "watch")


def error_frame(number: int, error: ElasticError) -> Frame:
    """The answer that raises the same error at the client; 0 is for the whole connection."""
    return Frame("error", number, {"kind": _KIND_OF[type(error)], "message": str(error)})


def error_of(frame: Frame) -> ElasticError:
    """The error that an error frame stands for."""
    return KINDS.get(frame.fields["kind"], StoreRefused)(frame.fields["message"])


def answer(number: int, yes: bool, version: int = 0) -> Frame:
    """The answer to what can be said with yes or no, and the version of what was written."""
    return Frame("answer", number, {"yes": yes, "version": version})


def listing_frame(number: int, version: int, entries: Sequence[Entry], more: bool) -> Frame:
    """Entries in one frame; more: whether others of the same listing are in a next one."""
    rows = [[entry.key, entry.version, len(entry.value)] for entry in entries]
    value = b"".join([entry.value for entry in entries])
    return Frame("listing", number, {"version": version, "rows": rows, "more": more}, value)


def read_listing(frame: Frame) -> Listing:
    """The entries in one frame. Raises StoreRefused where their sizes are not the value's."""
    entries, at = [], 0
    for key, version, size in frame.fields["rows"]:
        entries.append(Entry(key, frame.value[at : at + size], version))
        at += size
    if at != len(frame.value):
        raise StoreRefused(f"a listing of {at} bytes came with {len(frame.value)}")
    return Listing(tuple(entries), frame.fields["version"])


def pages_of(entries: tuple[Entry, ...], frame_bytes: int) -> list[tuple[Entry, ...]]:
    """The entries of each frame of a listing, which has at least one.

    Raises:
        StoreRefused: for an entry that fits no frame.
    """
    pages, start, size = [], 0, 0
    for at, entry in enumerate(entries):
        # Twelve bytes are the longest escape of one character in JSON.
        own = 12 * len(entry.key) + 50 + len(entry.value)
        if own > frame_bytes - 1024:
            raise StoreRefused(
                f"an answer is at most {frame_bytes - 1024} bytes, and what stands at "
                f"{entry.key!r} takes up to {own}"
            )
        if at > start and size + own > min(PAGE_BYTES, frame_bytes - 1024):
            pages.append(entries[start:at])
            start, size = at, 0
        size += own
    pages.append(entries[start:])
    return pages


def whole_listing(listing: Listing, frame_bytes: int) -> Frame | None:
    """The listing in one frame, without a number; None if it takes more."""
    pages = pages_of(listing.entries, frame_bytes)
    return listing_frame(0, listing.version, listing.entries, False) if len(pages) == 1 else None


# -- shaking hands -----------------------------------------------------------------------------


class ServerHandshake:
    """How the server lets one client in. Until then nothing else of it is listened to; where there
    is a secret, a client that has not proved to know it learns nothing of the server but the
    protocol, and that the server knows it.

    nonce: fresh for each connection. client: the label of the client that is in; None until then.
    """

    def __init__(self, job: str, secret: bytes | None, nonce: str) -> None:
        self.client: str | None = None
        self._job = job
        self._secret = secret
        self._nonce = nonce
        self._hello: Frame | None = None
        self._exchange: Exchange | None = None

    def hear(self, frame: Frame) -> Frame:
        """The answer to the client's next frame, or StoreRefused by name."""
        if self._hello is None:
            self._hello = _checked_hello(frame)
            if self._secret is None:
                return self._welcome(self._hello)
            return Frame("challenge", frame.id, {"nonce": self._nonce})
        due = "nonce" if self._exchange is None else "response"
        if frame.op != due or self._secret is None:
            raise StoreRefused(f"a {due} was due from this client, got {frame.op}")
        if self._exchange is None:
            job = self._hello.fields["job"]
            self._exchange = Exchange(self._nonce, frame.fields["nonce"], job)
            proof = prove(self._secret, Role.SERVER, self._exchange)
            return Frame("proof", frame.id, {"proof": proof})
        if not proves(frame.fields["proof"], self._secret, Role.CLIENT, self._exchange):
            raise StoreRefused(f"has another secret than this client: {HOW}")
        return self._welcome(self._hello)

    def _welcome(self, hello: Frame) -> Frame:
        job = hello.fields["job"]
        # Who names no job asks whose store it is, and learns it by the welcome.
        if self._job and job not in ("", self._job):
            raise StoreRefused(f"serves job {self._job!r}, not {job!r}")
        self.client = hello.fields["client"]
        return Frame("welcome", hello.id, {"protocol": PROTOCOL, "job": self._job})


def _checked_hello(hello: Frame) -> Frame:
    if hello.op != "hello":
        raise StoreRefused(f"a connection begins with hello, got {hello.op}")
    spoken, label = hello.fields["protocol"], hello.fields["client"]
    if spoken != PROTOCOL:
        raise StoreRefused(f"speaks protocol {PROTOCOL}, not {spoken}")
    if len(label) > LABEL_CHARACTERS:
        raise StoreRefused(f"a client's label is at most {LABEL_CHARACTERS} long, got {len(label)}")
    return hello


class ClientHandshake:
    """How a client is let in, and makes sure that it is where it wanted to be.

    With a secret, the client talks to nobody who has not shown that it knows it too, and proves
    nothing to them either; a server that asks for none is refused like one with another.

    Args:
        name: the server's address, which the errors give.
        job, label: whose store it is to be, and who this client is.
        nonce: fresh for each connection.
    """

    def __init__(self, name: str, job: str, label: str, secret: bytes | None, nonce: str) -> None:
        self.done = False
        self.reader = FrameReader(WELCOME_BYTES)
        self._name = name
        self._job = job
        self._label = label
        self._secret = secret
        self._nonce = nonce
        self._exchange: Exchange | None = None
        self._due = frozenset({"challenge", "welcome"})

    def begin(self) -> bytes:
        """What to send first."""
        fields = {"protocol": PROTOCOL, "job": self._job, "client": self._label}
        hello = encode(Frame("hello", 0, fields))
        if self._secret is None:
            return hello
        # Both at once, which saves a round trip; who asks for no secret has refused by then.
        return hello + encode(Frame("nonce", 0, {"nonce": self._nonce}))

    def receive(self, data: bytes) -> bytes:
        """What to send on having received this. Raises StoreRefused: it is no store of ours, says
        no to us, or does not know our secret."""
        self.reader.add(data)
        answers = b""
        try:
            while not self.done and (frame := self.reader.take()) is not None:
                answers += self._hear(frame)
        except _Unlike as error:
            raise StoreRefused(str(error)) from None
        except StoreRefused as error:
            raise StoreRefused(f"{self._name} answers, but {NOT_OURS}: {error}") from None
        if self.done:
            self.reader.max_bytes = MAX_FRAME_BYTES
        return answers

    def _hear(self, frame: Frame) -> bytes:
        if frame.op == "error":
            raise _Unlike(f"{self._name} {frame.fields['message']}")
        if frame.op not in self._due:
            raise StoreRefused(frame.op)
        if frame.op == "challenge":
            if self._secret is None:
                raise _Unlike(
                    f"{self._name} asks for a shared secret, and this client has none: {HOW}"
                )
            self._exchange = Exchange(frame.fields["nonce"], self._nonce, self._job)
            self._due = frozenset({"proof"})
            return b""
        if frame.op == "welcome":
            if self._secret is not None and self._exchange is None:
                raise _Unlike(
                    f"{self._name} asks for no secret, and this client has one: {HOW}, or unset "
                    f"{VARIABLE} here"
                )
            self.done = True
            return b""
        return self._prove(frame.fields["proof"])

    def _prove(self, servers: str) -> bytes:
        secret, exchange = self._secret, self._exchange
        if secret is None or exchange is None or not proves(servers, secret, Role.SERVER, exchange):
            raise _Unlike(
                f"{self._name} has another secret than this client, or is not our store: {HOW}"
            )
        self._due = frozenset({"welcome"})
        return encode(Frame("response", 0, {"proof": prove(secret, Role.CLIENT, exchange)}))


class _Unlike(StoreRefused):
    """A store of ours, which this client is not for."""
