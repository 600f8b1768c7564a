"""What an agent does for its workers' snapshots: replicas to other nodes, clearing up, the disk.

It begins anew with each generation, and frees what was being written when earlier workers ended.
Else, without replicas, it does nothing before the end: the workers write into its memory and clear
up themselves. What is in memory alone at the end is for `persist.py` to write.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from ..agent.interface import Memory
from ..clock import monotonic
from ..errors import ConfigError, ElasticError, present
from ..rendezvous.interface import RendezvousInfo
from ..threads import helper
from ..workers.spec import WorkerGroup
from . import memory
from .memory import NEWS, newest_in, tell
from .persist import LastWrites
from .replicas import (
    RETRY_SECONDS,
    Giver,
    Mailbox,
    Sort,
    Stores,
    encode_place,
    givers,
    place_key,
    serve,
    takers,
)

log = logging.getLogger("elasticlib.checkpoint")

FLUSH_SECONDS = 5.0
"""For which a node that leaves waits until the others have its last replicas."""
LOOK_SECONDS = 2.0
"""After which is looked without news, as workers may have made anew what others had removed."""


class SnapshotKeeper(Memory):
    """Of one agent.

    Args:
        era: the folder for one start of the workers, by its number; see
            `elasticlib.workers.session`.
        stores: how stores are reached.
        replicas: how many other nodes keep each snapshot.
        secret: what the nodes of the job prove to know, if anything.
        address: of this node, where others reach it; found out if it is empty.
    """

    def __init__(
        self,
        era: Callable[[int], Path],
        stores: Stores,
        *,
        replicas: int = 0,
        secret: bytes | None = None,
        address: str = "",
    ) -> None:
        self._era = era
        self._stores = stores
        self._replicas = replicas
        self._secret = secret
        self._address = address
        self._folder: Path | None = None
        self._info: RendezvousInfo | None = None
        self._replicating: Replicating | None = None
        self._helping: LastWrites | None = None

    def begin(self, info: RendezvousInfo, group: WorkerGroup) -> None:
        self._end()
        self._info, self._folder = info, self._era(group.attempt)
        memory.remove_torn(self._folder.parent, int(self._folder.name))
        if not self._replicas or info.world_size == 1:
            return
        if info.store is None or not info.board:
            raise ConfigError(
                "--snapshot-replicas needs a store in which the nodes find each other, and this "
                "rendezvous has none: leave it out"
            )
        address = self._address or own_address(info)
        try:
            self._replicating = Replicating(
                info,
                self._folder,
                self._replicas,
                group.spec.local_world_size,
                stores=self._stores,
                secret=self._secret,
                address=address,
            )
        except OSError as error:
            raise ConfigError(
                f"this node cannot take replicas at {address}: {error}; --local-addr says at which "
                "address the others reach it"
            ) from error

    def rest(self) -> None:
        if self._folder is None or self._helping is not None:
            return
        # A node that leaves may need parts that are here, and is waited for before others start.
        self._helping = self._last_writes(leaves=False)
        helper(self._helping.run, "agent-helps").start()

    def finish(self, *, keep: bool) -> str:
        if keep and self._replicating is not None:
            self._replicating.flush(FLUSH_SECONDS)
        self._end()
        return self._last_writes(leaves=True).run() if keep and self._folder is not None else ""

    def _last_writes(self, *, leaves: bool) -> LastWrites:
        memory = present(self._folder, "the folder").parent
        return LastWrites(memory, self._info, self._stores.alone, leaves=leaves)

    def _end(self) -> None:
        helping, self._helping = self._helping, None
        if helping is not None:
            helping.stop()
        replicating, self._replicating = self._replicating, None
        if replicating is not None:
            replicating.close()


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
        self._safe = self._cleared = False
        rank, nodes = info.rank, info.world_size
        self._pipe = self._made_pipe()
        self._mailbox = Mailbox(folder, givers(rank, nodes, replicas))
        try:
            self._server, self._place = serve(
                self._mailbox, address, info.board, stores=stores, secret=secret
            )
        except BaseException:
            os.close(self._pipe)
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
        tell(self._folder)
        for giver in self._givers:
            giver.stop()
        self._server.close()
        self._mailbox.close()
        for giver in self._givers:
            giver.join(1.0)
        self._thread.join(1.0)

    def _made_pipe(self) -> int:
        os.mkfifo(self._folder / NEWS, 0o600)
        # Read and write: a pipe that no worker has open would have come to its end.
        return os.open(self._folder / NEWS, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def _watch(self) -> None:
        self._announce()
        while not self._over.is_set():
            poll = select.poll()
            poll.register(self._pipe, select.POLLIN)
            if poll.poll(LOOK_SECONDS * 1000):
                os.read(self._pipe, 65536)
            # Removed with its folder, it is made anew as soon as a worker has made that.
            if not (self._folder / NEWS).exists():
                with contextlib.suppress(OSError):
                    anew = self._made_pipe()
                    os.close(self._pipe)
                    self._pipe = anew
            for giver in self._givers:
                giver.wake()
            try:
                self._clear_up()
            except (ElasticError, OSError) as error:
                log.info("earlier snapshots stay for now: %s", error)
        os.close(self._pipe)
        (self._folder / NEWS).unlink(missing_ok=True)

    def _announce(self) -> None:
        """Say where this node takes replicas."""
        store = present(self._info.store, "the store")
        while not self._over.is_set():
            try:
                store.set(place_key(self._info, self._info.rank), encode_place(self._place))
                return
            except ElasticError as error:
                log.info("the other nodes are not told where to leave replicas: %s", error)
                self._over.wait(RETRY_SECONDS)

    def _clear_up(self) -> None:
        """Drop what earlier eras left, once this one's stand on their own.

        Of a state in parts that is when all nodes have made theirs *and* given them away: until
        then the loss of a node takes back to the earlier ones.
        """
        if self._cleared:
            return
        own = [one.record for one in newest_in(self._folder)]
        in_parts = any(record.parts > 1 for record in own)
        if own and (not in_parts or self._all_are_safe({(r.name, r.part) for r in own})):
            found, era = memory.look(self._folder.parent), int(self._folder.name)
            self._cleared = memory.clear_up(self._folder.parent, found, era)

    def _all_are_safe(self, own: set[Sort]) -> bool:
        store, safe = present(self._info.store, "the store"), f"{self._info.board}snapshots/safe/"
        if not self._safe:
            if len(own) < self._workers or not all(own <= giver.given for giver in self._givers):
                return False
            store.set(f"{safe}{self._info.rank}", b"")
            self._safe = True
        return len(store.list(safe).entries) == self._info.world_size


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
