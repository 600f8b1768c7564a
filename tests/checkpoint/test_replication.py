"""Replication of snapshots between nodes over TCP connections, without torch."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import owner_of
from managers import no_new_threads, snapshot_ref

from elasticlib import CheckpointManager, MemoryStore, Node, Script, Store, WorkerSpec
from elasticlib.checkpoint import snapshot_slots
from elasticlib.checkpoint.pack import pack_state
from elasticlib.checkpoint.refs import StateRef, Writer
from elasticlib.checkpoint.replication import (
    CHUNK_BYTES,
    HANDSHAKE_TIMEOUT_S,
    MAX_UNAUTHENTICATED,
    REPLY_BYTES,
    ReplicaEndpoint,
    decode_endpoint,
    endpoint_key,
    open_stream,
    replica_sources,
    replica_targets,
    send_snapshot,
)
from elasticlib.checkpoint.snapshot_service import NodeSnapshotService
from elasticlib.checkpoint.snapshot_slots import (
    HEADER_BYTES,
    encode_header,
)
from elasticlib.checkpoint.storage import CHECKSUM_BYTES
from elasticlib.clock import monotonic
from elasticlib.errors import CheckpointError, ConfigError
from elasticlib.rendezvous.interface import RendezvousInfo, RendezvousStoreInfo, assign_ranks
from elasticlib.stores.authentication import NONCE_BYTES
from elasticlib.testing.waiting import wait_until
from elasticlib.workers.spec import Worker, WorkerGroup

SECRET = b"the secret of the job"
CHECKSUM = bytes(CHECKSUM_BYTES)  # the end of a pack in the memory of the worker that wrote it
OLD = snapshot_ref("s", 1, 3 + CHECKSUM_BYTES)
PROOF_BYTES = 32
HELLO_BYTES = 8 + 4 + NONCE_BYTES


class Host:
    """A node: the snapshot service of its agent, and the snapshots of its workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.attempt, self.sequence = 0, 0
        self.service = self.create_service("127.0.0.1")
        self.slots: dict[int, snapshot_slots.SnapshotSlots] = {}

    def create_service(self, address: str) -> NodeSnapshotService:
        return NodeSnapshotService(self.attempt_dir, replicas=1, secret=SECRET, address=address)

    def attempt_dir(self, number: int) -> Path:
        path = self.folder / str(number)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def begin(self, info: RendezvousInfo) -> Host:
        """Start the next attempt in a generation."""
        self.attempt += 1
        self.slots, self.info = {}, info
        group = WorkerGroup(
            WorkerSpec(Script("train.py")),
            info,
            (Worker(0, info.rank, info.rank, info.world_size, info.world_size),),
            attempt=self.attempt,
        )
        self.service.on_workers_starting(info, group)
        return self

    def snapshot(self, step: int, pack: bytes = b"x", **more: int) -> None:
        """Write a snapshot as a worker does."""
        self.sequence += 1
        writer = Writer("run", "launch", self.info.generation)
        origin = {"writer": writer, "number": self.sequence, "folder": str(self.folder / "disk")}
        record = snapshot_ref("s", step, len(pack + CHECKSUM), **origin, **more)
        attempt_dir = self.attempt_dir(self.attempt)
        slots = self.slots.setdefault(record.part or 0, snapshot_slots.SnapshotSlots(attempt_dir))
        with slots.open_for_writing(record) as view:
            view[:] = pack + CHECKSUM
        snapshot_slots.wake_agent(attempt_dir)

    def found(self, owner: str = "") -> list[StateRef]:
        """Return the snapshots of this node, or its replicas of another node."""
        found = snapshot_slots.list_snapshots(self.folder)
        return [ref for ref in found if owner_of(ref) == owner]

    def steps(self, owner: str) -> list[int]:
        return [one.step for one in self.found(owner)]

    def pack(self, one: StateRef) -> bytes | None:
        """Return the pack of a snapshot without its checksum, or None while it is locked."""
        with snapshot_slots.map_snapshot(self.folder, one) as view:
            return None if view is None else bytes(view[:-CHECKSUM_BYTES])

    def has(self, owner: str, step: int) -> Callable[[], bool]:
        return lambda: step in self.steps(owner)


