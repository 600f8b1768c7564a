"""What an agent does for its workers' snapshots: replicas to other nodes, clearing up, the disk.

It begins anew with each generation, and frees what workers that ended were writing. Without
replicas that is all until the end: the workers write into its memory and clear up themselves. What
is in memory alone at the end `persist.py` writes.

A replica is a snapshot that one node gives another. Node r gives to the next nodes by rank,
wrapping at the end; so each node keeps as many as it gives, and the loss of any one node leaves
another with its snapshots. This goes on behind the training: the newest is given as soon as the one
before is there, and those made in between are left out.

For each generation a node serves a TCP store of its own, and says on the generation's board where.
What is written there is not kept: it becomes a replica in the agent's memory, by the keys

    RANK/OFFER/offer     the record of a snapshot; refused where there is no memory for it
    RANK/OFFER/CRC       its pack, piece after piece, each with its CRC-32
    RANK/OFFER/end       nothing: the snapshot is complete now

where RANK is the giver's and OFFER names this snapshot. Both ends prove that they have read the
board, and know the job's secret if there is one; the taker first, so that a false one is given
nothing to guess the secret from. What breaks off leaves the last whole replica as it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import select
import shutil
import socket
import threading
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import attrs

from ..agent.interface import Memory
from ..clock import monotonic
from ..errors import CheckpointError, ConfigError, ElasticError, StoreRefused, present
from ..foreign import read_fields, read_json
from ..rendezvous.interface import RendezvousInfo
from ..stores.interface import Store
from ..stores.keyspace import Entry, KeySpace, Lease
from ..stores.secret import NONCE_BYTES, is_digits
from ..threads import helper
from ..workers.spec import WorkerGroup
from .persist import LastWrites
from .snapshot_slots import (
    WAKEUP_PIPE,
    AgentWaker,
    SnapshotHeader,
    SnapshotRef,
    SnapshotSlots,
    header_from_fields,
    iter_chunks,
    list_snapshots,
    lock_snapshot,
    newest_local_snapshots,
    remove_incomplete,
    remove_superseded,
)

log = logging.getLogger("elasticlib.checkpoint")

PROTOCOL = 3
CHUNK_BYTES = 512 << 10
"""Of a pack in one piece: what is larger takes new memory on its way, and five times as long."""
ANSWER_SECONDS = 60.0
"""For a node to answer, which may have to find memory first."""
RETRY_SECONDS = 0.5
FLUSH_SECONDS = 5.0
"""So long a node that leaves waits for the others to get its last replicas."""
LOOK_SECONDS = 2.0
"""Without news the memory is looked at so often: others may remove it, and workers make it anew."""
SORTS = 256
"""So many different names and parts of snapshots are kept of one node."""
SPARE_BYTES = 16 << 20
"""Memory that replicas leave to the workers here."""

Sort = tuple[str, int]
"""A snapshot's name and part."""


class Server(Protocol):
    """A store that is served here, such as a TcpStoreServer."""

    port: int

    def start(self) -> object: ...

    def close(self) -> None: ...


@attrs.frozen
class Stores:
    """How stores are reached.

    connect: (host, port, job=, secret=, timeout=) to a client. serve: (host, port, job=, secret=,
    space=) to a server of this keyspace. alone: makes a store in this process.
    """

    connect: Callable[..., Store]
    serve: Callable[..., Server]
    alone: Callable[[], Store]


# -- who gives to whom: pure -----------------------------------------------------------------------


def takers(rank: int, nodes: int, replicas: int) -> tuple[int, ...]:
    """The ranks of the nodes that keep this one's replicas; itself is never among them."""
    return tuple((rank + by) % nodes for by in range(1, min(replicas, nodes - 1) + 1))


def givers(rank: int, nodes: int, replicas: int) -> tuple[int, ...]:
    """The ranks of the nodes whose replicas this one keeps."""
    return tuple((rank - by) % nodes for by in range(1, min(replicas, nodes - 1) + 1))


