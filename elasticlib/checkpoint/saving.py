"""One save: who writes it, behind the training step, and what became of it, asked on any rank.

A state that is the same on all ranks is written by one of them, a sharded one by all, each its
part. Both go the same way: the first writer claims the folder, each writes its file, the first
commits them. If one of them fails, none counts, and all of them know.

Ranks that write nothing hear of it by the store that the process group met in. Nobody waits in a
collective for that, as only some ranks may ask.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import secrets
import socket
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import attrs
import torch
import torch.distributed as dist

from ..clock import monotonic
from ..errors import CheckpointError
from .commit import Committer, Writer, data_name
from .folder import CheckpointFolder
from .manifest import DataFile
from .pack import Layout, fill
from .peers import Peers, raise_any, tried
from .summing import new_memory

log = logging.getLogger("elasticlib.checkpoint")

WAIT_SECONDS = 1800.0
"""For which a rank waits to hear of a save that another one makes: as long as torch's groups."""

STORE_SECONDS, FOLDER_SECONDS = 0.02, 0.1
"""Between two looks for what became of another rank's save."""

REMEMBERED = 1000
"""Of so many saves the store still tells how they came out."""

_saves: Counter[str] = Counter()
"""How many saves have begun, by the names under which the store tells of them. Not each manager's
own: another one of the same folder goes on counting."""


# -- who writes -----------------------------------------------------------------------------------


@attrs.frozen
class RankInfo:
    """A process among those that share the state, on a host of this name, as one that writes."""

    rank: int
    local_rank: int
    world_size: int
    host: str
    writer: Writer

    @classmethod
    def of_this_process(cls, group: dist.ProcessGroup | None) -> RankInfo:
        """By the process group where there is one, else by what the launcher put in the
        environment. Under another launcher, or none, each process is a launch of its own.

        Args:
            group: the ranks that share the state; all of the default group by default.
        """
        environment, host, token = os.environ, socket.gethostname(), secrets.token_hex(8)
        grouped = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank(group) if grouped else int(environment.get("RANK", "0"))
        local_rank = environment.get("ELASTICLIB_LOCAL_RANK", environment.get("LOCAL_RANK", rank))
        world = dist.get_world_size(group) if grouped else int(environment.get("WORLD_SIZE", "1"))
        writer = Writer(
            run=environment.get("TORCHELASTIC_RUN_ID", ""),
            launch=environment.get("ELASTICLIB_INCARNATION", "") or token,
            generation=int(environment.get("ELASTICLIB_GENERATION", "0")),
            token=token,
            label=f"process {os.getpid()} on {host}",
        )
        return cls(rank, int(local_rank), world, host, writer)


class Writers:
    """The ranks that write a save together: this one alone, or all of a process group.

    Those of a group make one at the same time, and call `write` in the same order.

    Args:
        group: of gloo and theirs alone, so that what goes on behind a training step never mixes
            with the step's collectives. Only sentences are exchanged.
    """

    def __init__(self, commits: Committer, group: dist.ProcessGroup | None = None) -> None:
        self._commits, self._peers, self._count = commits, Peers(group), 0
        self.rank = self._peers.rank
        self._kind = "state" if group is None else f"part-{self.rank:05d}"
        # The files of all ranks bear the name of the writer that will commit them.
        self._token: str = self._peers.words({"token": commits.writer.token})[0]["token"]

    def write(
        self,
        step: int,
        data: memoryview,
        metrics: Mapping[str, float] = MappingProxyType({}),
        world_size: int = 0,
    ) -> None:
        """Write this rank's file, and commit those of all.

        Args:
            data: this rank's pack.
            metrics, world_size: what the manifest says beside it.

        Raises:
            CheckpointError: on all ranks; one of them failed.
        """
        self._count += 1
        commits, first = self._commits, self.rank == 0
        name = data_name(self._kind, self._token, self._count)
        self._all_do(step, commits.claim if first else None)
        try:
            files = self._all_do(step, partial(commits.write, step, name, data))
            parts = 0 if self._peers.group is None else len(files)
            commit = partial(commits.commit, step, files, parts, metrics=metrics, world=world_size)
            self._all_do(step, commit if first else None)
        except BaseException:
            commits.abandon(step, name)
            raise

    def close(self) -> None:
        """Give the group back, if the process group is still there."""
        if self._peers.group is not None and dist.is_initialized():
            dist.destroy_process_group(self._peers.group)

    def _all_do(self, step: int, act: Callable[[], DataFile | None] | None) -> tuple[DataFile, ...]:
        """Do this rank's part of something; the files of all ranks, if all could do theirs."""
        file, error = tried(act) if act else (None, None)
        try:
            words = self._peers.words({"file": attrs.astuple(file) if file else None}, error)
        except RuntimeError as lost:
            raise CheckpointError(
                f"step {step} was not saved: another rank is gone: {lost}"
            ) from error
        if error is not None:
            raise error
        raise_any(words, None, f"could not save step {step}")
        return tuple(DataFile(*word["file"]) for word in words if word["file"])


