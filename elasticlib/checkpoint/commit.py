"""Writing checkpoints into a folder: data first, the manifest last, by one writer at a time.

The folder says who has it, in its fence. A later generation of a launch takes it from an earlier
one, and a new launch from the one before; whom it was taken from cannot commit any more, nor take
it back. The data of each save have names of their own, so nothing that counts is ever overwritten.
What nobody needs any more is deleted manifest first: a checkpoint is there whole, or not at all.

Of a state that is the same on all ranks one rank writes, of a sharded one all, each its part. Both
go the same way: the first writer claims the folder, each writes its file, the first commits them.
If one of them fails, none counts, and all of them know. Ranks that write nothing hear of it by the
store that the process group met in: nobody waits in a collective for that, as only some may ask.

Agents commit what their workers left in memory, so nothing here needs torch.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import json
import logging
import os
import re
import threading
import zlib
from collections.abc import Callable, Container, Iterator, Mapping
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import attrs

from ..clock import monotonic, wall
from ..errors import CheckpointCorrupt, CheckpointError, CheckpointRefused
from ..foreign import read_fields, read_object
from ..threads import CallRejected, ExclusiveCall, Latch
from .folder import (
    MANIFEST,
    CheckpointFolder,
    DataFile,
    Health,
    Manifest,
    Retention,
    Selection,
    body_of,
    encode_manifest,
    flaw_by_sizes,
    folder_of,
    select,
    step_of,
    summed,
)
from .place import NotAFile, checksum_beside, target_of

if TYPE_CHECKING:
    from .collectives import PeerGroup

log = logging.getLogger("elasticlib.checkpoint")

FENCE = "fence.json"
_FORMAT = 1
_LOST_KEPT = 64
"""So many launches that lost the folder are refused by name; it is small, and they are few."""

_DATA = re.compile(r"(?:state|part-[0-9]+)\.([0-9a-f]{16})\.[0-9]+\.pack")
_NO_WRITES = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}

WAIT_SECONDS = 1800.0
"""For which a rank waits to hear of a save that another one makes: as long as torch's groups."""

STORE_SECONDS, FOLDER_SECONDS = 0.02, 0.1
"""Between two looks for what became of another rank's save."""

REMEMBERED = 1000
"""Of so many saves the store still tells how they came out."""

RECHECK_S = 1.0  # how often a wait for a save checks that its writer has not been interrupted

_save_numbers: dict[str, Iterator[int]] = {}
"""The numbers of the saves that follow, by the names under which the store tells of them. Not each
manager's own: another one of the same folder goes on counting."""


# -- who may write: pure ---------------------------------------------------------------------------


@attrs.frozen
class Writer:
    """Who writes.

    run: the job's id. launch: tells apart two starts of one job, whose generations both count
    from 1. token: 16 hex digits, of one manager in one process. label: for people: which process.
    """

    run: str
    launch: str
    generation: int
    token: str
    label: str = ""

    def __str__(self) -> str:
        job = f"generation {self.generation} of run {self.run!r}" if self.run else "a process"
        return f"{job} ({self.label})" if self.label else job

    @property
    def start(self) -> str:
        """The launch, as one that another run may not have."""
        return f"{self.run}/{self.launch}"


@attrs.frozen
class Fence:
    """Who has the folder, and which launches had it before."""

    holder: Writer
    lost: tuple[str, ...] = ()


def claim_fence(fence: Fence | None, writer: Writer, *, beside: bool = False) -> Fence | str:
    """Give the folder to `writer`, unless somebody newer has it: the fence then, or why not.

    Args:
        beside: whether it is not taken from another of the same generation, who may be at work.
    """
    if fence is None:
        return Fence(writer)
    holder = fence.holder
    if writer.start != holder.start:
        if writer.start in fence.lost:
            return f"{holder} took this folder over from the launch of {writer}"
        return Fence(writer, (*fence.lost, holder.start)[-_LOST_KEPT:])
    if writer.generation < holder.generation:
        return f"{holder} writes here, and {writer} is older"
    if beside and writer.generation == holder.generation:
        return fence
    return Fence(writer, fence.lost)


