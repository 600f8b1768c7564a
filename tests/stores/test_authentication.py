"""Client and server reject a peer that does not know the secret. The secret is never sent."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.clock import monotonic
from elasticlib.errors import ConfigError, StoreRejectedError
from elasticlib.stores.authentication import (
    NONCE_BYTES,
    HandshakeTranscript,
    Role,
    compute_proof,
    verify_proof,
)
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_protocol import PROTOCOL, Frame, FrameReader, encode
from elasticlib.stores.tcp_server import TcpStoreServer

SECRET = b"correct horse battery staple"
NONCE = bytes(NONCE_BYTES).hex()
HELLO = Frame("hello", 0, {"protocol": PROTOCOL, "job": "", "client": "test", "nonce": NONCE})
EXCHANGE = HandshakeTranscript(NONCE, "1" * 64, "job")


@pytest.fixture
def server() -> Iterator[TcpStoreServer]:
    with TcpStoreServer("127.0.0.1", 0, secret=SECRET) as server:
        yield server


def open_connection(server: TcpStoreServer) -> socket.socket:
    return socket.create_connection((server.host, server.port), timeout=20.0)


def send_and_receive(connection: socket.socket, frame: Frame) -> Frame:
    connection.sendall(encode(frame))
    reader = FrameReader()
    while True:
        data = connection.recv(65536)
        assert data, "the server ended the connection"
        if frames := reader.feed(data):
            return frames[0]


def send_hello(connection: socket.socket) -> HandshakeTranscript:
    """Send hello, verify the server's proof, and return the transcript that both proofs cover."""
    welcome = send_and_receive(connection, HELLO)
    transcript = HandshakeTranscript(welcome.fields["nonce"], NONCE, "")
    assert verify_proof(welcome.fields["proof"], SECRET, Role.SERVER, transcript)
    return transcript


def reply_to_proof(
    connection: socket.socket,
    transcript: HandshakeTranscript,
    secret: bytes = SECRET,
    role: Role = Role.CLIENT,
) -> Frame:
    """Return the reply to a request that follows a proof."""
    proof = Frame("proof", 0, {"proof": compute_proof(secret, role, transcript)})
    connection.sendall(encode(proof))
    return send_and_receive(connection, Frame("get", 1, {"key": "key"}))


def test_a_client_with_the_secret_is_authenticated_for_any_job(
    server: TcpStoreServer,
) -> None:
    with TcpStore(server.host, server.port, job="\ud800", secret=SECRET) as store:
        assert store.set("key", b"").version == 1


@pytest.mark.parametrize("job", ["", "a"])
def test_a_client_with_another_secret_gets_an_error_with_the_remedy_at_once(
    server: TcpStoreServer, job: str
) -> None:
    start = monotonic()
    with (
        TcpStore(server.host, server.port, job=job, secret=SECRET + b"x", timeout=60.0) as store,
        pytest.raises(
            StoreRejectedError, match=r"has another secret .* give all nodes .* the same one"
        ),
    ):
        store.get("key")
    assert monotonic() - start < 10.0
    assert server.clients == 0


def test_a_client_without_a_secret_gets_an_error_with_the_remedy(server: TcpStoreServer) -> None:
    named = pytest.raises(
        StoreRejectedError,
        match=r"asks for a shared secret, and this client has none: .*ELASTICLIB_",
    )
    with TcpStore(server.host, server.port) as store, named:
        store.get("key")


def test_a_client_with_a_secret_rejects_a_server_without_one() -> None:
    named = pytest.raises(StoreRejectedError, match="asks for no secret, and this client has one")
    with (
        TcpStoreServer("127.0.0.1", 0) as server,
        TcpStore(server.host, server.port, secret=SECRET) as store,
        named,
    ):
        store.get("key")


@contextmanager
def impostor(sends: list[Frame]) -> Iterator[tuple[int, list[bytes]]]:
    """Start a server without the secret, and yield its port and the bytes that it receives."""
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(10.0)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(10.0)
                received.append(connection.recv(4096))
                connection.sendall(b"".join(map(encode, sends)))
                with contextlib.suppress(ConnectionError):
                    while data := connection.recv(4096):
                        received.append(data)

        serving = pool.submit(serve)
        yield listener.getsockname()[1], received
        serving.result(10.0)


def received_frames(received: list[bytes]) -> list[Frame]:
    return FrameReader().feed(b"".join(received))


@pytest.mark.parametrize("proof", [None, "0" * 64])
def test_a_server_without_a_proof_gets_no_request_and_no_proof(
    proof: str | None,
) -> None:
    with (
        impostor([Frame("welcome", 0, {"nonce": NONCE, "proof": proof})]) as (port, received),
        TcpStore("127.0.0.1", port, secret=SECRET) as store,
        pytest.raises(StoreRejectedError, match=r"another secret than|asks for no secret"),
    ):
        store.set("key", b"private")
    assert [frame.op for frame in received_frames(received)] == ["hello"]
    assert SECRET not in b"".join(received)


def test_the_servers_own_proof_does_not_authenticate_a_client(server: TcpStoreServer) -> None:
    with open_connection(server) as connection:
        welcome = send_and_receive(connection, HELLO)
        error = send_and_receive(connection, Frame("proof", 0, {"proof": welcome.fields["proof"]}))
        assert "has another secret" in error.fields["message"]