def generation(number: int, nodes: int, store: Store | None) -> list[RendezvousInfo]:
    """Return what each node of a generation receives from the rendezvous."""
    members = [Node(f"n{rank}", "h", "127.0.0.1", 1) for rank in range(nodes)]
    first = RendezvousStoreInfo("127.0.0.1", 1)
    return [
        RendezvousInfo(
            "run", number, seat, first, store=store, exchange_prefix=f"run/board/{number}/"
        )
        for seat in assign_ranks(members)
    ]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    """Create three nodes. All of their threads must end with the test."""
    hosts = [Host(tmp_path / str(number)) for number in range(3)]
    yield hosts
    for host in hosts:
        host.service.close(flush=False)
    wait_until(
        "threads to exit",
        lambda: not [t for t in threading.enumerate() if t.name[:6] == "agent-"],
        30,
    )


def begin(hosts: list[Host], number: int = 1, store: Store | None = None) -> None:
    infos = generation(number, len(hosts), store or MemoryStore())
    for host, info in zip(hosts, infos, strict=True):
        host.begin(info)


def published_endpoint(store: Store, exchange_prefix: str, rank: int) -> ReplicaEndpoint:
    entry = wait_until("the endpoint", lambda: store.get(endpoint_key(exchange_prefix, rank)))
    endpoint = decode_endpoint(entry.value)
    assert endpoint is not None
    return endpoint


def stream_to(
    store: Store, info: RendezvousInfo, target: int, secret: bytes | None = SECRET
) -> socket.socket:
    """Connect to a target as the node of this generation would."""
    endpoint = published_endpoint(store, info.exchange_prefix, target)
    return open_stream(endpoint, info.rank, exchange_prefix=info.exchange_prefix, secret=secret)


def send(stream: socket.socket, folder: Path, record: StateRef, pack: bytes) -> str:
    """Send a snapshot with these bytes, and return why it is not stored."""
    path = folder / "sent"
    path.write_bytes(bytes(HEADER_BYTES) + pack + CHECKSUM)
    with path.open("rb") as file:
        return send_snapshot(stream, file.fileno(), record)


def send_header(stream: socket.socket, record: StateRef) -> None:
    stream.sendall(encode_header(record).ljust(HEADER_BYTES, b"\0"))
    assert stream.recv(REPLY_BYTES, socket.MSG_WAITALL) == bytes(REPLY_BYTES)


class Proxy:
    """Forwards connections to a target, and interferes with the bytes that the sender sends.

    `interfere` receives a part and its offset in the stream, and returns what is forwarded, or None
    to close the connection.
    """

    def __init__(
        self, target: ReplicaEndpoint, interfere: Callable[[bytes, int], bytes | None]
    ) -> None:
        self._target, self._interfere = target, interfere
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = attrs.evolve(target, port=self._listener.getsockname()[1])
        self._sockets = [self._listener]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60)
        for one in self._sockets:
            one.close()

    def _start(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sender, _ = self._listener.accept()
                target = socket.create_connection((self._target.address, self._target.port))
                self._sockets += [sender, target]
                self._start(partial(self._forward, sender, target, self._interfere))
                self._start(partial(self._forward, target, sender, lambda data, _: data))

    def _forward(
        self,
        source: socket.socket,
        sink: socket.socket,
        interfere: Callable[[bytes, int], bytes | None],
    ) -> None:
        offset = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                forwarded = interfere(data, offset)
                if forwarded is None:
                    break
                sink.sendall(forwarded)
                offset += len(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxied(
    hosts: list[Host], interfere: Callable[[bytes, int], bytes | None]
) -> Iterator[ReplicaEndpoint]:
    """Start a generation of two nodes. A proxy forwards the bytes of the first node."""
    store = MemoryStore()
    infos = generation(1, 2, store)
    hosts[1].begin(infos[1])
    target = published_endpoint(store, infos[1].exchange_prefix, 1)
    with contextlib.closing(Proxy(target, interfere)) as proxy:
        store.set(endpoint_key(infos[1].exchange_prefix, 1), proxy.endpoint.encode())
        hosts[0].begin(infos[0])
        yield target


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 9))
def test_each_node_receives_as_many_replicas_as_it_sends_and_from_other_domains_first(
    domain_sizes: list[int], replicas: int
) -> None:
    domains = [f"rack{n}" for n, size in enumerate(domain_sizes) for _ in range(size)]
    seats = assign_ranks(Node(f"n{i}", "h", "", 1, topology=d) for i, d in enumerate(domains))
    targets = [replica_targets(seat, replicas) for seat in seats]
    for rank, seat in enumerate(seats):
        assert len(set(targets[rank])) == len(targets[rank]) == min(replicas, len(seats) - 1)
        assert rank not in targets[rank]
        sources = replica_sources(seat, replicas)
        assert sorted(sources) == [n for n, others in enumerate(targets) if rank in others]
    if replicas:
        in_own_domain = sum(domains[n] == domains[ts[0]] for n, ts in enumerate(targets) if ts)
        # A domain that has more than half of the nodes must keep some of the replicas.
        expected = max(0, 2 * max(domain_sizes) - len(seats)) if len(seats) > 1 else 0
        assert in_own_domain == expected
    if replicas > 1 and len(set(domain_sizes)) == 1 and len(domain_sizes) > 2:
        assert all(len({domains[n], *(domains[t] for t in targets[n][:2])}) == 3 for n in range(3))


