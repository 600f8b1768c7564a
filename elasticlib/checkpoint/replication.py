"""Replication: sends this node's snapshots to other nodes and stores theirs, in the background.

All nodes send to the nodes at the same distances in rank, modulo the number of nodes. So each node
receives as many replicas as it sends. The nodes of a topology domain (`--topology`), such as a
rack, have adjacent ranks. So a distance of at least the size of the largest domain leads to another
domain, and the snapshots of a lost domain are in the memory of another one. A sender sends the
newest snapshot as soon as the previous one has been acknowledged, and skips those that were made in
between.

In each generation a node listens on a port of its own, and publishes the address, the port and a
random token in the generation's store. A sender opens one TCP stream to each of its targets:

    sender                                target
    magic, rank, nonce             ->
                                   <-     nonce, proof
    proof                          ->

    and for each snapshot:
    pages with the header          ->
                                   <-     reply: accepted, or the reason of the refusal
    data, CRC-32 of the data       ->
                                   <-     reply: stored, or the reason of the refusal

A proof is an HMAC over both nonces (see `stores.authentication`). Its key is derived from the token
and the job's secret, neither of which is sent. The data after the handshake is neither encrypted
nor signed. A stream that breaks leaves the last complete replica as it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import secrets
import shutil
import socket
import struct
import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import attrs

from ..clock import monotonic
from ..errors import CheckpointError, ElasticError, require_not_none
from ..rendezvous.interface import RankAssignment, RendezvousInfo
from ..stores.authentication import (
    NONCE_BYTES,
    SECRET_MISMATCH_HINT,
    HandshakeTranscript,
    Role,
    compute_proof,
    is_hex_digest,
    verify_proof,
)
from ..threads import daemon_thread, only_logged, start_thread
from ..untrusted import read_fields, read_json
from .refs import StateRef
from .snapshot_slots import (
    HEADER_BYTES,
    SnapshotSlots,
    decode_header,
    encode_header,
    iter_chunks,
    kind_of,
    lock_snapshot,
    newest_local_snapshots,
    wake_agent,
)
from .storage import CHECKSUM_BYTES, RunningChecksum

log = logging.getLogger("elasticlib.checkpoint")

CHUNK_BYTES = 512 << 10  # A larger buffer would be mapped again for each chunk, which is slower.
REPLY_BYTES = 512
MAX_UNAUTHENTICATED = 32  # If more connections are in the handshake, the oldest one is closed.
RESERVED_BYTES = 16 << 20  # Replicas leave this much memory to the workers of this node.

HANDSHAKE_TIMEOUT_S = 5
IO_TIMEOUT_S = 60  # The target may have to allocate memory before it replies.
RETRY_DELAY_S = 0.5
FLUSH_POLL_INTERVAL_S = 0.01
JOIN_TIMEOUT_S = 1.0  # A thread that is blocked in a system call exits later.

SnapshotKind = tuple[str, int]
"""Name and part of a snapshot: a newer snapshot of the same kind replaces it."""


# -- who sends to whom, and where: pure ------------------------------------------------------------


def replica_targets(assignment: RankAssignment, replicas: int) -> tuple[int, ...]:
    """Return the ranks of the nodes to which this node sends its snapshots."""
    rank, num_nodes = assignment.group_rank, assignment.num_nodes
    distances = _replica_distances(num_nodes, assignment.largest_domain)
    return tuple((rank + distance) % num_nodes for distance in distances[:replicas])


def replica_sources(assignment: RankAssignment, replicas: int) -> tuple[int, ...]:
    """Return the ranks of the nodes that send their snapshots to this node."""
    rank, num_nodes = assignment.group_rank, assignment.num_nodes
    distances = _replica_distances(num_nodes, assignment.largest_domain)
    return tuple((rank - distance) % num_nodes for distance in distances[:replicas])


def _replica_distances(num_nodes: int, largest_domain: int) -> list[int]:
    """Return all distances in rank at which a node can have a replica, the best one first.

    A distance from the size of the largest domain up to `num_nodes` minus that size leads every
    node to another domain. If the domain has more than half of the nodes, there is none, and a
    distance is better, the nearer it is to the half. Multiples of the size are preferred, so that
    several replicas are in several domains.
    """
    return sorted(
        range(1, num_nodes),
        key=lambda distance: (
            -min(largest_domain, distance, num_nodes - distance),
            distance % largest_domain != 0,
            distance,
        ),
    )


@attrs.frozen
class ReplicaEndpoint:
    """The place where a node receives replicas in one generation, as it is published."""

    address: str
    port: int
    token: str  # random hexadecimal digits, which only the nodes of the generation can read

    def proof_key(self, secret: bytes | None) -> bytes:
        """Return the key with which both ends of a stream prove that they belong to the job."""
        return hashlib.sha256(self.token.encode() + (secret or b"")).digest()

    def encode(self) -> bytes:
        """Return the endpoint as the JSON text that a node publishes."""
        return json.dumps(attrs.asdict(self)).encode()


def decode_endpoint(data: bytes) -> ReplicaEndpoint | None:
    """Decode the text of `ReplicaEndpoint.encode`. Return None if it is not a valid endpoint."""
    try:
        endpoint = read_fields(ReplicaEndpoint, read_json(data))
    except ValueError:
        return None
    return endpoint if is_hex_digest(endpoint.token) and 0 < endpoint.port < 65536 else None


def endpoint_key(exchange_prefix: str, rank: int) -> str:
    """Return the key in the generation's store at which a node publishes its endpoint."""
    return f"{exchange_prefix}snapshots/endpoint/{rank}"