def test_a_proof_of_the_wrong_role_or_of_another_connection_is_rejected(
    server: TcpStoreServer,
) -> None:
    with open_connection(server) as one, open_connection(server) as other:
        first, second = send_hello(one), send_hello(other)
        assert first.server_nonce != second.server_nonce
        for connection, role in ((one, Role.SERVER), (other, Role.CLIENT)):
            error = reply_to_proof(connection, first, role=role)
            assert "has another secret" in error.fields["message"]
    with open_connection(server) as connection:
        assert reply_to_proof(connection, send_hello(connection)).op == "answer"


def test_the_name_of_the_job_needs_the_secret() -> None:
    with TcpStoreServer("127.0.0.1", 0, job="private", secret=SECRET) as server:
        with open_connection(server) as connection:
            error = reply_to_proof(connection, send_hello(connection), b"guess")
            assert "private" not in error.fields["message"]
        named = pytest.raises(StoreRejectedError, match="serves another job, not 'other'")
        with TcpStore(server.host, server.port, job="other", secret=SECRET) as store, named:
            store.connect()
        with TcpStore(server.host, server.port, job="private", secret=SECRET) as store:
            assert store.get("key") is None


def test_the_error_quotes_a_server_that_rejects_the_protocol_version() -> None:
    error = {"kind": "refused", "message": f"speaks protocol 3, not {PROTOCOL}"}
    with (
        impostor([Frame("error", 0, error)]) as (port, _),
        TcpStore("127.0.0.1", port, secret=SECRET) as store,
        pytest.raises(StoreRejectedError, match=rf":{port} speaks protocol 3, not {PROTOCOL}"),
    ):
        store.get("key")


@pytest.mark.parametrize("greeted", [False, True])
def test_no_request_is_executed_before_the_proof(server: TcpStoreServer, greeted: bool) -> None:
    with open_connection(server) as connection:
        if greeted:
            assert send_and_receive(connection, HELLO).op == "welcome"
        write = Frame("write", 3, {"key": "a", "ttl": None, "expected": None}, b"x")
        assert send_and_receive(connection, write).op == "error"
    with TcpStore(server.host, server.port, secret=SECRET) as store:
        assert store.get("a") is None


NONCES = st.binary(min_size=32, max_size=32).map(bytes.hex)
EXCHANGES = st.builds(HandshakeTranscript, NONCES, NONCES, st.text(max_size=10))
ROLES = st.sampled_from(Role)
KEYS = st.binary(min_size=1, max_size=80)


@given(st.tuples(KEYS, ROLES, EXCHANGES), st.tuples(KEYS, ROLES, EXCHANGES))
def test_a_proof_is_only_valid_for_its_secret_role_and_transcript(
    one: tuple[bytes, Role, HandshakeTranscript], other: tuple[bytes, Role, HandshakeTranscript]
) -> None:
    assert verify_proof(compute_proof(*one), *one)
    # HMAC pads a short key with zeros, so keys that differ only in trailing zeros are equal.
    if (one[0].rstrip(b"\0"), *one[1:]) != (other[0].rstrip(b"\0"), *other[1:]):
        assert not verify_proof(compute_proof(*one), *other)


def test_a_proof_depends_on_where_each_value_ends() -> None:
    one, other = HandshakeTranscript("ab", "c", "d"), HandshakeTranscript("a", "bc", "d")
    assert not verify_proof(compute_proof(SECRET, Role.CLIENT, one), SECRET, Role.CLIENT, other)


@pytest.mark.parametrize(
    "secret", [b"", "text of sixteen or more", b"fifteen bytes!!", b"x" * 70_000]
)
def test_an_invalid_secret_is_rejected_and_not_shown(secret: object) -> None:
    rule = "secret is bytes, got str|secret holds 16 to 65536 bytes, got (0|15|70000)"
    for make in (TcpStore, TcpStoreServer):
        with pytest.raises(ConfigError, match=rule) as raised:
            make("127.0.0.1", 1, secret=secret)  # type: ignore[arg-type]
        assert "fifteen" not in str(raised.value)
        assert "sixteen or" not in str(raised.value)


def test_no_log_and_no_repr_shows_the_secret(
    server: TcpStoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with TcpStore(server.host, server.port, secret=SECRET) as store:
        store.get("key")
        shown = f"{store!r} {store} {server!r} {server}"
    with TcpStore(server.host, server.port, secret=b"guess-guess-guess") as store:
        with pytest.raises(StoreRejectedError) as raised:
            store.get("key")
        shown += f"{store!r} {raised.value!r}"
    for secret in (SECRET, b"guess-guess-guess"):
        assert secret.decode() not in shown + caplog.text


@pytest.mark.parametrize(
    ("host", "secret", "warnings"),
    [("127.0.0.1", None, 0), ("::1", None, 0), ("0.0.0.0", None, 1), ("0.0.0.0", SECRET, 0)],
)
def test_a_store_without_a_secret_that_other_machines_can_reach_warns_once(
    host: str, secret: bytes | None, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    with TcpStoreServer(host, 0, secret=secret) as server:
        server.start()
        messages = [record.getMessage() for record in caplog.records]
        assert len(messages) == warnings
        assert all(server.address in line and "set ELASTICLIB_SECRET" in line for line in messages)


def test_threads_that_connect_at_once_are_all_authenticated(server: TcpStoreServer) -> None:
    with ThreadPoolExecutor(8) as pool:
        gate = threading.Barrier(8)

        def open_store(number: int) -> None:
            gate.wait(10.0)
            with TcpStore(server.host, server.port, secret=SECRET) as store:
                store.set(f"key/{number}", b"")

        list(pool.map(open_store, range(8)))
    with TcpStore(server.host, server.port, secret=SECRET) as store:
        assert len(store.list("key/").entries) == 8