def test_an_endpoint_is_decoded_as_it_was_encoded_and_nothing_else_is_an_endpoint() -> None:
    endpoint = ReplicaEndpoint("::1", 4711, "ab" * 32)
    text = endpoint.encode()
    assert decode_endpoint(text) == endpoint
    for data in (b"", b"{}", b"[1]", text.replace(b"ab", b"x", 1), b"\xff"):
        assert decode_endpoint(data) is None


def test_each_snapshot_is_replicated_to_the_next_node_only(hosts: list[Host]) -> None:
    begin(hosts)
    large = bytes(range(256)) * (CHUNK_BYTES // 100)
    for rank, host in enumerate(hosts):
        host.snapshot(5, large + bytes([rank]))
    for rank, host in enumerate(hosts):
        previous = str((rank - 1) % 3)
        wait_until("the replica", host.has(previous, 5))
        (replica,) = host.found(previous)
        pack = wait_until("the bytes of the replica", lambda host=host, one=replica: host.pack(one))
        assert pack == large + bytes([int(previous)])
        assert not host.found(str((rank + 1) % 3))
        own = hosts[int(previous)].found()[0]
        assert attrs.evolve(replica, tier=own.tier, place=own.place, copy=own.copy) == own
    for step in (6, 7, 8):
        hosts[0].snapshot(step)
    wait_until("the newest replica", hosts[1].has("0", 8))
    assert len(list(hosts[1].folder.glob("1/from.0.*"))) <= 2


def test_snapshots_that_are_made_while_one_is_sent_are_skipped_up_to_the_newest(
    hosts: list[Host],
) -> None:
    is_open = threading.Event()

    def hold(data: bytes, offset: int) -> bytes:
        if offset + len(data) > 2 * HEADER_BYTES:
            is_open.wait(30)
        return data

    with proxied(hosts, hold):
        hosts[0].snapshot(1, bytes(1 << 20))
        wait_until("the transfer", lambda: list(hosts[1].folder.glob("1/from.0.*")))
        for step in (2, 3, 4):
            hosts[0].snapshot(step)
        is_open.set()
        wait_until("the newest replica", hosts[1].has("0", 4))
    # A third replica would have replaced the first one.
    assert sorted(hosts[1].steps("0")) == [1, 4]


def test_replicas_are_sent_again_after_the_memory_was_removed(hosts: list[Host]) -> None:
    begin(hosts)
    hosts[0].snapshot(5)
    wait_until("the replica", hosts[1].has("0", 5))
    for host in hosts[:2]:
        shutil.rmtree(host.folder)
    # The first snapshot creates the directory again, and the second one finds it.
    for step in (6, 7):
        hosts[0].snapshot(step)
        wait_until("the replica", hosts[1].has("0", step))


def test_a_snapshot_that_is_truncated_while_it_is_sent_is_not_stored(hosts: list[Host]) -> None:
    store = MemoryStore()
    infos = generation(1, 2, store)
    hosts[1].begin(infos[1])
    record = snapshot_ref("s", 1, (8 << 20) + CHECKSUM_BYTES)
    path = hosts[0].folder / "file"
    path.write_bytes(bytes(HEADER_BYTES + (4 << 20)))
    cut = pytest.raises(CheckpointError, match=f"cut to {4 << 20} of {8 << 20} bytes")
    with stream_to(store, infos[0], 1) as stream, path.open("rb") as file, cut:
        send_snapshot(stream, file.fileno(), record)
    with stream_to(store, infos[0], 1) as stream:
        assert send(stream, hosts[0].folder, OLD, b"old") == ""
    assert hosts[1].steps("0") == [1]


def test_replicas_of_a_lost_node_stay_until_the_new_world_has_replicated_its_snapshots(
    hosts: list[Host],
) -> None:
    store = MemoryStore()
    begin(hosts, 1, store)
    for part, host in enumerate(hosts):
        host.snapshot(5, part=part, parts=3)
    for rank, host in enumerate(hosts):
        wait_until("replicas", host.has(str((rank - 1) % 3), 5))
    hosts[2].service.close(flush=False)
    left, (first, second) = hosts[:2], generation(2, 2, store)
    hosts[0].begin(first)
    hosts[0].snapshot(3, part=0, parts=2)
    hosts[0].snapshot(4, part=0, parts=2)
    with pytest.raises(AssertionError):
        wait_until("earlier ones to be removed", lambda: not hosts[0].has("2", 5)(), 0.5)
    # Node 0 has two new snapshots, but no other node has replicas of them yet.
    assert hosts[0].has("", 5)()
    hosts[1].begin(second)
    for step in (6, 7, 8, 9):
        for part, host in enumerate(left):
            host.snapshot(step, part=part, parts=2)
        for rank, host in enumerate(left):
            wait_until("replicas", host.has(str(1 - rank), step))
    for host in left:
        wait_until("earlier ones to be removed", lambda h=host: not list(h.folder.glob("1/*.*")))


def test_a_sender_that_dies_while_it_sends_leaves_the_last_complete_replica(
    hosts: list[Host],
) -> None:
    store = MemoryStore()
    sender, target = generation(1, 2, store)
    hosts[1].begin(target)
    record = snapshot_ref("s", 2, 10 + CHECKSUM_BYTES)
    with stream_to(store, sender, 1) as stream:
        assert send(stream, hosts[0].folder, OLD, b"old") == ""
        send_header(stream, record)
        stream.sendall(b"half")
    with stream_to(store, sender, 1) as stream:
        assert hosts[1].steps("0") == [1]
        assert send(stream, hosts[0].folder, record, b"0123456789") == ""
        assert sorted(hosts[1].steps("0")) == [1, 2]


def test_a_new_stream_of_a_node_works_while_its_earlier_one_is_still_open(
    hosts: list[Host],
) -> None:
    store = MemoryStore()
    sender, target = generation(1, 2, store)
    hosts[1].begin(target)
    with stream_to(store, sender, 1), stream_to(store, sender, 1) as stream:
        assert send(stream, hosts[0].folder, OLD, b"old") == ""
    assert hosts[1].steps("0") == [1]


def test_a_stream_that_no_thread_can_serve_is_closed_and_the_next_one_works(
    hosts: list[Host],
) -> None:
    store = MemoryStore()
    sender, target = generation(1, 2, store)
    hosts[1].begin(target)
    endpoint = published_endpoint(store, sender.exchange_prefix, target.rank)
    with (
        no_new_threads(),
        socket.create_connection((endpoint.address, endpoint.port), timeout=30) as refused,
    ):
        assert refused.recv(1) == b""
    with stream_to(store, sender, 1) as stream:
        assert send(stream, hosts[0].folder, OLD, b"old") == ""
    assert hosts[1].steps("0") == [1]


def test_a_sender_reconnects_after_its_stream_broke_and_sends_the_snapshot_again(
    hosts: list[Host],
) -> None:
    breaks = [300_000, 100]

    def break_twice(data: bytes, offset: int) -> bytes | None:
        if breaks and offset + len(data) > breaks[-1]:
            breaks.pop()
            return None
        return data

    with proxied(hosts, break_twice):
        hosts[0].snapshot(1, secrets.token_bytes(1 << 20))
        wait_until("the replica", hosts[1].has("0", 1))
        assert not breaks
        (replica,), (own,) = hosts[1].found("0"), hosts[0].found()
        pack = wait_until("the bytes of the replica", lambda: hosts[1].pack(replica))
        assert pack == hosts[0].pack(own)


def test_a_replica_that_was_corrupted_in_transit_is_not_stored(
    hosts: list[Host], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "elasticlib.checkpoint")
    flips = [500_000]

    def flip_once(data: bytes, offset: int) -> bytes:
        if flips and offset <= flips[0] < offset + len(data):
            at = flips.pop() - offset
            return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        return data

    with proxied(hosts, flip_once):
        hosts[0].snapshot(1, bytes(1 << 20))
        message = "node 1 does not store a snapshot replica: the replica was corrupted in transit"
        wait_until("the refusal", lambda: message in caplog.text)
        assert not hosts[1].found("0")
        hosts[0].snapshot(2, bytes(1 << 20))
        wait_until("the next replica", hosts[1].has("0", 2))
    assert hosts[1].steps("0") == [2]


def test_a_generation_ends_soon_while_a_stream_is_stalled(hosts: list[Host]) -> None:
    is_over = threading.Event()

    def stall(data: bytes, offset: int) -> bytes | None:
        if offset + len(data) > 3 << 20:
            is_over.wait(60)
        return data

    with proxied(hosts, stall):
        hosts[0].snapshot(1)
        wait_until("the replica", hosts[1].has("0", 1))
        hosts[0].snapshot(2, bytes(16 << 20))
        wait_until("the transfer", lambda: len(list(hosts[1].folder.glob("1/from.0.*"))) == 2)
        started_at = monotonic()
        for host in hosts[:2]:
            host.service.close(flush=False)
        assert monotonic() - started_at < 5
        is_over.set()
    assert hosts[1].steps("0") == [1]


def test_a_node_that_leaves_first_sends_its_last_snapshot(hosts: list[Host]) -> None:
    begin(hosts[:2])
    for step in range(1, 20):
        hosts[0].snapshot(step, bytes(1 << 20))
    hosts[0].service.close(flush=True)
    assert hosts[1].has("0", 19)()


def test_a_node_that_leaves_does_not_wait_for_a_node_that_cannot_be_reached(
    hosts: list[Host], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "elasticlib.checkpoint")
    store = MemoryStore()
    info = generation(1, 2, store)[0]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    store.set(
        endpoint_key(info.exchange_prefix, 1),
        ReplicaEndpoint("127.0.0.1", port, "cd" * 32).encode(),
    )
    hosts[0].begin(info).snapshot(1)
    wait_until("the failure", lambda: "cannot send snapshot replicas to node 1" in caplog.text)
    started_at = monotonic()
    hosts[0].service.close(flush=True)
    assert monotonic() - started_at < 3


def test_peers_without_the_secret_and_nodes_that_do_not_send_here_are_rejected(
    hosts: list[Host],
) -> None:
    store = MemoryStore()
    infos = generation(1, 3, store)
    hosts[1].begin(infos[1])
    for secret in (b"another", None):
        with pytest.raises(CheckpointError, match="another secret"):
            stream_to(store, infos[0], 1, secret)
    endpoint = published_endpoint(store, infos[0].exchange_prefix, 1)
    forged = attrs.evolve(endpoint, token="ab" * 32)
    with pytest.raises(CheckpointError, match="another secret"):
        open_stream(forged, 0, exchange_prefix=infos[0].exchange_prefix, secret=SECRET)
    with pytest.raises(CheckpointError, match="another secret"):
        open_stream(endpoint, 0, exchange_prefix="run/board/0/", secret=SECRET)
    with pytest.raises(ConnectionError):
        stream_to(store, infos[2], 1)
    stream_to(store, infos[0], 1).close()


def test_a_peer_that_repeats_bytes_of_another_stream_is_not_authenticated(
    hosts: list[Host],
) -> None:
    recorded = bytearray()

    def record(data: bytes, offset: int) -> bytes:  # noqa: ARG001
        recorded.extend(data)
        return data

    with proxied(hosts, record) as target:
        hosts[0].snapshot(1)
        wait_until("the replica", hosts[1].has("0", 1))
        with socket.create_connection((target.address, target.port), 30) as connection:
            connection.sendall(recorded[: HELLO_BYTES + PROOF_BYTES])
            # The peer receives another nonce and a proof of the target, and is disconnected.
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert len(answer) == NONCE_BYTES + PROOF_BYTES


def test_a_target_that_does_not_know_the_secret_receives_no_data(
    hosts: list[Host], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "elasticlib.checkpoint")
    store = MemoryStore()
    infos = generation(1, 3, store)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = ReplicaEndpoint("127.0.0.1", listener.getsockname()[1], "cd" * 32)
        store.set(endpoint_key(infos[0].exchange_prefix, 1), endpoint.encode())
        hosts[0].begin(infos[0]).snapshot(5, b"the state")
        listener.settimeout(30)
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(30)
            connection.sendall(bytes(NONCE_BYTES + PROOF_BYTES))
            received = b"".join(iter(lambda: connection.recv(4096), b""))
        wait_until("the rejection", lambda: "cannot send snapshot replicas" in caplog.text)
    assert "another secret" in caplog.text
    assert len(received) == HELLO_BYTES, "neither a proof nor data"


def test_silent_peers_are_disconnected_and_do_not_block_nodes(hosts: list[Host]) -> None:
    store = MemoryStore()
    sender, target = generation(1, 2, store)
    hosts[1].begin(target)
    endpoint = published_endpoint(store, sender.exchange_prefix, target.rank)
    address = (endpoint.address, endpoint.port)
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(address, timeout=30))
            for _ in range(2 * MAX_UNAUTHENTICATED)
        ]
        # The oldest ones are disconnected when there are too many.
        assert silent[0].recv(1) == b""
        with stream_to(store, sender, 1) as stream:
            assert send(stream, hosts[0].folder, OLD, b"old") == ""
        # The others are disconnected after a time limit, even if they send a byte at times.
        started_at = monotonic()
        with contextlib.suppress(OSError):
            while monotonic() - started_at < HANDSHAKE_TIMEOUT_S + 10:
                silent[-1].sendall(b"x")
                threading.Event().wait(0.2)
        assert monotonic() - started_at < HANDSHAKE_TIMEOUT_S + 10
        assert silent[-2].recv(1) == b""
    assert hosts[1].steps("0") == [1]


