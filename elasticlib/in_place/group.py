"""The default process group of a worker that may be in many, one after another.

torch (2.14 and later) can give a process group other members, if all of them pass the same number
and the same list of handles. Who they are is what an agent says: a place is a worker's rank among
so many, and where they meet. Between two groups a worker is a group of one.

A collective whose peer has died ends at once; one whose peer is alive and does something else does
not end by any call of torch's. Its sockets end it: a thread shuts down those that the group opened
once the agent says that the group is over, and no more bytes go through them: gloo forgets whoever
waits for a message that a closed connection has cut in two.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..clock import duration, monotonic
from ..errors import ElasticError
from ..threads import helper
from ..workers.context import context

LOOK_SECONDS = 0.004
"""Between two looks whether the group is over."""
CALM_SECONDS = 0.002
"""Between two looks whether bytes go through the sockets of a group that is over."""
BUSY_SECONDS = 0.1
"""For which they may: its members leave it one by one, and then all wait for one another."""
POLL_SECONDS, IDLE_SECONDS = 0.001, 0.01
"""Between two looks for what comes soon, and for what has not come within a second."""
FORM_SECONDS = 30.0
"""In which all have said that they are there."""
CONNECT_SECONDS = 5.0
"""In which they are connected then. Nothing ends this wait sooner, also not the word that the group
is over as one of them was lost meanwhile: so it is less than an agent gives them to leave."""
GROUPS = 1 << 16
"""More than a script makes in one generation."""
REACH_SECONDS = 2.0
"""Of one attempt to reach the store of a group."""
TCP_INFO_ACKED, TCP_INFO_BYTES = 120, 136
"""Where Linux has bytes_acked in `tcp_info`, with bytes_received behind it; and what holds both."""
RECONFIGURABLE = frozenset({"gloo", "nccl2"})

_c10d: Any = dist  # much of it is newer than the oldest torch that there may be


class GroupOver(ElasticError):
    """The group that this worker waited for will not be: another one will."""


def init_process_group(backend: str | None = None, **options: Any) -> None:
    """As `torch.distributed.init_process_group`, for a worker that can go on in other groups.

    It does so where torch is 2.14 or later, the backend is gloo or nccl2, and an agent of ours
    started this process; else it is torch's. A worker that joins a job under way is a group of one
    until `elasticlib.steps` has its turn: its start-up talks to nobody.

    Args:
        backend: gloo, nccl2, or both as torch names them ("cpu:gloo,cuda:nccl2").
        options: torch's, such as `timeout`; not store, rank and world_size.
    """
    if not _can_be_formed_anew(backend):
        dist.init_process_group(backend, **options)
        return
    global _group
    _group = Group(backend, options)
    if _group.take_place() and not any(word["ready"] for word in _group.meet({"ready": False})):
        # Those that are in their loops by now do not take part in what a start-up may ask of all.
        _group.connect()


def _can_be_formed_anew(backend: str | None) -> bool:
    kinds = {part.rpartition(":")[2] for part in (backend or "").split(",")}
    return hasattr(dist, "_reconfigure") and kinds <= RECONFIGURABLE and context().attached


class _Store(_c10d.Store):  # type: ignore[misc]
    """What torch keeps for as long as the process group is: leads to where its members meet now.

    `wait` ends early once there is no use in waiting.
    """

    def __init__(self) -> None:
        super().__init__()
        self.target: Any = _c10d.HashStore()
        self.timeout_seconds = 1800.0

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        seconds = self.timeout_seconds if timeout is None else timeout.total_seconds()
        began, pause = monotonic(), threading.Event()
        while not self.target.check([*keys]):
            if context().must_leave:
                raise GroupOver(f"nobody waits for {keys} any more")
            waited = monotonic() - began
            if waited > seconds:
                raise TimeoutError(f"{', '.join(keys)} did not come within {seconds:g} s")
            pause.wait(POLL_SECONDS if waited < 1 else IDLE_SECONDS)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self.target.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]


def _lead(name: str) -> None:
    def call(self: _Store, *args: Any) -> Any:
        return getattr(self.target, name)(*args)

    setattr(_Store, name, call)


for _name in ("set", "add", "check", "compare_set", "delete_key", "num_keys", "append"):
    _lead(_name)
for _name in ("multi_set", "set_timeout", "has_extended_api"):
    _lead(_name)


class Group:
    """The default process group, and who is in it.

    words: what each member said when the present group met, by rank; empty in a group of one.
    connected: whether it can be used.
    """

    def __init__(self, backend: str | None, options: dict[str, Any]) -> None:
        self.words: list[dict[str, Any]] = []
        self.connected = False
        self._store = _Store()
        self._lock = threading.Lock()
        self._before: frozenset[int] = frozenset()
        self._opened: frozenset[int] | None = frozenset()
        given = dict(options, store=self._store, rank=0, world_size=1, enable_reconfigure=True)
        dist.init_process_group(backend, **given)
        if "timeout" in options:
            self._store.timeout_seconds = options["timeout"].total_seconds()
        on_gpu = "nccl" in dist.get_backend_config()
        group = _c10d.distributed_c10d._get_default_group()
        self._gpu = group._get_backend(torch.device("cuda")) if on_gpu else None
        _forget_plans()  # what it imports keeps no other member waiting then
        # Before that all have the same handle.
        self._reconfigure(secrets.randbits(62), [self._handle()])

    # -- from group to group ----------------------------------------------------------------------

    def take_place(self) -> bool:
        """Whether the agent has given a place, which is taken then: the environment says which."""
        with self._lock:
            variables = context().take_place()
            if variables is not None:
                self._opened, self.words, self.connected = frozenset(), [], False
                os.environ.update(variables)
        return variables is not None

    def leave(self) -> None:
        """Be in no group, and wait for a place in the next one."""
        context().leave_group()
        began, pause = monotonic(), threading.Event()
        while not self.take_place():
            # An agent that dies takes its workers with it.
            pause.wait(POLL_SECONDS if monotonic() - began < 1 else IDLE_SECONDS)

    def meet(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Say something to those with a place in this group, and hear what each says, by rank."""
        store = self._reach_store()
        self._store.target = _c10d.PrefixStore(f"elasticlib/{self._generation}", store)
        node = f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '0')}"
        said = self._all_say("word", json.dumps({**mine, "node": node}))
        self.words = [json.loads(text) for text in said]
        return self.words

    def _reach_store(self) -> Any:
        """Where the members of this group meet. Its host may be what is lost."""
        serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        deadline = monotonic() + FORM_SECONDS
        while True:
            try:
                store = _c10d.TCPStore(
                    host,
                    port,
                    is_master=serves and self._rank == 0,
                    timeout=duration(REACH_SECONDS),
                    wait_for_workers=False,
                    multi_tenant=serves,
                )
            except RuntimeError:
                if context().must_leave or monotonic() > deadline:
                    raise
            else:
                store.set_timeout(duration(FORM_SECONDS))
                return store

    def connect(self) -> None:
        """Become a process group of those that have met; they all call this."""
        handles = self._all_say("handle", self._handle())
        with self._lock:
            self._before, self._opened = frozenset(_sockets()), None
        self._reconfigure(self._number, handles)
        # Not every connection is made before it is used.
        dist.barrier()
        with self._lock:
            self._opened = frozenset(_sockets()) - self._before
        # The ranks of the default group, which torch notes once, as device meshes read them.
        world = _c10d.distributed_c10d._world
        world.pg_group_ranks[dist.group.WORLD] = {at: at for at in range(self._world_size)}
        _forget_plans()
        # Groups that all make from now on have names by this count, which differs by history.
        world.group_count = int(self._generation) * GROUPS
        self.connected = True

    def close(self) -> None:
        """This worker's loop of steps is over: its group stays as it is."""
        global _group
        context().can_keep(False)
        _group = None

    def _all_say(self, what: str, mine: str) -> list[str]:
        self._store.set(f"{what}/{self._rank}", mine)
        return [self._store.get(f"{what}/{rank}").decode() for rank in range(self._world_size)]

    @property
    def _rank(self) -> int:
        return int(os.environ["RANK"])

    @property
    def _world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    @property
    def _generation(self) -> str:
        return os.environ.get("ELASTICLIB_GENERATION", "0")

    @property
    def _number(self) -> int:
        """That no other group has, and all members of this one."""
        launch = os.environ.get("ELASTICLIB_INCARNATION", "")
        text = f"{launch}/{self._generation}/{os.environ['MASTER_PORT']}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2

    def _handle(self) -> str:
        return str(_c10d._get_reconfigure_handle())

    def _reconfigure(self, number: int, handles: Sequence[str]) -> None:
        timeout = duration(CONNECT_SECONDS)
        _c10d._reconfigure(uuid=number, handles=[*handles], timeout=timeout).wait()

    # -- what ends its collectives ----------------------------------------------------------------

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While this lasts, collectives end soon after the agent has said that the group is over,
        with an error, whatever their peers do."""
        stop = threading.Event()
        thread = helper(partial(self._watch, stop), "elasticlib-group")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _watch(self, stop: threading.Event) -> None:
        since, before = 0.0, None
        while not stop.wait(LOOK_SECONDS if before is None else CALM_SECONDS):
            # A place is taken behind the same lock: what is cut is of the group that is over.
            with self._lock:
                if not context().must_leave:
                    before = None
                    continue
                since, passed = monotonic() if before is None else since, self._passed()
                if passed == before or monotonic() - since > BUSY_SECONDS:
                    self._cut()
                before = passed

    def _passed(self) -> dict[int, tuple[int, ...]]:
        """How many bytes have gone through each socket of the group, either way."""
        return {inode: _bytes(at, inode) for inode, at in self._own().items()}

    def _own(self) -> dict[int, int]:
        found, opened = _sockets(), self._opened
        inodes = found.keys() - self._before if opened is None else found.keys() & opened
        return {inode: found[inode] for inode in inodes}

    def _cut(self) -> None:
        for inode, descriptor in self._own().items():
            _shut(descriptor, inode)
        if self._gpu is not None:
            with contextlib.suppress(RuntimeError):
                self._gpu.abort()


_group: Group | None = None


def this_group() -> Group | None:
    """What `init_process_group` has made; None if it is torch's own, which is formed once."""
    return _group