class HostBuffer:
    """Host memory for one state, reused from save to save; not to be copied into while it is read.

    Where tensors lie on a GPU it is page-locked, so that copies run at the bus's full speed.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self._locked = False

    def take(self, layout: Layout) -> memoryview:
        """Copy a state here, and wait until it is; its bytes."""
        if self._memory is None or len(self._memory) < layout.size:
            self.close()
            self._memory = new_memory(layout.size)
            self._tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        if not self._locked and any(tensor.is_cuda for tensor in layout.tensors):
            # Where the machine allows no more locked memory, copies are slower, and no less right.
            answer = _cuda().cudaHostRegister(self._tensor.data_ptr(), self._tensor.numel(), 0)
            self._locked = int(answer) == 0
        fill(layout, self._tensor)
        return memoryview(self._memory)[: layout.size]

    def close(self) -> None:
        """Give the memory back."""
        if self._locked:
            _cuda().cudaHostUnregister(self._tensor.data_ptr())
        self._locked = False
        self._memory = None
        self._tensor = torch.empty(0, dtype=torch.uint8)


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


# -- what became of it ----------------------------------------------------------------------------


class Save:
    """A save that has begun, as the rank that asked for it sees it; what
    `CheckpointManager.save` returns.

    step: after which the state was taken. looked_at: whether somebody has been told of its failure.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.looked_at = False
        self._failure: BaseException | None = None
        self._process = os.getpid()

    def __repr__(self) -> str:
        if self._process != os.getpid() or not self.done():
            return f"<Save of step {self.step}: under way>"
        said = f"failed: {self._failure}" if self._failure else "durable"
        return f"<Save of step {self.step}: {said}>"

    def done(self) -> bool:
        """Whether it is over: durable, or failed. Never waits."""
        return not self._unknown_after(0.0)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the state is durable, whichever rank writes it. Not all need to call it.

        Args:
            timeout: seconds; by default as long as it takes where this rank writes, and half an
                hour to hear of what another one writes.

        Raises:
            CheckpointError: it was not saved, and why; or that is not known by then: it may be
                waited for again.
        """
        if unknown := self._unknown_after(timeout):
            raise CheckpointError(unknown)
        self.looked_at = True
        if self._failure is not None:
            raise self._failure

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None if it is durable, or not over yet. Who has seen it here is not told
        again by the manager's next call."""
        failure = self._failure if self.done() else None
        self.looked_at = self.looked_at or failure is not None
        return failure

    def _unknown_after(self, timeout: float | None) -> str:
        """Wait until it is known how it came out; if it is not by then, a sentence that says so."""
        raise NotImplementedError


class OwnSave(Save):
    """One that this process writes, in a thread. A process that ends waits for it, as the thread
    is no daemon; a fork of the process has nothing to do with it."""

    def __init__(self, step: int, write: Callable[[], None]) -> None:
        super().__init__(step)
        self._thread = threading.Thread(target=self._run, args=(write,), name="elasticlib-save")
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._failure = error

    def settle(self) -> None:
        """Wait until it is over; a failure is kept."""
        if self._process == os.getpid():
            self._thread.join()

    def _unknown_after(self, timeout: float | None) -> str:
        if self._process != os.getpid():
            raise CheckpointError(
                f"step {self.step} is saved by the process that this one was forked from, which "
                "alone can say what became of it"
            )
        self._thread.join(timeout)
        return f"step {self.step} is still being written" if self._thread.is_alive() else ""


