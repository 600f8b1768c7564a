"""One connection to one member of an etcd, and what its answers and failures mean.

Whatever goes wrong is an error of the tree that names the member and what was asked of it; that
nothing was sent at all is kept apart, as another member may then be asked without harm.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import requests
from etcd3gw.client import Etcd3Client
from urllib3.exceptions import HTTPError, NewConnectionError

from ..errors import StoreError, StoreRefused, StoreTimeout, StoreUnavailable
from .etcd_access import Access, Member
from .sockets import keep_honest

API = "/v3/"
"""etcd 3.4 and later. Given, it saves the library a question at each connection."""

# gRPC's codes in the JSON of an error.
DEADLINE_EXCEEDED, OUT_OF_RANGE, UNAVAILABLE, UNAUTHENTICATED = 4, 11, 14, 16
OLD_TOKEN = "revision of auth store is old"
NO_LEASE = "requested lease not found"


class Unsent(StoreUnavailable):
    """The member was not reached: nothing has happened there."""


class NoSuchRevision(StoreRefused):
    """The revision asked for is compacted, or of the future."""


class LeaseEnded(StoreRefused):
    """The lease under which something was to be written is over; nothing is written."""


class TokenRefused(StoreRefused):
    """The token is not, or no longer, known."""


@attrs.frozen
class Request:
    """What to ask: a path below `/v3/`, its body with bytes in base64, and words for errors.

    repeatable: whether it may be asked again, elsewhere, when its answer was lost.
    """

    path: str
    body: Mapping[str, Any] = attrs.field(repr=False)  # large, or a password
    what: str
    repeatable: bool = False


@attrs.frozen
class Patience:
    """Seconds to connect, and then to be answered."""

    connect: float
    answer: float


@attrs.frozen
class Answer:
    """What etcd said, and the revision of the whole store as it did."""

    revision: int
    fields: Mapping[str, Any]


class Connection:
    """Kept alive from one request to the next; for one thread at a time."""

    def __init__(self, member: Member, access: Access) -> None:
        self.member = member
        self._client = Etcd3Client(
            member.host,
            member.port,
            protocol=member.protocol,
            ca_cert=access.ca_cert,
            cert_cert=access.cert,
            cert_key=access.key,
            api_path=API,
        )
        # Settings come as arguments, and a proxy for the web does not reach the cluster's etcd.
        self._client.session.trust_env = False

    def ask(self, request: Request, patience: Patience, token: str | None) -> Answer:
        """The answer to one request."""
        response = self._post(request, patience, token, stream=False)
        try:
            fields = response.json()
            # Of a stream of one message.
            fields = fields.get("result", fields)
            return Answer(int(fields["header"]["revision"]), fields)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise self._no_etcd(response.text) from None

    def stream(self, request: Request, patience: Patience, token: str | None) -> Stream:
        """The answer, which goes on; the connection is the stream's from now on."""
        return Stream(self, self._post(request, patience, token, stream=True))

    def close(self) -> None:
        self._client.session.close()

    def _post(
        self, request: Request, patience: Patience, token: str | None, *, stream: bool
    ) -> requests.Response:
        headers = {} if token is None else {"Authorization": token}
        if stream:
            # A member cut off from the others ends it, where it would be silent otherwise.
            headers["Grpc-Metadata-Hasleader"] = "true"
        try:
            response = self._client.session.post(
                self._client.get_url(request.path),
                json=request.body,
                headers=headers,
                timeout=(patience.connect, patience.answer),
                stream=stream,
            )
        except requests.RequestException as error:
            raise self._failure(error, request, patience) from error
        if response.status_code != 200:
            text = response.text
            response.close()
            raise self._refusal(response.status_code, text, request)
        return response

    def _failure(
        self, error: requests.RequestException, request: Request, patience: Patience
    ) -> StoreError:
        name = self.member.address
        cause = _cause(error)
        if isinstance(cause, ssl.SSLCertVerificationError):
            return StoreRefused(f"{name} shows a certificate that is not trusted: {cause}")
        if isinstance(error, requests.ConnectTimeout):
            return Unsent(f"{name} took no connection within {patience.connect:.3g} s")
        if isinstance(error, requests.Timeout):
            return StoreTimeout(
                f"{name} did not answer within {patience.answer:.3g} s: {request.what}"
            )
        if isinstance(cause, NewConnectionError):
            return Unsent(f"{name} was not reached: {cause.__cause__ or cause}")
        return StoreUnavailable(f"the connection to {name} broke, to {request.what}: {cause}")

    def _refusal(self, status: int, text: str, request: Request) -> StoreError:
        try:
            fields = json.loads(text)
            code, message = int(fields["code"]), str(fields["error"])
        except (ValueError, TypeError, KeyError):
            if status >= 500:
                return StoreUnavailable(f"{self.member.address}: HTTP {status}, {request.what}")
            return self._no_etcd(text)
        sentence = f"{self.member.address} would not {request.what}: {message}"
        if code == UNAUTHENTICATED or OLD_TOKEN in message:
            return TokenRefused(sentence)
        if NO_LEASE in message:
            return LeaseEnded(sentence)
        kinds = {
            DEADLINE_EXCEEDED: StoreTimeout,
            OUT_OF_RANGE: NoSuchRevision,
            UNAVAILABLE: StoreUnavailable,
        }
        return kinds.get(code, StoreRefused)(sentence)

    def _no_etcd(self, text: str) -> StoreError:
        return StoreRefused(
            f"{self.member.address} answers, but not as an etcd: {text.strip()[:200]!r}"
        )


class Stream:
    """An answer without an end, a message a line."""

    def __init__(self, connection: Connection, response: requests.Response) -> None:
        self._connection = connection
        self._response = response
        self._name = connection.member.address
        self._socket: socket.socket = response.raw.connection.sock

    def listen(self, timeout: float) -> None:
        """From now on it may be silent, but the network may not be for long past `timeout`."""
        self._socket.settimeout(None)
        keep_honest(self._socket, timeout)

    def messages(self) -> Iterator[Mapping[str, Any]]:
        """Each message, until the stream ends, which is an error."""
        try:
            for line in self._response.iter_lines(chunk_size=64 * 1024):
                if line:
                    yield self._message(line)
        # One that is shut under TLS reads as a ValueError.
        except (requests.RequestException, HTTPError, OSError, ValueError) as error:
            if isinstance(error, StoreError):
                raise
            raise StoreUnavailable(f"the watch at {self._name} broke: {_cause(error)}") from error
        raise StoreUnavailable(f"{self._name} ended the watch")

    def shut(self) -> None:
        """Wake whoever reads, from another thread."""
        with contextlib.suppress(OSError):  # it may have ended by itself
            # The plain socket's own: that of TLS would take its state from under the reader.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the connection; for the reader itself."""
        self._response.close()
        self._connection.close()

    def _message(self, line: bytes) -> Mapping[str, Any]:
        message = json.loads(line)
        result = message.get("result") if isinstance(message, dict) else None
        if not isinstance(result, dict):
            raise StoreUnavailable(f"{self._name} ended the watch: {line[:200]!r}")
        return result


def _cause(error: BaseException) -> BaseException:
    """What is at the bottom of an error of requests, or of urllib3."""
    while True:
        inner = getattr(error, "reason", None) or next(iter(error.args), None)
        if not isinstance(inner, BaseException):
            inner = next((a for a in error.args if isinstance(a, BaseException)), None)
        if inner is None or isinstance(error, NewConnectionError):
            return error
        error = inner