def why_not(fence: Fence | None, writer: Writer, *, beside: bool = False) -> str:
    """Why `writer` must not commit; nothing if it may.

    Args:
        beside: whether it may while another of the same generation has the folder.
    """
    if fence is None:
        return f"{FENCE} is gone from it"
    holder = fence.holder
    if holder.token == writer.token:
        return ""
    if beside and (holder.start, holder.generation) == (writer.start, writer.generation):
        return ""
    return f"{holder} took the folder over from {writer}"


def encode_fence(fence: Fence) -> bytes:
    """One line of JSON, and one with its sum."""
    body = json.dumps({"format": _FORMAT, **attrs.asdict(fence)}).encode("ascii")
    return summed(body, b"")


def decode_fence(data: bytes) -> Fence:
    """The fence again. Raises CheckpointCorrupt."""
    body = body_of(data, b"")
    try:
        if body is None:
            raise ValueError("it was changed or cut short")
        fields = read_object(body)
        if fields.get("format") != _FORMAT:
            raise ValueError(f"format {fields.get('format')!r:.80}, this version reads {_FORMAT}")
        lost = fields.get("lost")
        if type(lost) is not list or not all(type(start) is str for start in lost):
            raise ValueError(f"lost is {lost!r:.80}, must be a list of names")
        return Fence(read_fields(Writer, fields.get("holder")), tuple(lost))
    except ValueError as error:
        raise CheckpointCorrupt(f"{FENCE} cannot be read: {error}") from error


def data_name(kind: str, token: str, number: int) -> str:
    """The name of a data file, `kind` being `state` or `part-<rank>`: no other writer's has it."""
    return f"{kind}.{token}.{number}.pack"


def leftovers(sizes: Mapping[str, int], named: Container[str], live: str) -> list[str]:
    """Which files in a step's folder nobody will ever need, while nobody else may commit.

    Args:
        sizes: bytes of each file there.
        named: those that its manifest names, and the manifest.
        live: the token of a writer that may be at work: its files are its own affair.
    """
    found = []
    for name in sorted(sizes):
        match = _DATA.fullmatch(name)
        if name not in named and (target_of(name) or (match and match[1] != live)):
            found.append(name)
    return found


# -- writing ---------------------------------------------------------------------------------------


class ClearedAway(CheckpointError):
    """A file was deleted before it counted, by a writer that may do so."""


class TakesNoWrites(CheckpointError):
    """The folder cannot be written: it is full, read-only, or this process lacks the permission."""


