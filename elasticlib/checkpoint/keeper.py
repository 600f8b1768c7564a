"""What an agent does for its workers' snapshots: replicas to other nodes, clearing up, the disk.

It begins anew with each generation, and frees what workers that ended were writing. Without
replicas that is all until the end: the workers write into its memory and clear up themselves. What
is in memory alone at the end `persist.py` writes.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from ..agent.interface import Memory
from ..errors import ConfigError
from ..rendezvous.interface import RendezvousInfo
from ..threads import helper
from ..workers.spec import WorkerGroup
from . import memory
from .persist import LastWrites
from .replicas import Replicating, Stores

FLUSH_SECONDS = 5.0
"""So long a node that leaves waits for the others to get its last replicas."""


class SnapshotKeeper(Memory):
    """Of one agent.

    era: the folder for one start of the workers, by its number; see `elasticlib.workers.session`.
    stores: how stores are reached. replicas: how many other nodes keep each snapshot. secret: what
    the nodes of the job prove to know, if anything. address: of this node, where others reach it;
    found out if it is empty.
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
        self._era, self._stores, self._replicas = era, stores, replicas
        self._secret, self._address = secret, address
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
        if self._folder is not None and self._helping is None:
            # A node that leaves may need parts that are here, and the others wait for it.
            self._helping = self._last_writes(self._folder, leaves=False)
            helper(self._helping.run, "agent-helps").start()

    def finish(self, *, keep: bool) -> str:
        if keep and self._replicating is not None:
            self._replicating.flush(FLUSH_SECONDS)
        self._end()
        if not keep or self._folder is None:
            return ""
        return self._last_writes(self._folder, leaves=True).run()

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