def test_a_replica_without_free_memory_is_rejected_and_the_next_one_is_stored(
    hosts: list[Host],
) -> None:
    store = MemoryStore()
    sender, target = generation(1, 2, store)
    hosts[1].begin(target)
    with stream_to(store, sender, 1) as stream:
        large = snapshot_ref("s", 1, 1 << 60)
        reason = send(stream, hosts[0].folder, large, b"")
        assert reason.startswith(f"no memory for a replica of {1 << 60} bytes: ")
        assert send(stream, hosts[0].folder, attrs.evolve(OLD, number=2), b"old") == ""
    assert hosts[1].steps("0") == [1]


def test_an_invalid_record_ends_the_stream(hosts: list[Host]) -> None:
    store = MemoryStore()
    sender, target = generation(1, 2, store)
    hosts[1].begin(target)
    for page in (bytes(HEADER_BYTES), b"[" * HEADER_BYTES, os.urandom(HEADER_BYTES)):
        with stream_to(store, sender, 1) as stream:
            stream.sendall(page)
            assert stream.recv(1) == b""
    with stream_to(store, sender, 1) as stream:
        assert send(stream, hosts[0].folder, OLD, b"old") == ""


def test_replicas_are_rejected_without_a_shared_store_or_at_an_address_of_another_node(
    hosts: list[Host],
) -> None:
    with pytest.raises(
        ConfigError, match=r"snapshot_replicas \(--snapshot-replicas\) needs a store"
    ):
        hosts[0].begin(generation(1, 2, None)[0])
    hosts[0].begin(generation(1, 1, None)[0])
    hosts[0].snapshot(1)
    hosts[0].service = hosts[0].create_service("192.0.2.1")
    with pytest.raises(ConfigError, match=r"cannot receive snapshot replicas at 192\.0\.2\.1"):
        hosts[0].begin(generation(2, 2, MemoryStore())[0])


