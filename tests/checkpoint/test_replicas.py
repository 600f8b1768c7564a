"""Agents give each other their workers' snapshots: over real connections, without torch."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest

from elasticlib import CheckpointManager, MemoryStore, Node, Script, Store, WorkerSpec
from elasticlib.checkpoint import snapshot_slots
from elasticlib.checkpoint.replicas import (
    CHUNK_BYTES,
    MailboxInfo,
    SnapshotKeeper,
    decode_mailbox,
    encode_mailbox,
)
from elasticlib.checkpoint.snapshot_slots import SnapshotHeader, SnapshotRef
from elasticlib.errors import CheckpointError, ConfigError, StoreRefused
from elasticlib.launch.elastic_launch import STRANGERS, snapshot_stores
from elasticlib.rendezvous.interface import BootstrapStoreInfo, RendezvousInfo, deal_seats
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_server import TcpStoreServer
from elasticlib.testing.waiting import wait_until
from elasticlib.workers.spec import Worker, WorkerGroup

SECRET = b"the secret of the job"


class Host:
    """A node: its agent's memory, and what its workers put there."""

    def __init__(self, folder: Path, secret: bytes | None = SECRET) -> None:
        self.folder = folder
        folder.mkdir()
        self.era, self.sequence = 0, 0
        self.keeper = SnapshotKeeper(
            self._era,
            snapshot_stores(1),
            replicas=1,
            secret=secret,
            address="127.0.0.1",
        )
        self.slots: dict[int, snapshot_slots.SnapshotSlots] = {}

    def _era(self, number: int) -> Path:
        path = self.folder / str(number)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def begin(self, info: RendezvousInfo) -> Host:
        self.era += 1
        self.slots, self.info = {}, info
        group = WorkerGroup(
            spec=WorkerSpec(Script("train.py")),
            workers=(Worker(0, info.rank, info.rank, info.world_size, info.world_size),),
            run_id="run",
            generation=info.generation,
            group_rank=info.rank,
            group_world_size=info.world_size,
            master_addr="127.0.0.1",
            master_port=1,
            attempt=self.era,
        )
        self.keeper.begin(info, group)
        return self

    def snapshot(self, step: int, pack: bytes = b"x", **more: int) -> None:
        self.sequence += 1
        record = SnapshotHeader(
            "s", step, self.sequence, len(pack), "run", self.info.generation, **more
        )
        record = attrs.evolve(record, folder=str(self.folder / "disk"))
        slots = self.slots.setdefault(
            record.part, snapshot_slots.SnapshotSlots(self._era(self.era))
        )
        with slots.open_for_writing(record) as view:
            view[:] = pack
        snapshot_slots.AgentWaker(self._era(self.era)).wake()

    def found(self, owner: str = "") -> list[SnapshotRef]:
        return [one for one in snapshot_slots.list_snapshots(self.folder) if one.owner == owner]

    def pack(self, one: SnapshotRef) -> bytes | None:
        """It is whole a moment before its writer lets go of it, and none until then."""
        with snapshot_slots.map_snapshot(self.folder, one) as view:
            return None if view is None else bytes(view)

    def has(self, owner: str, step: int) -> Callable[[], bool]:
        return lambda: step in [one.header.step for one in self.found(owner)]


def generation(number: int, nodes: int, store: Store | None) -> list[RendezvousInfo]:
    members = [Node(f"n{rank}", "h", "127.0.0.1", 1) for rank in range(nodes)]
    place = BootstrapStoreInfo("127.0.0.1", 1)
    return [
        RendezvousInfo("run", number, seat, place, store=store, board=f"run/board/{number}/")
        for seat in deal_seats(members)
    ]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    hosts = [Host(tmp_path / str(number)) for number in range(3)]
    yield hosts
    for host in hosts:
        host.keeper.finish(keep=False)
    wait_until(
        "threads", lambda: not [t for t in threading.enumerate() if t.name[:6] == "agent-"], 30
    )