@attrs.frozen
class MailboxInfo:
    """Where a node takes replicas in one generation. token: 64 hexadecimal digits, which show that
    a giver has read this."""

    address: str
    port: int
    token: str

    def job(self, board: str) -> str:
        """The name of the store there. No job's has a NUL: its proofs are of no use elsewhere."""
        return f"replicas {PROTOCOL}\0{board}"

    def key(self, secret: bytes | None) -> bytes:
        """What both ends prove to know."""
        return hashlib.sha256(self.token.encode() + (secret or b"")).hexdigest().encode()


def mailbox_key(info: RendezvousInfo, rank: int) -> str:
    """Where in the generation's store the node of this rank says it."""
    return f"{info.board}snapshots/place/{rank}"


def encode_mailbox(mailbox: MailboxInfo) -> bytes:
    return json.dumps(attrs.asdict(mailbox)).encode()


def decode_mailbox(data: bytes) -> MailboxInfo | None:
    """None for what no node of this version has written."""
    try:
        mailbox = read_fields(MailboxInfo, read_json(data))
    except ValueError:
        return None
    return mailbox if is_digits(mailbox.token) and 0 < mailbox.port < 65536 else None


# -- taking ----------------------------------------------------------------------------------------


@attrs.define
class _Coming:
    """A snapshot on its way in. open: holds its slot. at: so many bytes are there."""

    offer: str
    header: SnapshotHeader
    slots: SnapshotSlots
    open: contextlib.ExitStack
    view: memoryview
    at: int = 0


class Mailbox(KeySpace):
    """What nodes of these `ranks` write here becomes replicas in this era's folder."""

    def __init__(self, folder: Path, ranks: Iterable[int]) -> None:
        super().__init__()
        self._folder = folder
        self._waker = AgentWaker(folder)
        self._slots: dict[int, dict[Sort, SnapshotSlots]] = {rank: {} for rank in ranks}
        self._coming: dict[int, _Coming] = {}

    def put(self, key: str, value: bytes, lease: Lease | None, now: float) -> Entry:  # noqa: ARG002
        found = re.fullmatch(r"([0-9]{1,9})/([0-9a-f]{16})/([0-9a-f]{8}|offer|end)", key)
        if found is None or int(found[1]) not in self._slots:
            raise StoreRefused("replicas of that node are not kept here")
        rank, offer, what = int(found[1]), found[2], found[3]
        try:
            if what == "offer":
                self._begin(rank, offer, value)
            elif rank not in self._coming or self._coming[rank].offer != offer:
                raise ValueError("this was not offered, or a later one was")
            elif what == "end":
                self._end(rank, value)
            else:
                self._add(self._coming[rank], int(what, 16), value)
        except (CheckpointError, OSError, ValueError) as error:
            self._drop(rank)
            raise StoreRefused(str(error)) from error
        return Entry(key, b"", self.version + 1)

    def close(self) -> None:
        """What is whole stays."""
        for rank, kinds in self._slots.items():
            self._drop(rank)
            for slots in kinds.values():
                slots.close()

    def _begin(self, rank: int, offer: str, value: bytes) -> None:
        self._drop(rank)  # what it began before, it does not finish
        record = header_from_fields(read_json(value))
        kinds, sort = self._slots[rank], (record.name, record.part)
        if sort not in kinds and len(kinds) >= SORTS:
            raise ValueError(f"a node has at most {SORTS} kinds of snapshots")
        slots = kinds.setdefault(sort, SnapshotSlots(self._folder, owner=str(rank)))
        slots.make_folder()
        free = shutil.disk_usage(self._folder).free
        if record.size + SPARE_BYTES > free:
            raise CheckpointError(
                f"no memory for a replica of {record.size} bytes: {free} are free, of which "
                f"{SPARE_BYTES} are left to others"
            )
        stack = contextlib.ExitStack()
        view = stack.enter_context(slots.open_for_writing(record))
        self._coming[rank] = _Coming(offer, record, slots, stack, view)

    def _add(self, coming: _Coming, crc32: int, value: bytes) -> None:
        if zlib.crc32(value) != crc32:
            found = f"its CRC-32 is {zlib.crc32(value):08x}, and it says {crc32:08x}"
            raise ValueError(f"a piece was corrupted in transit: {found}")
        left = len(coming.view) - coming.at
        if not 0 < len(value) <= left:
            raise ValueError(f"{len(value)} bytes came where {left} were left")
        coming.view[coming.at : coming.at + len(value)] = value
        coming.at += len(value)

    def _end(self, rank: int, value: bytes) -> None:
        coming = self._coming[rank]
        if coming.at != coming.header.size or value:
            raise ValueError(f"it is to end at byte {coming.at} of {coming.header.size}")
        del self._coming[rank]
        coming.open.close()
        self._waker.wake()

    def _drop(self, rank: int) -> None:
        coming = self._coming.pop(rank, None)
        if coming is not None:
            error = CheckpointError("it broke off")
            coming.open.__exit__(type(error), error, None)