def _forget_plans() -> None:
    """What DTensors have planned for this rank among so many, when it was another one."""
    if "torch.distributed.tensor" in sys.modules:
        debug = importlib.import_module("torch.distributed.tensor.debug")
        debug._clear_sharding_prop_cache()
        redistribute = importlib.import_module("torch.distributed.tensor._redistribute")
        redistribute._gen_transform_infos.cache_clear()


def _sockets() -> dict[int, int]:
    """The file descriptors of this process's sockets, by inode, which no two ever share."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        inode = _inode(int(name))
        if inode is not None:
            found[inode] = int(name)
    return found


def _inode(descriptor: int) -> int | None:
    try:
        what = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return None
    return int(what[8:-1]) if what.startswith("socket:[") else None


@contextlib.contextmanager
def _connection(descriptor: int, inode: int) -> Iterator[socket.socket | None]:
    """The socket, unless it listens. The descriptor may be another file's by now."""
    own = os.dup(descriptor)
    if _inode(own) != inode:
        os.close(own)
        yield None
        return
    with socket.socket(fileno=own) as found:
        yield None if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) else found


def _shut(descriptor: int, inode: int) -> None:
    with contextlib.suppress(OSError), _connection(descriptor, inode) as connection:
        if connection is not None:
            connection.shutdown(socket.SHUT_RDWR)


def _bytes(descriptor: int, inode: int) -> tuple[int, ...]:
    """Those of a TCP connection that have been acknowledged, and that have come."""
    with contextlib.suppress(OSError, struct.error), _connection(descriptor, inode) as connection:
        if connection is not None:
            found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
            return struct.unpack_from("=QQ", found, TCP_INFO_ACKED)
    return ()