def begin(hosts: list[Host], number: int = 1, store: Store | None = None) -> None:
    for host, info in zip(
        hosts, generation(number, len(hosts), store or MemoryStore()), strict=True
    ):
        host.begin(info)


def test_each_snapshot_is_with_the_next_node_and_nowhere_else(hosts: list[Host]) -> None:
    begin(hosts)
    large = bytes(range(256)) * (CHUNK_BYTES // 100)
    for rank, host in enumerate(hosts):
        host.snapshot(5, large + bytes([rank]))
    for rank, host in enumerate(hosts):
        before = str((rank - 1) % 3)
        wait_until("the replica", host.has(before, 5))
        (replica,) = host.found(before)
        pack = wait_until("its pack", lambda host=host, one=replica: host.pack(one))
        assert pack == large + bytes([int(before)])
        assert not host.found(str((rank + 1) % 3))
        assert replica.header == hosts[int(before)].found()[0].header
    for step in (6, 7, 8):
        hosts[0].snapshot(step)
    wait_until("the newest", hosts[1].has("0", 8))
    assert len(list(hosts[1].folder.glob("1/from.0.*"))) <= 2


def test_replicas_are_given_again_where_the_memory_was_removed(hosts: list[Host]) -> None:
    begin(hosts)
    hosts[0].snapshot(5)
    wait_until("the replica", hosts[1].has("0", 5))
    for host in hosts[:2]:
        shutil.rmtree(host.folder)
    # The first finds the folder gone, and makes it anew; the next is made while it is there.
    for step in (6, 7):
        hosts[0].snapshot(step)
        wait_until("the replica", hosts[1].has("0", step))


def test_a_snapshot_that_its_writer_cuts_while_it_is_given_ends_nobody(hosts: list[Host]) -> None:
    host = hosts[0].begin(generation(1, 1, None)[0])
    host.snapshot(5, b"x" * (1 << 20))
    (found,) = host.found()
    with snapshot_slots.lock_snapshot(host.folder, found) as handle:
        assert handle is not None
        given = snapshot_slots.iter_chunks(handle, found.header.size, 4096)
        assert next(given) == b"x" * 4096
        os.truncate(Path(host.folder, found.file), 8192)
        with pytest.raises(CheckpointError, match=f"cut to 4096 of {1 << 20} bytes"):
            list(given)
    assert not host.found()
    host.snapshot(6)
    assert [one.header.step for one in host.found()] == [6]


def test_replicas_of_a_node_that_is_gone_stay_until_the_new_world_stands_on_its_own(
    hosts: list[Host],
) -> None:
    store = MemoryStore()
    begin(hosts, 1, store)
    for part, host in enumerate(hosts):
        host.snapshot(5, part=part, parts=3)
    for rank, host in enumerate(hosts):
        wait_until("replicas", host.has(str((rank - 1) % 3), 5))
    hosts[2].keeper.finish(keep=False)
    left, (first, second) = hosts[:2], generation(2, 2, store)
    hosts[0].begin(first)
    hosts[0].snapshot(3, part=0, parts=2)
    hosts[0].snapshot(4, part=0, parts=2)
    replicating = hosts[0].keeper._replicating
    assert replicating is not None
    replicating._clear_up()
    # Its own two are whole, but nobody else has them: were it lost, the others had to go back.
    assert hosts[0].has("2", 5)()
    assert hosts[0].has("", 5)()
    hosts[1].begin(second)
    for part, host in enumerate(left):
        host.snapshot(6, part=part, parts=2)
    for rank, host in enumerate(left):
        wait_until("replicas", host.has(str(1 - rank), 6))
    for step in (7, 8, 9):
        for part, host in enumerate(left):
            host.snapshot(step, part=part, parts=2)
        for rank, host in enumerate(left):
            wait_until("replicas", host.has(str(1 - rank), step))
    for host in left:
        wait_until("the old ones to go", lambda host=host: not list(host.folder.glob("1/*.*")))


def test_one_that_dies_while_it_gives_leaves_the_last_whole_replica(hosts: list[Host]) -> None:
    store = MemoryStore()
    giver, taker = generation(1, 2, store)
    hosts[0].begin(taker)
    link = let_in(store, giver, taker.rank)
    give(link, SnapshotHeader("s", 1, 1, 3, "run", 1), b"old")
    record = SnapshotHeader("s", 2, 2, 10, "run", 1)
    link.set(offer(link, record) + sum_of(b"half"), b"half")
    link.close()
    # It comes again: the broken one has left nothing that counts.
    link = let_in(store, giver, taker.rank)
    assert [one.header.step for one in hosts[0].found("0")] == [1]
    give(link, record, b"0123456789")
    assert {one.header.step for one in hosts[0].found("0")} == {1, 2}
    link.close()


def let_in(store: Store, info: RendezvousInfo, to: int, secret: bytes | None = SECRET) -> Store:
    """A connection of the node with this seat, as an agent of it would make it."""
    key = f"{info.board}snapshots/place/{to}"
    entry = wait_until("the place", lambda: store.get(key))
    place = decode_mailbox(entry.value)
    assert place is not None
    link = TcpStore(
        place.address,
        place.port,
        job=place.job(info.board),
        secret=place.key(secret),
        timeout=10.0,
        connect_timeout=1.0,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(link.close)
        link.connect()
        stack.pop_all()
    return link


def sum_of(piece: bytes) -> str:
    return f"{zlib.crc32(piece):08x}"


def offer(link: Store, record: SnapshotHeader, rank: int = 0) -> str:
    """What the keys of what follows begin with."""
    number = f"{rank}/{secrets.token_hex(8)}/"
    link.set(number + "offer", json.dumps(attrs.asdict(record)).encode())
    return number


def give(link: Store, record: SnapshotHeader, pack: bytes, rank: int = 0) -> None:
    number = offer(link, record, rank)
    link.set(number + sum_of(pack), pack)
    link.set(number + "end", b"")


def test_strangers_and_those_whose_duty_it_is_not_are_turned_away(hosts: list[Host]) -> None:
    store = MemoryStore()
    infos = generation(1, 3, store)
    hosts[1].begin(infos[1])
    for secret in (b"another", None):
        with pytest.raises(StoreRefused, match="another secret"):
            let_in(store, infos[0], 1, secret)
    earlier = attrs.evolve(infos[0], board="run/board/0/")
    store.set(
        f"{earlier.board}snapshots/place/1", present(store, f"{infos[0].board}snapshots/place/1")
    )
    with pytest.raises(StoreRefused):
        let_in(store, earlier, 1)
    link = let_in(store, infos[2], 1)
    with pytest.raises(StoreRefused, match="replicas of that node are not kept"):
        give(link, SnapshotHeader("s", 1, 1, 3, "run", 1), b"one", rank=2)
    link.close()
    let_in(store, infos[0], 1).close()


def present(store: Store, key: str) -> bytes:
    return wait_until("what stands there", lambda: store.get(key)).value


def test_a_place_that_does_not_know_the_secret_is_given_nothing(
    hosts: list[Host], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "elasticlib.checkpoint")
    store = MemoryStore()
    infos = generation(1, 3, store)
    place, job = MailboxInfo("127.0.0.1", 1, "cd" * 32), infos[0].board
    with TcpStoreServer(
        place.address, 0, job=place.job(job), secret=place.key(b"another")
    ).start() as false:
        place = attrs.evolve(place, port=false.port)
        store.set(f"{job}snapshots/place/1", encode_mailbox(place))
        hosts[0].begin(infos[0]).snapshot(5, b"the state")
        wait_until("the refusal", lambda: "do not reach node 1" in caplog.text)
        assert "another secret" in caplog.text
        secret = place.key(b"another")
        with TcpStore(place.address, place.port, job=place.job(job), secret=secret) as store:
            assert not store.list("").entries


def test_silent_strangers_make_way_for_those_whose_duty_it_is(hosts: list[Host]) -> None:
    store = MemoryStore()
    giver, taker = generation(1, 2, store)
    hosts[0].begin(taker)
    place = decode_mailbox(present(store, f"{giver.board}snapshots/place/{taker.rank}"))
    assert place is not None
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection((place.address, place.port), timeout=30))
            for _ in range(2 * STRANGERS)
        ]
        # All of them have been taken in, and the first are cut.
        assert strangers[0].recv(1) == b""
        link = let_in(store, giver, taker.rank)
        give(link, SnapshotHeader("s", 1, 1, 3, "run", 1), b"one")
        link.close()
    assert [one.header.step for one in hosts[0].found("0")] == [1]