class OthersSave(Save):
    """One that another rank writes: the ranks' store tells of it; without one, the folder does."""

    def __init__(
        self, step: int, number: int, outcomes: Outcomes, folder: CheckpointFolder
    ) -> None:
        super().__init__(step)
        self._number, self._outcomes, self._folder = number, outcomes, folder
        self._over = False
        outcomes.newest = step

    def _unknown_after(self, timeout: float | None) -> str:
        outcomes, step, pause = self._outcomes, self.step, threading.Event()
        deadline = monotonic() + (WAIT_SECONDS if timeout is None else timeout)
        # Asked again and again: who waits in the store keeps it from this process's other threads.
        while not (self._over or self._ask()):
            if monotonic() < deadline:
                pause.wait(STORE_SECONDS if outcomes.reachable else FOLDER_SECONDS)
            elif outcomes.reachable:
                return (
                    f"nothing was heard of the save of step {step}, which rank {outcomes.writer} "
                    "makes: it has died, is still at it, or was not asked to save"
                )
            else:
                return f"there is no {self._folder.describe(step)}, which another rank was to save"
        self._over = True
        return ""

    def _ask(self) -> bool:
        """Whether it is over, and keep why it failed."""
        outcomes, step = self._outcomes, self.step
        if not outcomes.reachable:
            # Older ones may have made room for the newest, which began when they were over.
            looked = map(self._folder.look, {step, outcomes.newest})
            return any(found is not None and found.manifest for found in looked)
        said = outcomes.heard(self._number)
        if said is not None and said["step"] != step:
            self._failure = CheckpointError(
                f"rank {outcomes.writer} was asked to save step {said['step']}, and this rank step "
                f"{step}: all ranks have to make the same calls"
            )
        elif said is not None and said["error"]:
            self._failure = CheckpointError(
                f"step {step} was not saved by rank {outcomes.writer}: {said['error']}"
            )
        return said is not None


class Outcomes:
    """How the saves of one manager's writer came out, told by the store that the ranks met in.

    Each save has a number, which is the same on all ranks, as all make the same calls.

    Args:
        name, writer: the folder, and the rank that writes: the same on all ranks.
        mine: whether that is this one, which tells the others.

    Attributes:
        reachable: whether there is such a store, as far as is known by now.
        newest: the step of the last save that another rank was to make.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, name: str, writer: int, *, mine: bool
    ) -> None:
        ranks = None if group is None else dist.get_process_group_ranks(group)
        named = zlib.crc32(f"{name}\0{ranks}\0{writer}".encode())
        self._prefix = f"elasticlib/saves/{named:08x}"
        self.writer, self.newest, self._mine = writer, 0, mine
        self.reachable = dist.is_available() and dist.is_initialized()
        # torch has no public name for the store that a process group met in.
        self._store: Any = dist.distributed_c10d._get_default_store() if self.reachable else None

    def begin(self) -> int:
        """The number of a save that begins here, or on the rank that writes."""
        _saves[self._prefix] += 1
        return _saves[self._prefix]

    def tell(self, number: int, step: int, error: BaseException | None = None) -> None:
        """Say how a save came out, if this rank is the one to say it."""
        if not (self.reachable and self._mine):
            return
        why = "" if error is None else str(error)[:4000]
        try:
            self._store.set(self._key(number), json.dumps({"step": step, "error": why}))
            if number > REMEMBERED:
                self._store.delete_key(self._key(number - REMEMBERED))
        except (RuntimeError, NotImplementedError) as lost:
            log.info("the other ranks are not told that step %d was saved: %s", step, lost)

    def heard(self, number: int) -> dict[str, Any] | None:
        """What the writer has said of a save; None if nothing yet."""
        try:
            if not self._store.check([self._key(number)]):
                return None
            said: dict[str, Any] = json.loads(self._store.get(self._key(number)))
        except RuntimeError as lost:
            # Its host may have ended once it had saved.
            log.info("the ranks' store does not say how save %d came out: %s", number, lost)
            self.reachable = False
            return None
        return said

    def _key(self, number: int) -> str:
        return f"{self._prefix}/{number}"