# -- giving ----------------------------------------------------------------------------------------


class Giver:
    """Gives one node what the workers here leave in `folder`, in one generation."""

    def __init__(
        self, info: RendezvousInfo, rank: int, folder: Path, stores: Stores, secret: bytes | None
    ) -> None:
        self._info, self._rank, self._folder = info, rank, folder
        self._stores, self._secret = stores, secret
        self._waker = AgentWaker(folder)
        self._over = threading.Event()
        self._news = threading.Event()
        self._idle = threading.Event()
        self._store: Store | None = None
        self._offered: dict[Sort, int] = {}
        self.given: set[Sort] = set()
        """Of which the node has kept a snapshot."""
        self._said = ""
        self._thread = helper(self._run, "agent-replicas-to")
        self._thread.start()

    def wake(self) -> None:
        """There may be a new snapshot."""
        self._idle.clear()
        self._news.set()

    def flush(self, seconds: float) -> None:
        """Until the node has all that there is, or can be given no more; for at most `seconds`."""
        if self._lacking():
            self.wake()
            self._idle.wait(seconds)

    def stop(self) -> None:
        """Give no more; the thread ends with the call of a store that it is in, if any."""
        self._over.set()
        self._news.set()
        if (store := self._store) is not None:
            store.close()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._give_all()
            except (OSError, ElasticError) as error:
                self._say(f"replicas do not reach node {self._rank}: {error}")
                self._idle.set()  # nobody waits for a node that cannot be reached just now
            self._over.wait(RETRY_SECONDS)
        self._idle.set()

    def _say(self, text: str) -> None:
        if text != self._said and not self._over.is_set():
            log.info("%s", text)
        self._said = text

    def _give_all(self) -> None:
        """Until this ends, or that node cannot be reached; nothing while it has no place yet."""
        said = present(self._info.store, "the store").get(mailbox_key(self._info, self._rank))
        mailbox = decode_mailbox(said.value) if said else None
        if mailbox is None:
            return
        self._store = store = self._stores.connect(
            mailbox.address,
            mailbox.port,
            job=mailbox.job(self._info.board),
            secret=mailbox.key(self._secret),
            timeout=ANSWER_SECONDS,
        )
        with store:
            store.get("in")  # who is not let in tries again
            while True:
                # Cleared first: `stop` sets `_over` before it wakes this.
                self._news.clear()
                if self._over.is_set():
                    return
                lacking = self._lacking()
                for found in lacking:
                    self._give(store, found)
                if not lacking and not self._news.is_set():
                    self._idle.set()
                    self._news.wait()

    def _lacking(self) -> list[SnapshotRef]:
        """The snapshots that the node has not been offered."""
        newest = [(one.header, one) for one in newest_local_snapshots(self._folder)]
        return [one for r, one in newest if self._offered.get((r.name, r.part), 0) < r.sequence]

    def _give(self, store: Store, found: SnapshotRef) -> None:
        record = found.header
        offer = f"{self._info.rank}/{secrets.token_hex(8)}"
        with lock_snapshot(self._folder.parent, found) as handle:
            if handle is None:
                return  # there is a newer one
            try:
                store.set(f"{offer}/offer", json.dumps(attrs.asdict(record)).encode())
                chunks = iter_chunks(handle, record.size, CHUNK_BYTES)
                store.set_all((f"{offer}/{zlib.crc32(chunk):08x}", chunk) for chunk in chunks)
                store.set(f"{offer}/end", b"")
                self.given.add((record.name, record.part))
            except StoreRefused as error:
                # There may be no memory for it; there may be for the next one.
                self._say(f"node {self._rank} does not keep a replica: {error}")
        self._offered[record.name, record.part] = record.sequence
        self._waker.wake()