def test_what_is_changed_too_much_or_too_large_is_refused(hosts: list[Host]) -> None:
    store = MemoryStore()
    giver, taker = generation(1, 2, store)
    hosts[0].begin(taker)
    link = let_in(store, giver, taker.rank)
    with pytest.raises(StoreRefused, match=r"no memory for a replica of \d+ bytes"):
        offer(link, SnapshotHeader("s", 1, 1, 1 << 60, "run", 1))
    give(link, SnapshotHeader("s", 1, 1, 3, "run", 1), b"old")
    record = SnapshotHeader("s", 2, 2, 4, "run", 1)
    for name, piece, why in (
        (sum_of(b"1234"), b"1235", "corrupted in transit"),
        (sum_of(b"12345"), b"12345", "5 bytes came where 4 were left"),
        (sum_of(b""), b"", "0 bytes came"),
        ("end", b"", "at byte 0 of 4"),
        ("more", b"", "replicas of that node"),
    ):
        number = offer(link, record)
        with pytest.raises(StoreRefused, match=why):
            link.set(number + name, piece)
    with pytest.raises(StoreRefused, match="not offered"):
        link.set(f"0/{'a' * 16}/" + sum_of(b"1234"), b"1234")
    number = offer(link, record)
    link.set(number + sum_of(b"1234"), b"1234")
    with pytest.raises(StoreRefused, match="is to end"):
        link.set(number + "end", b"xyz")
    for value in (b"", b"[" * 5000, b"{}", b"\xff"):
        with pytest.raises(StoreRefused):
            link.set(f"0/{'a' * 16}/offer", value)
    # It is no store: nothing is kept that anybody could read.
    assert not link.list("").entries
    link.close()
    assert [one.header.step for one in hosts[0].found("0")] == [1]


def test_replicas_without_a_store_that_nodes_share_are_refused(hosts: list[Host]) -> None:
    with pytest.raises(
        ConfigError, match=r"snapshot_replicas \(--snapshot-replicas\) needs a store"
    ):
        hosts[0].begin(generation(1, 2, None)[0])
    hosts[0].begin(generation(1, 1, None)[0])
    hosts[0].snapshot(1)
    hosts[0].keeper = SnapshotKeeper(
        hosts[0]._era, snapshot_stores(1), replicas=1, address="192.0.2.1"
    )
    with pytest.raises(ConfigError, match=r"cannot take replicas at 192\.0\.2\.1"):
        hosts[0].begin(generation(2, 2, MemoryStore())[0])


def test_what_is_left_is_written_when_the_run_ends_early_and_nothing_after_success(
    tmp_path: Path,
) -> None:
    for keep, steps in ((False, []), (True, [4])):
        host = Host(tmp_path / str(keep))
        host.begin(generation(1, 1, None)[0]).snapshot(4)
        assert host.keeper.finish(keep=keep) == ""
        assert CheckpointManager(host.folder / "disk").steps() == steps