# -- the stream ------------------------------------------------------------------------------------

_MAGIC = b"ELREPL6\n"
_HELLO = struct.Struct(f">8sI{NONCE_BYTES}s")
_PROOF_BYTES = hashlib.sha256().digest_size


def open_stream(
    endpoint: ReplicaEndpoint, rank: int, *, exchange_prefix: str, secret: bytes | None
) -> socket.socket:
    """Connect to a target as the node of this rank, and authenticate both ends.

    Raises:
        OSError: The target cannot be reached, or closed the connection.
        CheckpointError: The target does not know the token or the secret.
    """
    address = (endpoint.address, endpoint.port)
    with contextlib.ExitStack() as stack:
        connection = socket.create_connection(address, HANDSHAKE_TIMEOUT_S)
        stack.callback(connection.close)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _set_timeout(connection, HANDSHAKE_TIMEOUT_S)
        nonce, key = secrets.token_bytes(NONCE_BYTES), endpoint.proof_key(secret)
        connection.sendall(_HELLO.pack(_MAGIC, rank, nonce))
        transcript = _transcript(exchange_prefix, rank, nonce, _receive(connection, NONCE_BYTES))
        if not verify_proof(_receive(connection, _PROOF_BYTES).hex(), key, Role.SERVER, transcript):
            raise CheckpointError(f"it has another secret: {SECRET_MISMATCH_HINT}")
        connection.sendall(bytes.fromhex(compute_proof(key, Role.CLIENT, transcript)))
        _set_timeout(connection, IO_TIMEOUT_S)
        stack.pop_all()
    return connection


def authenticate_sender(
    connection: socket.socket, sources: Iterable[int], *, exchange_prefix: str, key: bytes
) -> int:
    """Authenticate both ends of a connection that was accepted, and return the sender's rank.

    Raises:
        OSError: The sender is not one of `sources`, does not know the key, or is too slow.
    """
    _set_timeout(connection, HANDSHAKE_TIMEOUT_S)
    magic, rank, sender_nonce = _HELLO.unpack(_receive(connection, _HELLO.size))
    if magic != _MAGIC or rank not in sources:
        raise ConnectionError("the peer is not a node that sends replicas here")
    nonce = secrets.token_bytes(NONCE_BYTES)
    transcript = _transcript(exchange_prefix, rank, sender_nonce, nonce)
    connection.sendall(nonce + bytes.fromhex(compute_proof(key, Role.SERVER, transcript)))
    if not verify_proof(_receive(connection, _PROOF_BYTES).hex(), key, Role.CLIENT, transcript):
        raise ConnectionError("the peer has another secret")
    return int(rank)