class Committer:
    """One writer's access to a folder. One call at a time.

    beside: whether another writer of the same generation may be at work, from which the folder is
    not taken: it commits what it has on its way, and clears up. It may clear away what is written
    beside it, too.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        writer: Writer,
        retention: Retention,
        *,
        beside: bool = False,
    ) -> None:
        self.writer = writer
        self.committed = float("-inf")
        """When the last one became durable, on this machine's monotonic clock."""
        self._folder, self._place = folder, folder.place
        self._retention, self._beside = retention, beside
        self._claimed = False
        self._warned: set[str] = set()

    def claim(self) -> None:
        """Take the folder, and clear away what crashes of others left; once is enough.

        Raises:
            CheckpointRefused: somebody newer has it. TakesNoWrites: see there. CheckpointError: the
                disk failed.
        """
        if self._claimed:
            return
        with self._at_work("could not be claimed"), self._place.locked():
            fence = self._fence(damaged_is_none=True)
            ours = claim_fence(fence, self.writer, beside=self._beside)
            if isinstance(ours, str):
                raise CheckpointRefused(f"{self._place.name} is not writable for this job: {ours}")
            if ours != fence:
                self._place.put(FENCE, encode_fence(ours))
                with self._or_it_stays():
                    self._sweep()
            self._claimed = True

    def write(self, step: int, name: str, data: memoryview) -> DataFile:
        """Write a file of a step's checkpoint, durably; it counts once a manifest names it.

        Raises:
            CheckpointError: the disk failed.
        """
        folder = folder_of(step)
        with self._at_work(f"could not be written to {folder}"):
            summed = checksum_beside(data, lambda: self._place.write(f"{folder}/{name}", data))
            return DataFile(name, len(data), summed)

    def commit(
        self,
        step: int,
        files: tuple[DataFile, ...],
        parts: int = 0,
        *,
        world: int = 0,
        pinned: bool = False,
    ) -> None:
        """Make them count, in place of what there was of this step; then delete what is too old.

        Args:
            parts, world, pinned: see `Manifest`.

        Raises:
            CheckpointRefused: somebody has taken the folder over. CheckpointError: the disk
                failed, or a file of it is gone.
        """
        writer, folder = self.writer, folder_of(step)
        manifest = Manifest(
            step=step,
            files=files,
            parts=parts,
            run=writer.run,
            launch=writer.launch,
            generation=writer.generation,
            writer=writer.token,
            saved_at=wall(),
            world=world,
            pinned=pinned,
        )
        with self._at_work(f"could not commit {folder}"), self._place.locked():
            reason = why_not(self._fence(), writer, beside=self._beside)
            if reason:
                what = f"step {step} was not committed to {self._place.name}"
                raise CheckpointRefused(f"{what}: {reason}")
            sizes = self._place.files(folder)
            flaw = flaw_by_sizes(manifest, sizes)
            if flaw:
                gone = any(file.name not in sizes for file in files)
                kind = ClearedAway if gone else CheckpointError
                raise kind(f"{self._place.name}/{folder} was not committed: {flaw}")
            self._place.put(f"{folder}/{MANIFEST}", encode_manifest(manifest))
            self.committed = monotonic()
            self._folder.know(manifest, Health.GOOD)
            if not self._beside:
                with self._or_it_stays():
                    self._sweep(self._select(just=step).deleted)

    def abandon(self, step: int, name: str) -> None:
        """Take away a file that was not committed after all, as far as the disk lets us."""
        folder = folder_of(step)
        try:
            # A commit may have failed once its manifest was in place: then it counts.
            named = self._folder.named(step)
            if named is not None and name not in named:
                self._place.remove(f"{folder}/{name}")
            # Another's first file may be about to be made in it.
            if not self._beside and not self._place.files(folder):
                self._place.remove_folder(folder)
        except OSError as error:
            log.warning("%s: a save that failed left files: %s", folder, error)

    def prune(self) -> Selection:
        """Delete what the retention rule does not keep, and what crashes left.

        The newest checkpoint that turns out whole is read for that, so that one stays.

        Raises:
            CheckpointRefused: somebody newer has the folder, or took it over. CheckpointError: the
                disk failed.
        """
        with self._at_work("could not be pruned"):
            with self._place.locked():
                self._live_beside()
            # Not under the lock, which a job that writes here waits for: it may take long.
            unread = self._folder.look_for_good()
            with self._place.locked():
                live = self._live_beside()
                selection = self._select(unread=unread)
                for error in self._sweep(selection.deleted, live):
                    raise error
        return selection

    def _live_beside(self) -> str:
        """The token of another writer, some of whose files may be on their way; none: "".

        Raises:
            CheckpointRefused: we may not clear up beside it.
        """
        writer, fence = self.writer, self._fence(damaged_is_none=True)
        others = fence is not None and fence.holder.token != writer.token
        # Who never had it may clear up beside its holder, unless that is a newer generation
        # of its own launch, or a newer launch.
        lost = why_not(fence, writer) if self._claimed and others else ""
        answer = lost or claim_fence(fence, writer)
        if isinstance(answer, str):
            raise CheckpointRefused(f"{self._place.name} was not pruned: {answer}")
        return fence.holder.token if fence is not None and others else ""

    def _sweep(self, doomed: Container[int] = (), live: str = "") -> list[Exception]:
        """Delete these steps, and what belongs to no checkpoint: nobody but `live` can still commit
        such files. What failed of `doomed`; all else is done all the same."""
        failed: list[Exception] = []
        for name in leftovers(self._place.files(""), (), ""):
            with self._or_it_stays():
                self._place.remove(name)
        for folder in self._place.folders():
            step = step_of(folder)
            if step is not None:
                with self._or_it_stays(failed if step in doomed else None):
                    self._sweep_folder(step, live, doomed=step in doomed)
        return failed

    def _sweep_folder(self, step: int, live: str, *, doomed: bool) -> None:
        folder, named = folder_of(step), self._folder.named(step)
        if doomed:
            self._place.remove(f"{folder}/{MANIFEST}")
        elif named is None:
            return
        named, sizes = named or set(), self._place.files(folder)
        gone = leftovers(sizes, () if doomed else named, live)
        if doomed:
            gone += [name for name in leftovers(sizes, gone, "") if name in named]
        for name in gone:
            self._place.remove(f"{folder}/{name}")
        if len(gone) == len(sizes):
            self._place.remove_folder(folder)

    @contextlib.contextmanager
    def _or_it_stays(self, failed: list[Exception] | None = None) -> Iterator[None]:
        """Log a file that cannot be deleted, and go on: it does not fail the save."""
        try:
            yield
        except (CheckpointError, OSError) as error:
            if failed is not None:
                failed.append(error)
            # At each save it is tried again, and said once.
            if str(error) not in self._warned:
                self._warned.add(str(error))
                what = "old files could not be deleted"
                log.warning("%s: %s: %s", self._place.name, what, error)

    def _select(self, just: int | None = None, unread: Container[int] = ()) -> Selection:
        rows, found = [], self._folder.found()
        for one in found:
            if one.unread or one.step in unread:
                health = Health.UNREAD
            elif one.manifest is None:
                health = Health.BAD
            else:
                health = self._folder.health(one.manifest)
            rows.append((one.step, health))
        pinned = {one.step for one in found if one.pinned}
        return select(rows, self._retention, just, pinned)

    def _fence(self, *, damaged_is_none: bool = False) -> Fence | None:
        try:
            data = self._place.read(FENCE)
            return None if data is None else decode_fence(data)
        except (CheckpointCorrupt, NotAFile) as error:
            if not damaged_is_none:
                raise
            log.warning("%s: %s: its owner is not known", self._place.name, error)
            return None

    def goes_on(self) -> bool:
        """Whether a later generation of the same launch has the folder: nothing is lost then."""
        fence, ours = self._fence(), self.writer
        holder = fence.holder if fence else ours
        return holder.start == ours.start and holder.generation > ours.generation

    @contextlib.contextmanager
    def _at_work(self, what: str) -> Iterator[None]:
        """What the disk answers, as an error of ours that says what was to be done."""
        try:
            yield
        except OSError as error:
            kind: type[CheckpointError] = CheckpointError
            if isinstance(error, FileNotFoundError):
                kind = ClearedAway
            elif error.errno in _NO_WRITES:
                kind = TakesNoWrites
            raise kind(f"{self._place.name} {what}: {error}") from error