# -- both, for a generation ------------------------------------------------------------------------


class Replicating:
    """One generation's replicas: given to the nodes after this one, taken from those before.

    workers: how many this node has. address: where it takes replicas.

    Raises:
        OSError: nothing can be taken at this address.
    """

    def __init__(
        self,
        info: RendezvousInfo,
        folder: Path,
        replicas: int,
        workers: int,
        *,
        stores: Stores,
        secret: bytes | None,
        address: str,
    ) -> None:
        self._info, self._folder, self._workers = info, folder, workers
        self._over = threading.Event()
        self._announced = self._safe = self._cleared = False
        rank, nodes = info.rank, info.world_size
        self._mailbox = Mailbox(folder, givers(rank, nodes, replicas))
        mailbox = MailboxInfo(address, 0, secrets.token_bytes(NONCE_BYTES).hex())
        self._server = stores.serve(
            address, 0, job=mailbox.job(info.board), secret=mailbox.key(secret), space=self._mailbox
        )
        self._server.start()
        self._mailbox_info = attrs.evolve(mailbox, port=self._server.port)
        try:
            self._pipe = self._made_pipe()
        except BaseException:
            self._server.close()
            raise
        self._givers = [
            Giver(info, to, folder, stores, secret) for to in takers(rank, nodes, replicas)
        ]
        self._thread = helper(self._watch, "agent-snapshots")
        self._thread.start()

    def flush(self, seconds: float) -> None:
        """Until the others have the last snapshots, or `seconds` have passed."""
        deadline = monotonic() + seconds
        for giver in self._givers:
            giver.flush(max(0.0, deadline - monotonic()))

    def close(self) -> None:
        self._over.set()
        (waker := AgentWaker(self._folder)).wake()
        waker.close()
        for giver in self._givers:
            giver.stop()
        self._server.close()
        self._mailbox.close()
        for giver in self._givers:
            giver.join(1.0)
        self._thread.join(1.0)

    def _made_pipe(self) -> int:
        os.mkfifo(self._folder / WAKEUP_PIPE, 0o600)
        # Read and write: a pipe that no worker has open would have come to its end.
        return os.open(self._folder / WAKEUP_PIPE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def _watch(self) -> None:
        while not self._over.is_set():
            for giver in self._givers:
                giver.wake()
            try:
                self._announce()
                self._clear_up()
            except (ElasticError, OSError) as error:
                log.info("replicas wait for the job's store: %s", error)
            poll = select.poll()
            poll.register(self._pipe, select.POLLIN)
            if poll.poll(LOOK_SECONDS * 1000):
                os.read(self._pipe, 65536)
            # Removed with its folder, the pipe is made anew once a worker has made the folder anew.
            if not (self._folder / WAKEUP_PIPE).exists():
                with contextlib.suppress(OSError):
                    anew = self._made_pipe()
                    os.close(self._pipe)
                    self._pipe = anew
        os.close(self._pipe)
        (self._folder / WAKEUP_PIPE).unlink(missing_ok=True)

    def _announce(self) -> None:
        """Say where this node takes replicas."""
        if not self._announced:
            key = mailbox_key(self._info, self._info.rank)
            present(self._info.store, "the store").set(key, encode_mailbox(self._mailbox_info))
            self._announced = True

    def _clear_up(self) -> None:
        """Drop what earlier eras left and the job need not go back to.

        Of a state in parts that is so when all nodes have made theirs *and* given them away: until
        then a job that loses a node goes back to the earlier ones.
        """
        if self._cleared:
            return
        own = [one.header for one in newest_local_snapshots(self._folder)]
        in_parts = any(record.parts > 1 for record in own)
        if own and (not in_parts or self._all_are_safe({(r.name, r.part) for r in own})):
            found, era = list_snapshots(self._folder.parent), int(self._folder.name)
            self._cleared = remove_superseded(self._folder.parent, found, era)

    def _all_are_safe(self, own: set[Sort]) -> bool:
        store, safe = present(self._info.store, "the store"), f"{self._info.board}snapshots/safe/"
        if not self._safe:
            if len(own) < self._workers or not all(own <= giver.given for giver in self._givers):
                return False
            store.set(f"{safe}{self._info.rank}", b"")
            self._safe = True
        return len(store.list(safe).entries) == self._info.world_size


# -- all of it, for one agent ----------------------------------------------------------------------


class SnapshotKeeper(Memory):
    """Of one agent.

    era: the folder for one start of the workers, by its number, or None where there is no memory
    for it; see `elasticlib.workers.session`.
    stores: how stores are reached. replicas: how many other nodes keep each snapshot. secret: what
    the nodes of the job prove to know, if anything. address: of this node, where others reach it;
    found out if it is empty.
    """

    def __init__(
        self,
        era: Callable[[int], Path | None],
        stores: Stores,
        *,
        replicas: int = 0,
        secret: bytes | None = None,
        address: str = "",
    ) -> None:
        self._era, self._stores, self._replicas = era, stores, replicas
        self._secret, self._address = secret, address
        self._folder: Path | None = None
        self._info: RendezvousInfo | None = None
        self._replicating: Replicating | None = None
        self._helping: LastWrites | None = None

    def begin(self, info: RendezvousInfo, group: WorkerGroup) -> None:
        self._end()
        self._info = info
        folder = self._era(group.attempt)
        if folder is None:
            # Workers keep no snapshots. What those before have kept stays for `finish`.
            return
        self._folder = folder
        remove_incomplete(folder.parent, int(folder.name))
        if not self._replicas or info.world_size == 1:
            return
        if info.store is None or not info.board:
            raise ConfigError(
                "snapshot_replicas (--snapshot-replicas) needs a store in which the nodes find "
                "each other, and this rendezvous has none: leave it out"
            )
        address = self._address or own_address(info)
        try:
            self._replicating = Replicating(
                info,
                folder,
                self._replicas,
                len(group.workers),
                stores=self._stores,
                secret=self._secret,
                address=address,
            )
        except OSError as error:
            raise ConfigError(
                f"this node cannot take replicas at {address}: {error}; give one at which the "
                "others reach it (local_addr, --local-addr)"
            ) from error

    def rest(self) -> None:
        if self._folder is not None and self._helping is None:
            # A node that leaves may need parts that are here, and the others wait for it.
            self._helping = self._last_writes(self._folder, leaves=False)
            helper(self._helping.run, "agent-helps").start()

    def finish(self, *, keep: bool, given_up: Callable[[], str] = str) -> str:
        if keep and self._replicating is not None:
            self._replicating.flush(FLUSH_SECONDS)
        self._end()
        if not keep or self._folder is None:
            return ""
        last = self._last_writes(self._folder, leaves=True)
        problem = last.run(given_up=given_up)
        self.saved = last.saved
        return problem

    def _last_writes(self, folder: Path, *, leaves: bool) -> LastWrites:
        return LastWrites(folder.parent, self._info, self._stores.alone, leaves=leaves)

    def _end(self) -> None:
        if self._helping is not None:
            self._helping.stop()
        if self._replicating is not None:
            self._replicating.close()
        self._helping = self._replicating = None


def own_address(info: RendezvousInfo) -> str:
    """This node's address, as it is on its way to the generation's first node."""
    first = info.bootstrap_store_info
    found = socket.getaddrinfo(first.master_addr, first.master_port or 9, type=socket.SOCK_DGRAM)
    family, kind, _, _, target = found[0]
    if info.rank == 0:
        return str(target[0])
    with socket.socket(family, kind) as probe:
        # Connecting a datagram socket chooses a route and sends nothing.
        probe.connect(target)
        return str(probe.getsockname()[0])