def _transcript(
    exchange_prefix: str, rank: int, sender_nonce: bytes, target_nonce: bytes
) -> HandshakeTranscript:
    # The name of a job contains no NUL, so these proofs are not valid at a store.
    job = f"replicas\0{exchange_prefix}\0{rank}"
    return HandshakeTranscript(target_nonce.hex(), sender_nonce.hex(), job)


def send_snapshot(connection: socket.socket, handle: int, ref: StateRef) -> str:
    """Send a locked snapshot, whose file has the descriptor `handle`.

    Returns:
        The reason why the target did not store it, or an empty text.

    Raises:
        OSError: The stream broke.
        CheckpointError: Another program truncated the file.
    """
    connection.sendall(encode_header(ref).ljust(HEADER_BYTES, b"\0"))
    if reason := _receive_reply(connection):
        return reason
    checksum = RunningChecksum()
    # The last entry of the pack is the checksum of what precedes it, and is zero in this memory.
    for chunk in iter_chunks(handle, ref.size - CHECKSUM_BYTES, CHUNK_BYTES):
        checksum.add(chunk)
        connection.sendall(chunk)
    connection.sendall(checksum.encode())
    return _receive_reply(connection)


def receive_data(connection: socket.socket, view: memoryview) -> None:
    """Receive the pack of a snapshot, and write it to `view`.

    Raises:
        OSError: The stream broke.
        CheckpointError: The data does not have the checksum that the sender calculated.
    """
    data, end = view[:-CHECKSUM_BYTES], view[-CHECKSUM_BYTES:]
    checksum = RunningChecksum()
    for offset in range(0, len(data), CHUNK_BYTES):
        chunk = data[offset : offset + CHUNK_BYTES]
        _receive_into(connection, chunk)
        checksum.add(chunk)
    _receive_into(connection, end)
    if bytes(end) != checksum.encode():
        raise CheckpointError(
            f"the replica was corrupted in transit: its checksum is {checksum.encode()!r}, not "
            f"{bytes(end)!r}"
        )


def send_reply(connection: socket.socket, reason: str) -> None:
    """Send the reason why a snapshot is not stored, or '' if it is accepted or was stored."""
    connection.sendall(reason.encode()[:REPLY_BYTES].ljust(REPLY_BYTES, b"\0"))


def _receive_reply(connection: socket.socket) -> str:
    return _receive(connection, REPLY_BYTES).rstrip(b"\0").decode(errors="replace")


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _receive_into(connection, memoryview(data))
    return bytes(data)


def _receive_into(connection: socket.socket, view: memoryview) -> None:
    if connection.recv_into(view, 0, socket.MSG_WAITALL) != len(view):
        raise ConnectionError("the peer closed the connection, or did not send in time")


def _set_timeout(connection: socket.socket, timeout_s: int) -> None:
    """Limit the time of each send and each receive on a connection; 0 is no limit.

    The limits of the kernel apply to a call with MSG_WAITALL as a whole. So a peer that sends a
    byte from time to time does not get more time.
    """
    connection.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", timeout_s, 0))