class Writers:
    """The ranks that write a save together: this one alone, or all of a process group.

    Those of a group make one at the same time, and call `write` in the same order.

    peers: of a group that is theirs alone, so that what goes on behind a training step never mixes
    with the step's collectives; None if this rank writes alone. Only sentences are exchanged.
    """

    def __init__(self, commits: Committer, peers: PeerGroup | None = None) -> None:
        self._commits, self._peers, self._count = commits, peers, 0
        self.rank = peers.rank if peers else 0
        self._kind = f"part-{self.rank:05d}" if peers else "state"
        # The files of all ranks bear the name of the writer that will commit them.
        token = commits.writer.token
        self._token: str = peers.all_gather_json(token)[0] if peers else token

    def write(
        self,
        step: int,
        data: memoryview,
        world_size: int = 0,
        *,
        pinned: bool = False,
    ) -> None:
        """Write this rank's pack as a file, and commit those of all.

        Raises:
            CheckpointError: on all ranks; one of them failed.
        """
        self._count += 1
        commits, first = self._commits, self.rank == 0
        name = data_name(self._kind, self._token, self._count)
        self._all_do(step, commits.claim if first else None)
        try:
            files = self._all_do(step, partial(commits.write, step, name, data))
            parts = len(files) if self._peers else 0
            commit = partial(commits.commit, step, files, parts, world=world_size, pinned=pinned)
            self._all_do(step, commit if first else None)
        except BaseException:
            commits.abandon(step, name)
            raise

    def _all_do(self, step: int, act: Callable[[], DataFile | None] | None) -> tuple[DataFile, ...]:
        """Do this rank's part of something; the files of all ranks, if all could do theirs."""

        def mine() -> tuple[str, int, int] | None:
            file = act() if act else None
            return attrs.astuple(file) if file else None

        if self._peers is None:
            every = [mine()]
        else:
            every = self._peers.gather_results(mine, f"could not save step {step}")
        return tuple(DataFile(*row) for row in every if row)


