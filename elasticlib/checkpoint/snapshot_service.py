"""Snapshot service of an agent: replicas on other nodes, freeing of memory, and the end save.

Workers write their snapshots into the directory of their attempt (one start of an agent's workers),
and wake the agent through a pipe there. The agent sends the snapshots to other nodes, stores those
of other nodes, and frees the snapshots of earlier attempts when the job cannot need them any more.
Without replicas the workers free them, and the agent acts only when the job ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ..agent.interface import SnapshotService
from ..clock import monotonic
from ..errors import ConfigError, ElasticError, require_not_none
from ..rendezvous.interface import RendezvousInfo
from ..threads import daemon_thread, only_logged, start_thread
from ..untrusted import open_regular_file
from ..workers.spec import WorkerGroup
from .catalog import CheckpointCatalog
from .commit import Committer
from .end_save import EndSave
from .refs import Writer
from .replication import (
    JOIN_TIMEOUT_S,
    ReplicaEndpoint,
    ReplicaReceiver,
    ReplicaSender,
    SnapshotKind,
    endpoint_key,
    replica_sources,
    replica_targets,
)
from .snapshot_slots import (
    WAKEUP_PIPE,
    kind_of,
    list_snapshots,
    newest_local_snapshots,
    remove_leftovers,
    remove_superseded,
    wake_agent,
)
from .storage import open_storage

log = logging.getLogger("elasticlib.checkpoint")

FLUSH_TIMEOUT_S = 5.0  # A node that leaves waits this long for other nodes to store its snapshots.
RELEASE_TIMEOUT_S = 10.0  # A disk that hangs must not keep an agent from ending.
CLAIMED_PREFIX = "claimed."  # of a file in which a worker names a directory that it has claimed
MAX_LOCATION_BYTES = 8192
POLL_INTERVAL_S = 2.0  # An agent without a wakeup notices removed memory after this time.


class ReplicationSession:
    """Replicates the snapshots of one generation, and frees superseded ones.

    Args:
        info: The generation, which has a store.
        attempt_dir: The directory of the attempt in this agent's memory.
        replicas: The number of other nodes that store each snapshot.
        num_workers: The number of workers of this node.
        secret: The job's secret, if it has one.
        address: As for `NodeSnapshotService`.
    """

    def __init__(
        self,
        info: RendezvousInfo,
        attempt_dir: Path,
        replicas: int,
        num_workers: int,
        *,
        secret: bytes | None,
        address: str,
    ) -> None:
        self._info, self._address = info, address
        self._store, self._rank = require_not_none(info.store, "the store"), info.rank
        self._exchange_prefix = info.exchange_prefix
        self._num_nodes, self._num_workers = info.world_size, num_workers
        self._attempt_dir = attempt_dir
        sources = replica_sources(info.assignment, replicas)
        targets = replica_targets(info.assignment, replicas)
        self._receiver = ReplicaReceiver(info, sources, attempt_dir, secret)
        self._senders = [ReplicaSender(info, target, attempt_dir, secret) for target in targets]
        self._thread = daemon_thread(self._run, "agent-snapshots", only_logged)
        self._is_stopped = False
        self._endpoint: ReplicaEndpoint | None = None  # which is not published yet
        self._is_replication_published = False
        self._is_cleared = False  # no snapshot of an earlier attempt is left

    def start(self) -> None:
        """Start to receive snapshots and to send them.

        The address is found in another thread if a name has to be resolved for it, because the
        caller is the agent's event loop. An address that cannot be used is then a warning.

        Raises:
            OSError: The address is not one of this node, or the memory cannot be used.
        """
        self._pipe = self._open_pipe()
        try:
            if _is_literal(self._address or self._info.bootstrap_store_info.master_addr):
                self._receive()
            else:
                name = "agent-replicas-address"
                start_thread(daemon_thread(self._receive_or_warn, name, only_logged))
        except BaseException:
            self._receiver.stop()
            self._close_pipe()
            raise
        for sender in self._senders:
            sender.thread.start()
        self._thread.start()

    def _receive(self) -> None:
        self._endpoint = self._receiver.start(self._address or own_address(self._info))

    def _receive_or_warn(self) -> None:
        try:
            self._receive()
        except OSError as error:
            if not self._is_stopped:
                what = f"use {self._address}" if self._address else "find its own address"
                log.warning(
                    "this node stores no snapshots of other nodes in generation %d: it cannot %s: "
                    "%s; set local_addr (--local-addr) to an address at which they reach it",
                    *(self._info.generation, what, error),
                )
        else:
            wake_agent(self._attempt_dir)

    def flush(self, timeout_s: float) -> None:
        """Wait until the other nodes have the last snapshots, for at most `timeout_s` seconds."""
        deadline = monotonic() + timeout_s
        for sender in self._senders:
            sender.flush(max(0.0, deadline - monotonic()))

    def stop(self) -> None:
        """Close all streams. Complete replicas stay in the memory."""
        self._is_stopped = True
        wake_agent(self._attempt_dir)
        for sender in self._senders:
            sender.stop()
        self._receiver.stop()
        for sender in self._senders:
            sender.thread.join(JOIN_TIMEOUT_S)
        self._thread.join(JOIN_TIMEOUT_S)

    def _open_pipe(self) -> int:
        os.mkfifo(self._attempt_dir / WAKEUP_PIPE, 0o600)
        # It is also opened for writing, so that it is not at its end while no worker has it open.
        return os.open(self._attempt_dir / WAKEUP_PIPE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def _close_pipe(self) -> None:
        os.close(self._pipe)
        (self._attempt_dir / WAKEUP_PIPE).unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._is_stopped:
            for sender in self._senders:
                sender.news.set()
            try:
                self._publish_endpoint()
                self._free_superseded()
            except (ElasticError, OSError) as error:
                log.info("snapshot replication waits for the job's store: %s", error)
            poll = select.poll()
            poll.register(self._pipe, select.POLLIN)
            if poll.poll(POLL_INTERVAL_S * 1000):
                os.read(self._pipe, 65536)
            # Another program may have removed the directory. A worker creates it again.
            if not (self._attempt_dir / WAKEUP_PIPE).exists():
                with contextlib.suppress(OSError):
                    pipe = self._open_pipe()
                    os.close(self._pipe)
                    self._pipe = pipe
        self._close_pipe()

    def _publish_endpoint(self) -> None:
        if self._endpoint is not None:
            key = endpoint_key(self._exchange_prefix, self._rank)
            self._store.set(key, self._endpoint.encode())
            self._endpoint = None

    def _free_superseded(self) -> None:
        """Free the snapshots of earlier attempts, once the job cannot need them any more.

        If the state is sharded, all nodes must have new snapshots and replicas of them. Otherwise
        the job would need the earlier ones if it lost a node now.
        """
        if self._is_cleared:
            return
        own = newest_local_snapshots(self._attempt_dir)
        is_sharded = any(ref.parts > 1 for ref in own)
        if own and (not is_sharded or self._have_all_nodes_replicated(set(map(kind_of, own)))):
            memory, attempt = self._attempt_dir.parent, int(self._attempt_dir.name)
            self._is_cleared = remove_superseded(memory, list_snapshots(memory), attempt)

    def _have_all_nodes_replicated(self, own: set[SnapshotKind]) -> bool:
        """Return True if each node has published that its snapshots are replicated.

        This method publishes it for this node, once each worker has a snapshot and all targets have
        stored a snapshot of each kind in `own`.
        """
        prefix = f"{self._exchange_prefix}snapshots/replicated/"
        if not self._is_replication_published:
            is_stored = all(own <= sender.stored for sender in self._senders)
            if len(own) < self._num_workers or not is_stored:
                return False
            self._store.set(f"{prefix}{self._rank}", b"")
            self._is_replication_published = True
        return len(self._store.list(prefix).entries) == self._num_nodes


class NodeSnapshotService(SnapshotService):
    """The snapshot service of one agent, for all generations.

    Args:
        attempt_dir: Returns the directory for an attempt by its number, or None if there is no
            memory for it.
        replicas: The number of other nodes that store each snapshot.
        secret: The job's secret, if it has one.
        address: The address at which the other nodes reach this one. If it is empty, it is the
            local address that connects to the generation's first node (see `own_address`).
    """

    def __init__(
        self,
        attempt_dir: Callable[[int], Path | None],
        *,
        replicas: int = 0,
        secret: bytes | None = None,
        address: str = "",
    ) -> None:
        self._attempt_dir_of = attempt_dir
        self._replicas, self._secret, self._address = replicas, secret, address
        self._attempt_dir: Path | None = None  # of the last attempt that had memory
        self._info: RendezvousInfo | None = None  # the last generation
        self._session: ReplicationSession | None = None
        self._helping: EndSave | None = None  # writes parts for nodes that leave
        self._has_job_ended = False  # on all nodes

    def on_workers_starting(self, info: RendezvousInfo, group: WorkerGroup) -> None:
        self._stop()
        self._info = info
        attempt_dir = self._attempt_dir_of(group.attempt)
        if attempt_dir is None:
            return  # The workers keep no snapshots. Earlier ones stay for `close`.
        self._attempt_dir = attempt_dir
        remove_leftovers(attempt_dir.parent, int(attempt_dir.name))
        if not self._replicas or info.world_size == 1:
            return
        if info.store is None or not info.exchange_prefix:
            raise ConfigError(
                "snapshot_replicas (--snapshot-replicas) needs a store that the nodes share, and "
                "this rendezvous has none: leave it out"
            )
        session = ReplicationSession(
            info,
            attempt_dir,
            self._replicas,
            len(group.workers),
            secret=self._secret,
            address=self._address,
        )
        try:
            session.start()
        except OSError as error:
            raise ConfigError(
                f"this node cannot receive snapshot replicas at {self._address or 'its address'}: "
                f"{error}; set local_addr (--local-addr) to an address at which the other nodes "
                "reach it"
            ) from error
        self._session = session

    def on_workers_stopped(self) -> None:
        if self._attempt_dir is not None and self._helping is None:
            # A node that leaves may need parts that are here, and waits for this node to write.
            self._helping = EndSave(self._attempt_dir.parent, self._info, is_leaving=False)
            daemon_thread(self._helping.run, "agent-helps", only_logged).start()

    def on_job_ended(self) -> None:
        self._has_job_ended = True

    def close(self, *, flush: bool, cancel_reason: Callable[[], str] = str) -> str:
        if flush and self._session is not None:
            self._session.flush(FLUSH_TIMEOUT_S)
        self._stop()
        problem = ""
        if flush and self._attempt_dir is not None:
            end_save = EndSave(self._attempt_dir.parent, self._info)
            problem = end_save.run(cancel_reason=cancel_reason)
            self.saved_step = end_save.saved
        if self._has_job_ended:
            self._release_directories(cancel_reason)
        return problem

    def _release_directories(self, cancel_reason: Callable[[], str]) -> None:
        """Let any process write to the checkpoint directories of the job, which has ended."""
        if self._attempt_dir is None or self._info is None:
            return
        writer = Writer(self._info.run_id, self._info.incarnation)
        release = partial(release_directories, self._attempt_dir.parent, writer)
        # Nothing can interrupt a thread that waits for a disk that hangs.
        thread = daemon_thread(release, "agent-release", only_logged)
        thread.start()
        deadline = monotonic() + RELEASE_TIMEOUT_S
        while thread.is_alive() and monotonic() < deadline and not cancel_reason():
            thread.join(0.1)

    def _stop(self) -> None:
        if self._helping is not None:
            self._helping.stop()
        if self._session is not None:
            self._session.stop()
        self._helping = self._session = None


def release_directories(memory: Path, writer: Writer) -> None:
    """Release the checkpoint directories that workers have claimed.

    Args:
        memory: the directory of the agent's snapshots. A worker leaves a file there that names the
            directory or URL that it has claimed.
        writer: a writer of the launch.
    """
    paths = {path.name: path for path in memory.glob(f"[0-9]*/{CLAIMED_PREFIX}*")}
    for path in paths.values():
        try:
            with open_regular_file(path) as handle:
                location = os.fsdecode(os.read(handle, MAX_LOCATION_BYTES))
            if os.path.isabs(location) or "://" in location:
                catalog = CheckpointCatalog(open_storage(location))
                if catalog.known_fence() is not None:
                    Committer(catalog, writer, (), None).release()
        except (ElasticError, OSError, ValueError) as error:
            log.warning("a checkpoint directory was not released at the end of the job: %s", error)


def own_address(info: RendezvousInfo) -> str:
    """Return the local address that this node uses to connect to the generation's first node.

    On the first node, it is the address that the others connect to. This may block, if that is a
    name.

    Raises:
        OSError: The name does not resolve, or there is no route to it.
    """
    first = info.bootstrap_store_info
    addresses = socket.getaddrinfo(
        first.master_addr, first.master_port or 9, type=socket.SOCK_DGRAM
    )
    family, kind, _, _, target = addresses[0]
    if info.rank == 0:
        return str(target[0])
    with socket.socket(family, kind) as probe:
        # Connecting a datagram socket chooses a route and sends nothing.
        probe.connect(target)
        return str(probe.getsockname()[0])


def _is_literal(host: str) -> bool:
    """Return True if a host is given by its address, so that no name server is asked for it."""
    with contextlib.suppress(socket.gaierror):
        return bool(socket.getaddrinfo(host, 0, flags=socket.AI_NUMERICHOST))
    return False
