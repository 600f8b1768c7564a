"""Interface to a process group whose members can be replaced, and its implementation with torch.

The rest of the package uses only the three operations of `GroupBackend`. A backend that replaces
members in another way (torchft, or NCCL's own abort and initialization) is another subclass in this
file and another entry of `BACKENDS`.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
import json
import os
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch
import torch.distributed as dist

from ..clock import monotonic, to_timedelta

# Nothing interrupts torch while it connects a group, not even the loss of a member. So the limit is
# shorter than the time within which the agent expects workers to leave their group.
CONNECT_TIMEOUT_S = 5.0

# When a generation ends, its members leave the group one by one, and the rest wait for one another.
# Sockets stop receiving once no bytes pass through them, or after this long.
DRAIN_TIMEOUT_S = 0.1

DISCARD_BYTES = 1 << 16  # read at once from a connection whose data nobody needs

MAX_GROUPS_PER_GENERATION = 1 << 16  # more than a script creates with new_group

# Offset of bytes_acked in Linux's struct tcp_info, which bytes_received follows; end of both.
TCP_INFO_ACKED_OFFSET, TCP_INFO_BYTES = 120, 136

_c10d: Any = dist  # has functions that are newer than the oldest supported torch
Store: TypeAlias = Any  # torch.distributed.Store, which has no type annotations


@attrs.frozen(eq=False)
class GroupMembership:
    """The members of a process group, from the point of view of this worker."""

    generation: int
    rank: int
    world_size: int
    uuid: int  # below 2**62; the same on all members, and different for each group of a job
    store: Store  # can be reached by all members; its keys belong to this generation

    def all_gather(self, name: str, text: str) -> list[str]:
        """Exchange a text with all members through the store. Every member must call this.

        Rank 0 collects the texts and publishes them under one key, because a large job would
        otherwise send as many requests to the store as it has pairs of ranks.

        Args:
            name: identifies the call within the generation.
            text: the value of this rank.

        Returns:
            The value of each rank, in rank order.
        """
        self.store.set(f"{name}/{self.rank}", text)
        if self.rank == 0:
            keys = [f"{name}/{rank}" for rank in range(self.world_size)]
            texts = [text.decode() for text in self.store.multi_get(keys)]
            self.store.set(name, json.dumps(texts))
        return [str(each) for each in json.loads(self.store.get(name))]


class GroupBackend(abc.ABC):
    """A default process group whose members can be replaced.

    The constructor creates the default process group with this worker as its only member.

    Args:
        backend: name of torch's backend, such as "gloo" or "cpu:gloo,cuda:nccl2".
        store: kept by torch for the lifetime of the process group. It always leads to the current
            generation.
        options: further arguments of `torch.distributed.init_process_group`.
    """

    @abc.abstractmethod
    def __init__(self, backend: str, store: Store, options: Mapping[str, Any]) -> None: ...

    @classmethod
    @abc.abstractmethod
    def is_supported(cls, backend: str | None) -> bool:
        """Return True if the installed torch can replace the members of a group of `backend`."""

    @abc.abstractmethod
    def reconfigure(self, membership: GroupMembership) -> None:
        """Replace the members of the group, and wait until they are connected.

        Every member must call this. Afterwards `torch.distributed` uses the new rank and world
        size, and new groups and device meshes can be created.

        Raises:
            RuntimeError: the members were not connected within CONNECT_TIMEOUT_S, or `abort` was
                called.
        """

    @abc.abstractmethod
    def abort(self) -> None:
        """Make the pending and future collectives of the current group fail on this worker.

        From the end of a generation until this worker joins the next one, a watcher thread calls
        this method every few milliseconds. An implementation may use the first calls to let data in
        flight arrive.
        """


class TorchReconfigurableBackend(GroupBackend):
    """The group of gloo or nccl2, whose members torch 2.14 and newer can replace.

    torch ends a gloo collective at once if a peer has died, but it cannot end one whose peer is
    alive and busy with something else. `abort` therefore ends the sockets that the group has
    opened, see `_GroupSockets`. It first waits until no more bytes pass through them.
    """

    SUPPORTED = frozenset({"gloo", "nccl2"})

    def __init__(self, backend: str, store: Store, options: Mapping[str, Any]) -> None:
        own = {"store": store, "rank": 0, "world_size": 1, "enable_reconfigure": True}
        dist.init_process_group(backend, **{**options, **own})
        self._nccl: Any = None  # torch's NCCL backend object, if the group has one
        if "nccl" in dist.get_backend_config():
            group = _c10d.distributed_c10d._get_default_group()
            self._nccl = group._get_backend(torch.device("cuda"))
        self._lock = threading.Lock()  # guards the fields below
        self._sockets = _GroupSockets()
        self._abort_started: float | None = None  # time of the first `abort` of this group
        self._transferred: dict[int, tuple[int, ...]] | None = None  # at the last `abort`
        # The imports in this function take long; no other member waits for this one yet.
        _clear_dtensor_plans()
        # All processes have the same handle before their first reconfiguration.
        self._connect(secrets.randbits(62), [_reconfigure_handle()])

    @classmethod
    def is_supported(cls, backend: str | None) -> bool:
        names = {part.rpartition(":")[2] for part in (backend or "").split(",")}
        return hasattr(dist, "_reconfigure") and names <= cls.SUPPORTED

    def reconfigure(self, membership: GroupMembership) -> None:
        handles = membership.all_gather("handle", _reconfigure_handle())
        with self._lock:
            self._sockets.start_recording()
            self._abort_started = self._transferred = None
        self._connect(membership.uuid, handles)
        dist.barrier()  # gloo opens some connections only when they are first used
        with self._lock:
            self._sockets.stop_recording()
        world = _c10d.distributed_c10d._world
        # torch records the ranks of the default group once. Device meshes read them.
        world.pg_group_ranks[dist.group.WORLD] = {
            rank: rank for rank in range(membership.world_size)
        }
        # torch names new groups by this count, which differs between survivors and new members.
        world.group_count = membership.generation * MAX_GROUPS_PER_GENERATION
        _clear_dtensor_plans()

    def abort(self) -> None:
        with self._lock:
            now, transferred = monotonic(), self._sockets.bytes_transferred()
            if self._abort_started is None:
                self._abort_started = now
            is_idle = transferred == self._transferred
            self._transferred = transferred
            if is_idle or now - self._abort_started > DRAIN_TIMEOUT_S:
                self._sockets.stop_receiving()
                if self._nccl is not None:
                    with contextlib.suppress(RuntimeError):
                        self._nccl.abort()

    def _connect(self, uuid: int, handles: Sequence[str]) -> None:
        timeout = to_timedelta(CONNECT_TIMEOUT_S)
        _c10d._reconfigure(uuid=uuid, handles=[*handles], timeout=timeout).wait()


BACKENDS: tuple[type[GroupBackend], ...] = (TorchReconfigurableBackend,)


def find_backend(backend: str | None) -> type[GroupBackend] | None:
    """Return the first class that can replace the members of a group of `backend`, or None."""
    return next((kind for kind in BACKENDS if kind.is_supported(backend)), None)


def _reconfigure_handle() -> str:
    return str(_c10d._get_reconfigure_handle())


def _clear_dtensor_plans() -> None:
    """Clear what DTensor has planned for an earlier rank and world size."""
    if "torch.distributed.tensor" in sys.modules:
        # torch.distributed.tensor.debug does this too, but its import fails without NumPy.
        dispatcher: Any = importlib.import_module("torch.distributed.tensor").DTensor._op_dispatcher
        dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()
        redistribute = importlib.import_module("torch.distributed.tensor._redistribute")
        redistribute._gen_transform_infos.cache_clear()
        # These caches keep the meshes of earlier groups alive, and so their process groups.
        clear_planners = getattr(redistribute, "clear_redistribute_planner_cache", None)
        if clear_planners is not None:  # torch 2.15
            clear_planners()
        costs: Any = importlib.import_module("torch.distributed.tensor._collective_utils")
        costs.MeshTopoInfo.build_from_mesh.cache_clear()


class _GroupSockets:
    """The sockets that were opened while a group was connected, identified by their inodes.

    Inodes of open sockets are unique, while a file descriptor can be reused for another file.

    A gloo send never returns if its connection breaks while gloo is writing it: `Pair::write`
    keeps it in a queue after EPIPE or ECONNRESET, and `Pair::signalException` does not tell the
    owners of that queue (gloo/transport/tcp/pair.cc, found in gloo of April 2026). So a group is
    left without breaking a connection: this end only stops receiving, which gloo sees as the end
    of the connection after it has handled what had arrived. The connection itself stays open, and
    what the peer still sends is read and discarded here, until this worker joins another group.
    """

    def __init__(self) -> None:
        self._existing: frozenset[int] = frozenset()  # inodes before the group was connected
        self._opened: frozenset[int] | None = frozenset()  # inodes; None while recording
        # Duplicates of the sockets that have stopped receiving, by inode. They keep the
        # connections open after gloo has closed its own descriptors.
        self._kept: dict[int, socket.socket] = {}

    def start_recording(self) -> None:
        """Close the sockets of the last group, and record sockets that are opened from now on."""
        for connection in self._kept.values():
            connection.close()
        self._kept = {}
        self._existing, self._opened = frozenset(_socket_descriptors_by_inode()), None

    def stop_recording(self) -> None:
        """Stop recording: sockets that are opened from now on do not belong to the group."""
        self._opened = frozenset(_socket_descriptors_by_inode()) - self._existing

    def bytes_transferred(self) -> dict[int, tuple[int, ...]]:
        """Return the acknowledged and the received bytes of each connection, by inode."""
        return {
            inode: _tcp_bytes(descriptor, inode)
            for inode, descriptor in self._descriptors().items()
        }

    def stop_receiving(self) -> None:
        """Let gloo see the end of each connection, and discard what arrives afterwards."""
        descriptors = self._descriptors()
        for inode, descriptor in descriptors.items():
            if inode not in self._kept:
                with contextlib.suppress(OSError):
                    self._stop_receiving(inode, descriptor)
        for inode, connection in self._kept.items():
            if inode not in descriptors:  # gloo has closed its descriptor
                with contextlib.suppress(OSError):
                    _discard_received(connection)

    def _stop_receiving(self, inode: int, descriptor: int) -> None:
        with _duplicate_connection(descriptor, inode) as connection:
            if connection is not None:
                connection.shutdown(socket.SHUT_RD)
                self._kept[inode] = connection.dup()

    def _descriptors(self) -> dict[int, int]:
        kept = {connection.fileno() for connection in self._kept.values()}
        sockets = _socket_descriptors_by_inode(kept)
        if self._opened is None:
            inodes = sockets.keys() - self._existing
        else:
            inodes = sockets.keys() & self._opened
        return {inode: sockets[inode] for inode in inodes}


def _discard_received(connection: socket.socket) -> None:
    """Read all that has arrived, without blocking."""
    buffer = bytearray(DISCARD_BYTES)
    while connection.recv_into(buffer, flags=socket.MSG_DONTWAIT):
        pass


def _socket_descriptors_by_inode(excluded: Collection[int] = ()) -> dict[int, int]:
    """Map the inode of each socket of this process to its file descriptor, if not `excluded`."""
    sockets = {}
    for name in os.listdir("/proc/self/fd"):
        inode = None if int(name) in excluded else _socket_inode(int(name))
        if inode is not None:
            sockets[inode] = int(name)
    return sockets


def _socket_inode(descriptor: int) -> int | None:
    try:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return None
    return int(target[8:-1]) if target.startswith("socket:[") else None


@contextlib.contextmanager
def _duplicate_connection(descriptor: int, inode: int) -> Iterator[socket.socket | None]:
    """Yield a duplicate of a connection, or None if it listens or `inode` is not its inode."""
    duplicate = os.dup(descriptor)
    if _socket_inode(duplicate) != inode:
        os.close(duplicate)
        yield None
        return
    with socket.socket(fileno=duplicate) as connection:
        is_listening = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        yield None if is_listening else connection


def _tcp_bytes(descriptor: int, inode: int) -> tuple[int, ...]:
    """Return the acknowledged and the received bytes of a connection; () if they are unknown."""
    with (
        contextlib.suppress(OSError, struct.error),
        _duplicate_connection(descriptor, inode) as connection,
    ):
        if connection is not None:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
            return struct.unpack_from("=QQ", info, TCP_INFO_ACKED_OFFSET)
    return ()
