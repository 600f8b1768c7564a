"""The default process group of a worker that outlives its generations.

The agent assigns each generation's rank, world size and store address to the worker. The worker
leaves its group when the agent stops the generation, waits for its next assignment, exchanges its
status with the other members and connects to them. Between two groups it is the only member of its
group. `group_backend` replaces the members in torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import torch.distributed as dist

from ..clock import monotonic, to_timedelta
from ..errors import ElasticError
from ..threads import daemon_thread
from ..workers.context import context
from .group_backend import GroupBackend, GroupMembership, find_backend
from .takeover import MemberStatus

WATCH_INTERVAL_S = 0.004  # between two checks whether the agent has stopped the generation
ABORT_INTERVAL_S = 0.002  # between two calls of GroupBackend.abort once it has
POLL_INTERVAL_S = 0.001  # while a worker waits for its agent or for a key of the store
IDLE_POLL_INTERVAL_S = 0.01  # the same after the first second of a wait
EXCHANGE_TIMEOUT_S = 30.0  # limit for all members to report their status
STORE_CONNECT_TIMEOUT_S = 2.0  # of one attempt to connect to the store of a generation
DEFAULT_STORE_TIMEOUT_S = 1800.0  # torch's default timeout of a process group

_c10d: Any = dist


class GroupEndedError(ElasticError):
    """The agent has stopped the generation whose members this worker was waiting for."""


def init_process_group(backend: str | None = None, **options: Any) -> None:
    """Create the default process group so that its members can be replaced while workers run.

    Use it instead of `torch.distributed.init_process_group` in a script that uses
    `elasticlib.steps`. It calls torch's function, and the members cannot be replaced, if torch is
    older than 2.14, if the backend is neither gloo nor nccl2, or if no elasticlib agent started
    this process.

    A worker that joins a running job is the only member of its group until its first step. So the
    script's start-up code must not communicate with other ranks.

    Args:
        backend: "gloo", "nccl2", or both in torch's form ("cpu:gloo,cuda:nccl2").
        options: further arguments of torch's function, such as `timeout`, but not `store`, `rank`
            or `world_size`, which the agent assigns.

    Raises:
        GroupEndedError: a member was lost before all of them were connected.
    """
    backend_class = find_backend(backend) if context().is_attached else None
    if backend is None or backend_class is None:
        dist.init_process_group(backend, **options)
        return
    global _current_group
    store = GenerationStore()
    group = _current_group = RegroupableGroup(backend_class(backend, store, options), store)
    if "timeout" in options:
        store.timeout_s = options["timeout"].total_seconds()
    if group.accept_assignment():
        members = group.exchange_status(MemberStatus())
        # Members that are already in their step loop do not take part in collectives of start-up
        # code. So this worker connects to them only when it is in its own step loop.
        if not any(member.is_in_step_loop for member in members):
            group.connect()


class RegroupableGroup:
    """Membership of this worker in one process group after another.

    The main thread calls all methods. `abort_on_group_end` runs a thread that aborts collectives
    when the agent stops the generation.
    """

    def __init__(self, backend: GroupBackend, store: GenerationStore) -> None:
        # By rank; empty until the members have exchanged their status.
        self.members: list[MemberStatus] = []
        self.is_connected = False  # collectives of the present members are possible
        self._backend = backend
        self._store = store
        # Excludes the abort of a group while a new assignment is accepted.
        self._lock = threading.Lock()

    def accept_assignment(self) -> bool:
        """Accept this worker's rank in the next generation if the agent has assigned one.

        The environment variables (`RANK`, `WORLD_SIZE`, `MASTER_ADDR` and others) are updated.

        Returns:
            True if there was an assignment.
        """
        with self._lock:
            variables = context().accept_assignment()
            if variables is not None:
                self.members, self.is_connected = [], False
                os.environ.update(variables)
        return variables is not None

    def leave_and_wait(self) -> None:
        """Leave the group, and block until the agent has assigned a rank in the next generation.

        The wait has no timeout, because this process ends with its agent.
        """
        context().report_left_group()
        started, pause = monotonic(), threading.Event()
        while not self.accept_assignment():
            is_first_second = monotonic() - started < 1
            pause.wait(POLL_INTERVAL_S if is_first_second else IDLE_POLL_INTERVAL_S)

    def exchange_status(self, status: MemberStatus) -> list[MemberStatus]:
        """Report the status of this worker to all members of the new generation.

        Every member must call this. Blocks for at most EXCHANGE_TIMEOUT_S.

        Returns:
            The status of each rank, in rank order, which `members` contains from now on.

        Raises:
            GroupEndedError: the agent has stopped the generation.
            RuntimeError: the store of the generation cannot be reached.
        """
        store = _connect_to_store()
        self._store.target = _c10d.PrefixStore(f"elasticlib/{_generation()}", store)
        node = f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '0')}"
        fields = attrs.asdict(attrs.evolve(status, node=node))
        reports = self._membership().all_gather("status", json.dumps(fields))
        self.members = [MemberStatus(**json.loads(report)) for report in reports]
        return self.members

    def connect(self) -> None:
        """Connect the process group of all members that have exchanged their status.

        Every member must call this.

        Raises:
            RuntimeError: a member was lost, or was not connected within CONNECT_TIMEOUT_S.
        """
        self._backend.reconfigure(self._membership())
        self.is_connected = True

    def close(self) -> None:
        """Stop replacing members. The process group stays as it is."""
        global _current_group
        context().set_can_regroup(False)
        _current_group = None

    @contextlib.contextmanager
    def abort_on_group_end(self) -> Iterator[None]:
        """Within this block, collectives fail soon after the agent stops the generation."""
        stop = threading.Event()
        # Without the thread, a collective could wait for ever for a member that is gone.
        thread = daemon_thread(
            partial(self._abort_until, stop),
            "elasticlib-group",
            lambda _: self._backend.abort(),
        )
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _abort_until(self, stop: threading.Event) -> None:
        """Abort collectives while this worker has to leave its group, until `stop` is set."""
        should_leave_group = False
        while not stop.wait(ABORT_INTERVAL_S if should_leave_group else WATCH_INTERVAL_S):
            with self._lock:
                should_leave_group = context().should_leave_group()
                if should_leave_group:
                    self._backend.abort()

    def _membership(self) -> GroupMembership:
        incarnation = os.environ.get("ELASTICLIB_INCARNATION", "")
        identity = f"{incarnation}/{_generation()}/{os.environ['MASTER_PORT']}"
        digest = hashlib.blake2b(identity.encode(), digest_size=8).digest()
        return GroupMembership(
            generation=_generation(),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            uuid=int.from_bytes(digest, "big") >> 2,
            store=self._store,
        )


_current_group: RegroupableGroup | None = None


def current_group() -> RegroupableGroup | None:
    """Return the group that `init_process_group` created, or None if its members are fixed."""
    return _current_group


def _generation() -> int:
    return int(os.environ.get("ELASTICLIB_GENERATION", "0"))


def _connect_to_store() -> Any:
    """Connect to the store of the generation. Retry for EXCHANGE_TIMEOUT_S.

    Raises:
        RuntimeError: all tries failed, or the agent has stopped the generation. The store may have
            been on the node that was lost.
    """
    # Without a store of the agent, rank 0 serves it.
    is_served_by_rank_0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    deadline = monotonic() + EXCHANGE_TIMEOUT_S
    while True:
        try:
            store = _c10d.TCPStore(
                host,
                port,
                is_master=is_served_by_rank_0 and os.environ["RANK"] == "0",
                timeout=to_timedelta(STORE_CONNECT_TIMEOUT_S),
                wait_for_workers=False,
                multi_tenant=is_served_by_rank_0,
            )
        except RuntimeError:
            if context().should_leave_group() or monotonic() > deadline:
                raise
        else:
            store.set_timeout(to_timedelta(EXCHANGE_TIMEOUT_S))
            return store


class GenerationStore(_c10d.Store):  # type: ignore[misc]
    """The store of the current generation.

    torch keeps the store of a process group for the lifetime of the group. This one forwards every
    call to `target`, which each generation replaces.
    """

    def __init__(self) -> None:
        super().__init__()
        self.target: Any = _c10d.HashStore()
        self.timeout_s = DEFAULT_STORE_TIMEOUT_S  # of `wait` and `get`

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        """Block until all keys exist.

        Raises:
            GroupEndedError: the agent has stopped the generation.
            TimeoutError: a key is missing after `timeout`, a `timedelta`; by default `timeout_s`.
        """
        timeout_s = self.timeout_s if timeout is None else timeout.total_seconds()
        started, pause = monotonic(), threading.Event()
        while not self.target.check([*keys]):
            if context().should_leave_group():
                raise GroupEndedError(
                    f"the agent stopped the generation while this worker waited for {keys}"
                )
            waited_s = monotonic() - started
            if waited_s > timeout_s:
                raise TimeoutError(f"no member has set {', '.join(keys)} within {timeout_s:g} s")
            pause.wait(POLL_INTERVAL_S if waited_s < 1 else IDLE_POLL_INTERVAL_S)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self.target.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return [bytes(value) for value in self.target.multi_get([*keys])]


def _forwarder(name: str) -> Callable[..., Any]:
    """Return a method of GenerationStore that calls the method `name` of its target."""

    def call(self: GenerationStore, *args: Any) -> Any:
        return getattr(self.target, name)(*args)

    return call


for _name in ("set", "add", "check", "compare_set", "delete_key", "num_keys", "append"):
    setattr(GenerationStore, _name, _forwarder(_name))
for _name in ("multi_set", "set_timeout", "has_extended_api"):
    setattr(GenerationStore, _name, _forwarder(_name))