def _shut_down(connection: socket.socket) -> None:
    """Interrupt the thread that uses the connection, and leave it to that thread to close it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


# -- receiving -------------------------------------------------------------------------------------


class ReplicaReceiver:
    """Stores the snapshots of the nodes `sources` in `attempt_dir`, in one generation.

    One thread accepts connections, and each connection has a thread of its own.
    """

    def __init__(
        self, info: RendezvousInfo, sources: Iterable[int], attempt_dir: Path, secret: bytes | None
    ) -> None:
        self._exchange_prefix = info.exchange_prefix
        self._attempt_dir, self._secret = attempt_dir, secret
        self._slots: dict[tuple[int, SnapshotKind], SnapshotSlots] = {}
        self._source_locks = {rank: threading.Lock() for rank in sources}  # for a source's slots
        self._lock = threading.Lock()  # for the next two
        self._connections: dict[socket.socket, bool] = {}  # whether it is authenticated
        self._is_stopped = False
        self._listener: socket.socket | None = None  # until `start` has found the address
        self._acceptor: threading.Thread | None = None  # the thread that accepts connections

    def start(self, address: str) -> ReplicaEndpoint:
        """Listen on a free port of `address`, and return the endpoint that senders need.

        If `address` is a name, this may block. Another thread may call `stop` meanwhile.

        Raises:
            OSError: `address` is not an address of this node, or `stop` was called.
        """
        family, _, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(where, family=family)
        token = secrets.token_bytes(NONCE_BYTES).hex()
        endpoint = ReplicaEndpoint(address, listener.getsockname()[1], token)
        self._key = endpoint.proof_key(self._secret)
        with self._lock:
            if self._is_stopped:
                listener.close()
                raise OSError("the generation has ended")
            self._listener = listener
            self._acceptor = daemon_thread(
                partial(self._accept_connections, listener), "agent-replicas-accept", only_logged
            )
            start_thread(self._acceptor)
        return endpoint

    def stop(self) -> None:
        """Close all connections, and wait up to `JOIN_TIMEOUT_S` for the threads.

        Complete replicas stay in the memory.
        """
        with self._lock:
            self._is_stopped = True
            for connection in filter(None, (self._listener, *self._connections)):
                _shut_down(connection)
        if self._acceptor is not None:
            self._acceptor.join(JOIN_TIMEOUT_S)

    def _accept_connections(self, listener: socket.socket) -> None:
        threads: list[threading.Thread] = []
        with listener:
            while not self._is_stopped:
                try:
                    connection, _ = listener.accept()
                except OSError as error:
                    if not self._is_stopped:
                        log.info("cannot accept a stream of snapshot replicas: %s", error)
                        threading.Event().wait(RETRY_DELAY_S)
                    continue
                self._admit(connection)
                threads = [thread for thread in threads if thread.is_alive()]
                serve = partial(self._serve, connection)
                thread = daemon_thread(serve, "agent-replicas-from", only_logged)
                try:
                    start_thread(thread)
                except OSError as error:
                    # The sender connects again, and there may be a thread for it by then.
                    log.warning("cannot receive snapshot replicas: %s", error)
                    self._close(connection)
                    continue
                threads.append(thread)
        for thread in threads:
            thread.join()
        for slots in self._slots.values():
            slots.close()

    def _admit(self, connection: socket.socket) -> None:
        """Register a connection. Limit how many are in the handshake by closing the oldest."""
        with self._lock:
            self._connections[connection] = False
            pending = [c for c, is_known in self._connections.items() if not is_known]
            if self._is_stopped:
                _shut_down(connection)
            elif len(pending) > MAX_UNAUTHENTICATED:
                _shut_down(pending[0])

    def _serve(self, connection: socket.socket) -> None:
        try:
            rank = authenticate_sender(
                connection, self._source_locks, exchange_prefix=self._exchange_prefix, key=self._key
            )
            with self._lock:
                self._connections[connection] = True
            while True:
                self._receive_snapshot(connection, rank)
        except OSError as error:
            log.debug("a stream of snapshot replicas was closed: %s", error)
        finally:
            self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        with self._lock:
            del self._connections[connection]
        connection.close()

    def _receive_snapshot(self, connection: socket.socket, rank: int) -> None:
        """Wait for a snapshot from the node `rank`, store it or refuse it, and send the replies."""
        _set_timeout(connection, 0)  # The next snapshot may be made at any time.
        header = decode_header(_receive(connection, HEADER_BYTES))
        if header is None:
            raise ConnectionError("the sender sent an invalid header")
        _set_timeout(connection, IO_TIMEOUT_S)
        reason = ""
        # An earlier stream of the same node may still be open.
        with self._source_locks[rank]:
            try:
                with self._slots_for(rank, header).open_for_writing(header) as view:
                    send_reply(connection, "")
                    receive_data(connection, view)
            except CheckpointError as error:
                reason = str(error)
        send_reply(connection, reason)
        wake_agent(self._attempt_dir)

    def _slots_for(self, rank: int, header: StateRef) -> SnapshotSlots:
        """Return the slots for snapshots of this name and part from the node `rank`.

        Raises:
            CheckpointError: there is not enough memory for a snapshot with this header.
        """
        kind = rank, kind_of(header)
        slots = self._slots.setdefault(kind, SnapshotSlots(self._attempt_dir, owner=str(rank)))
        slots.make_folder()
        try:
            free = shutil.disk_usage(self._attempt_dir).free
        except OSError as error:
            raise CheckpointError(f"the memory cannot be used: {error}") from error
        if header.size + RESERVED_BYTES > free:
            raise CheckpointError(
                f"no memory for a replica of {header.size} bytes: {free} bytes are free, of which "
                f"{RESERVED_BYTES} are reserved for workers"
            )
        return slots


# -- sending ---------------------------------------------------------------------------------------


class ReplicaSender:
    """Sends the newest snapshots in `attempt_dir` to the node `target`, in one generation.

    Its owner starts `thread`, and sets `news` when there may be a new snapshot.
    """

    def __init__(
        self, info: RendezvousInfo, target: int, attempt_dir: Path, secret: bytes | None
    ) -> None:
        self._info, self._target = info, target
        self._attempt_dir, self._secret = attempt_dir, secret
        self.stored: set[SnapshotKind] = set()  # the target has stored a snapshot of these kinds
        self._offered: dict[SnapshotKind, int] = {}  # last sequence number, refused or not
        self._connection: socket.socket | None = None
        self._has_failed = False  # whether the last attempt to connect or send failed
        self._logged = ""  # the last message, which is not logged twice
        self._stopped = threading.Event()
        self.news = threading.Event()  # there may be a snapshot that was not offered
        self.thread = daemon_thread(self._run, f"agent-replicas-to-{target}", self._fail)

    def flush(self, timeout_s: float) -> None:
        """Wait until the target has stored or refused the newest snapshots, or cannot be reached.

        The wait also ends after `timeout_s`.
        """
        self.news.set()
        deadline = monotonic() + timeout_s
        while self._unsent() and not self._has_failed and monotonic() < deadline:
            self._stopped.wait(FLUSH_POLL_INTERVAL_S)

    def stop(self) -> None:
        """Send no more. A snapshot that is being sent is interrupted."""
        self._stopped.set()
        self.news.set()
        if (connection := self._connection) is not None:
            _shut_down(connection)

    def _fail(self, _reason: str) -> None:
        self._has_failed = True  # `flush` does not wait any more

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._send_all()
            except (OSError, ElasticError) as error:
                self._has_failed = True
                self._log_once(f"cannot send snapshot replicas to node {self._target}: {error}")
            self._stopped.wait(RETRY_DELAY_S)

    def _log_once(self, message: str) -> None:
        if message != self._logged and not self._stopped.is_set():
            log.info("%s", message)
        self._logged = message

    def _send_all(self) -> None:
        """Send snapshots until this sender is stopped. Return if no endpoint is published yet."""
        store = require_not_none(self._info.store, "the store")
        exchange_prefix = self._info.exchange_prefix
        entry = store.get(endpoint_key(exchange_prefix, self._target))
        endpoint = decode_endpoint(entry.value) if entry else None
        if endpoint is None:
            return
        with open_stream(
            endpoint, self._info.rank, exchange_prefix=exchange_prefix, secret=self._secret
        ) as connection:
            self._connection, self._has_failed = connection, False
            self.news.set()
            while not self._stopped.is_set():
                self.news.wait()
                self.news.clear()
                for ref in self._unsent():
                    self._send(connection, ref)

    def _unsent(self) -> list[StateRef]:
        """Return the newest snapshot of each name and part that was not offered to the target."""
        newest = newest_local_snapshots(self._attempt_dir)
        return [ref for ref in newest if self._offered.get(kind_of(ref), 0) < ref.number]

    def _send(self, connection: socket.socket, ref: StateRef) -> None:
        memory, kind = self._attempt_dir.parent, kind_of(ref)
        with lock_snapshot(memory, ref) as handle:
            if handle is None:
                return  # A newer snapshot replaces it.
            reason = send_snapshot(connection, handle, ref)
        self._offered[kind] = ref.number
        if reason:
            # The next snapshot is offered, because there may be memory for it.
            self._log_once(f"node {self._target} does not store a snapshot replica: {reason}")
        else:
            self.stored.add(kind)
        wake_agent(self._attempt_dir)