# -- what became of a save -------------------------------------------------------------------------


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
        try:
            if self._failure is not None:
                raise self._failure
        except BaseException as error:
            # Another exception may have interrupted this call, and then the failure is not told.
            self.looked_at = self.looked_at or error is self._failure
            raise
        self.looked_at = True

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
    """A save that this process writes, in a thread of its own once `begin` is called.

    The save owns what it writes until it is over. An exception that interrupts the caller of any
    method, even `begin`, changes nothing about that: the methods may be called again, and each
    starts the writer if none is running. A process that exits waits for the thread, which is not a
    daemon. A fork of the process has nothing to do with the save.
    """

    def __init__(self, step: int, write: Callable[[], None]) -> None:
        super().__init__(step)
        self._write: Callable[[], None] | None = write  # None once the save is over
        self._writing = ExclusiveCall()
        self._over = Latch()
        self.in_background = True  # whether `begin` leaves the writing to a thread

    def begin(self) -> None:
        """Start the writer, unless it runs or has ended. Return when it does.

        If no thread can be left behind that writes, because there are too many or because Python
        is shutting down, return when the save is over; `in_background` is then false.
        """
        while not (self._over.is_set or self._writing.is_running):
            started = Latch()
            try:
                _thread.start_new_thread(self._start_writer, (started,))
            except (RuntimeError, MemoryError) as error:
                log.warning(
                    "cannot start a thread that writes step %d (%s): the training step waits "
                    "until it is written",
                    self.step,
                    error,
                )
                self._run_here(started)
            started.wait()

    def _run_here(self, started: Latch) -> None:
        self.in_background = False
        try:
            self._run(started)
        except BaseException:
            self.looked_at = self._over.is_set  # This exception says that it failed.
            raise

    def _start_writer(self, started: Latch) -> None:
        """Start the thread that writes.

        This is done in a thread, because signal handlers run in the main thread alone. If one of
        them raises an exception there, `Thread.start` may leave locks held that the new thread
        needs, and `Thread.is_alive` may take a running thread for one that has ended.
        """
        try:
            # Python does not wait for threads that start after the main thread has ended.
            if threading.main_thread().is_alive():
                # Threads are daemons if not told otherwise, because this one is.
                thread = threading.Thread(target=self._run, args=(started,), daemon=False)
                thread.name = "elasticlib-save"
                thread.start()
                return
        except (RuntimeError, MemoryError) as error:
            log.warning(
                "cannot start a second thread to write step %d (%s): the training step waits "
                "until it is written",
                self.step,
                error,
            )
        self.in_background = False
        try:
            self._run(Latch())
        finally:
            started.set()

    def _run(self, started: Latch) -> None:
        """Write, unless another writer runs."""
        with contextlib.suppress(CallRejected):
            self._writing.run(partial(self._write_once, started))
        started.set()

    def _write_once(self, started: Latch) -> None:
        started.set()
        if self._over.is_set or self._write is None:
            return
        try:
            self._write()
        except Exception as error:
            self._failure = error
        except BaseException as error:
            why = f"{type(error).__name__} interrupted it"
            self._failure = CheckpointError(f"step {self.step} was not saved: {why}")
            raise
        finally:
            self._over.set()
            self._write = None

    def settle(self) -> None:
        """Wait until it is over; a failure is kept."""
        if self._process == os.getpid():
            self._wait_until_over(None)

    def _wait_until_over(self, timeout: float | None) -> bool:
        deadline = None if timeout is None else monotonic() + timeout
        while not self._over.is_set:
            left_s = RECHECK_S if deadline is None else deadline - monotonic()
            if left_s <= 0:
                break
            if self._writing.is_interrupted:
                raise CheckpointError(
                    f"step {self.step} is being written by the call that this signal handler has "
                    "interrupted, so it cannot wait for it: return from the handler first"
                )
            self.begin()
            self._over.wait(min(left_s, RECHECK_S))
        return self._over.is_set

    def _unknown_after(self, timeout: float | None) -> str:
        if self._process != os.getpid():
            raise CheckpointError(
                f"step {self.step} is saved by the process that this one was forked from, which "
                "alone can say what became of it"
            )
        is_over = self._wait_until_over(timeout)
        return "" if is_over else f"step {self.step} is still being written"


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
        while not self._is_over():
            if monotonic() < deadline:
                pause.wait(STORE_SECONDS if outcomes.reachable else FOLDER_SECONDS)
            elif outcomes.reachable:
                return (
                    f"no news of the save of step {step}, which rank 0 makes: it has died, is "
                    "still saving, or did not call save"
                )
            else:
                return f"there is no {self._folder.describe(step)}, which another rank was to save"
        return ""

    def _is_over(self) -> bool:
        """Ask, until it is; keep why it failed."""
        outcomes, step = self._outcomes, self.step
        if not self._over and not outcomes.reachable:
            # Older ones may have made room for the newest, which began when they were over.
            looked = map(self._folder.look, {step, outcomes.newest})
            self._over = any(found is not None and found.manifest for found in looked)
        elif not self._over and (said := outcomes.heard(self._number)) is not None:
            self._over = True
            if said["step"] != step:
                self._failure = CheckpointError(
                    f"rank 0 was asked to save step {said['step']}, and this rank step {step}: all "
                    "ranks have to make the same calls"
                )
            elif said["error"]:
                self._failure = CheckpointError(
                    f"step {step} was not saved by rank 0: {said['error']}"
                )
        return self._over