def test_a_node_that_cannot_find_its_own_address_continues_without_replicas(
    hosts: list[Host], caplog: pytest.LogCaptureFixture
) -> None:
    hosts[0].service = hosts[0].create_service("")
    unknown = RendezvousStoreInfo("node0.invalid", 1)
    hosts[0].begin(attrs.evolve(generation(1, 2, MemoryStore())[0], bootstrap_store_info=unknown))
    wait_until("the warning", lambda: "it cannot find its own address" in caplog.text)
    hosts[0].snapshot(1)
    infos = generation(2, 2, MemoryStore())
    hosts[1].begin(infos[1])
    hosts[0].begin(infos[0])
    hosts[0].snapshot(2)
    wait_until("the replica", hosts[1].has("0", 2))


# A name server that takes each query and answers none, in place of the one of this machine. The
# program is the agent's part of a generation whose first node is given by its name.
WITHOUT_ANSWERS = """
set -e
ip link set lo up
cp "$1" "$2/resolv.conf"
mount --bind "$2/resolv.conf" /etc/resolv.conf
shift 2
exec "$@"
"""
BEGIN_WITH_A_NAME = """
import socket, sys, threading
sys.path[:0] = sys.argv[2:]
from pathlib import Path
import attrs
from test_replication import Host, MemoryStore, RendezvousStoreInfo, generation
names = socket.socket(type=socket.SOCK_DGRAM)
names.bind(("127.0.0.1", 53))
host = Host(Path(sys.argv[1]))
host.service = host.create_service("")
name = RendezvousStoreInfo("node0.example", 1)
host.begin(attrs.evolve(generation(1, 2, MemoryStore())[0], bootstrap_store_info=name))
print("begun", flush=True)
names.settimeout(60)
names.recv(512)
host.service.close(flush=False)
print("asked and closed", flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change what is mounted")
def test_the_loop_of_an_agent_does_not_wait_for_a_name_server_that_does_not_answer(
    tmp_path: Path,
) -> None:
    config = tmp_path / "config"
    # The C library waits 30 s for each of 5 attempts.
    config.write_text("nameserver 127.0.0.1\noptions timeout:30 attempts:5\n")
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    python = [sys.executable, "-c", BEGIN_WITH_A_NAME, str(tmp_path / "host"), *folders]
    shell = ["bash", "-c", WITHOUT_ANSWERS, "bash", str(config), str(tmp_path)]
    command = ["unshare", "--mount", "--net", "--propagation", "private", *shell, *python]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout.split("\n")[:2] == ["begun", "asked and closed"], done.stderr


def test_snapshots_are_written_to_the_disk_if_the_run_ends_early_and_not_after_success(
    tmp_path: Path,
) -> None:
    for keep, steps in ((False, []), (True, [4])):
        host = Host(tmp_path / str(keep))
        host.begin(generation(1, 1, None)[0]).snapshot(
            4, bytes(pack_state({"n": 4}))[:-CHECKSUM_BYTES]
        )
        assert host.service.close(flush=keep) == ""
        assert CheckpointManager(host.folder / "disk").steps() == steps


def test_a_snapshot_that_cannot_be_read_at_the_end_is_reported(tmp_path: Path) -> None:
    host = Host(tmp_path / "host")
    host.begin(generation(1, 1, None)[0]).snapshot(4, b"no pack")
    problem = host.service.close(flush=True)
    assert "the snapshot of step 4 was not written to" in problem
    assert "it cannot be read" in problem