class Outcomes:
    """How the saves of one manager's writer came out, told by the store that the ranks met in.

    Each save has a number, which is the same on all ranks, as all make the same calls.

    store: torch's; None if there is none. name: the same on all ranks. mine: whether this is
    rank 0, which writes and tells the others. reachable: whether the store is, as far as is known
    by now. newest: the step of the last save that another rank was to make.
    """

    def __init__(self, store: Any, name: str, *, mine: bool) -> None:
        self._store, self._mine = store, mine
        self._prefix = f"elasticlib/saves/{zlib.crc32(name.encode()):08x}"
        self.reachable, self.newest = store is not None, 0

    def begin(self) -> int:
        """The number of a save that begins here, or on the rank that writes."""
        # Neither of the two calls can be interrupted halfway.
        return next(_save_numbers.setdefault(self._prefix, count(1)))

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
            log.info("cannot tell the other ranks that step %d was saved: %s", step, lost)

    def heard(self, number: int) -> dict[str, Any] | None:
        """What the writer has said of a save; None if nothing yet."""
        try:
            if not self._store.check([self._key(number)]):
                return None
            said: dict[str, Any] = json.loads(self._store.get(self._key(number)))
        except RuntimeError as lost:
            # Its host may have ended once it had saved.
            log.info("cannot read the result of save %d in the ranks' store: %s", number, lost)
            self.reachable = False
            return None
        return said

    def _key(self, number: int) -> str:
        return f"{self._prefix}/{number}"
