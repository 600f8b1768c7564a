"""End save: when a job ends early, agents write the snapshots in their memory as a checkpoint.

An agent does this last, after its workers have exited and before their memory is freed. A snapshot
and a checkpoint have the same bytes, so this is a copy and a commit, and needs no torch.

**The checkpoint directory is the protocol.** The agents of a job exchange no messages. Each of them
lists the directory, and does the next thing that is missing there:

1. If the newest state in its memory is saved, the agent is done.
2. It puts its parts of the newest state into the folder `step-N.BRANCH.end`. While a part is
   written, it has a temporary name, which is the same for all agents and is created exclusively. So
   each part is written once. A part that has its name is durable.
3. When nothing in these folders has grown for `settle_s`, it puts what is still missing and what
   others were to write: replicas of other nodes' parts, a state that all nodes have, and copies of
   a part (HSDP). Then it puts its parts of the older state that it retains.
4. Whoever sees a complete state commits it. A state is complete if all parts are there, or if the
   boxes of those that are there contain every element. The manifest says nothing about its writer,
   so it does no harm that two agents may commit one state where there are no locks.

So what remains is the newest *complete* state. An agent ends when its newest state is covered by a
checkpoint; or an older one is committed, and nothing has grown for `settle_s`; or nothing has grown
for `peers_s`. Then it reports what is missing. A node that stays in the job does steps 2 to 4 only
for states whose folder another agent has created.

**What can go wrong.**

- *An agent dies* while it writes a part: the temporary file does not grow for `stall_s`. At a URL,
  an object marks the claim, which cannot grow, and ends after `peers_s`. Then another agent that
  has the part writes it under the next name. A slow writer of the first name does no harm.
- *The disk fails.* The agent tries again for `retry_s`. Then, or at once if the disk is full or
  read-only, it writes nothing more. It waits for agents that have the same parts, and reports its
  error.
- *A snapshot cannot be read.* The agent acts as if it were not there.
- *A later generation has the directory.* It continues the job from its own snapshots. Nothing is
  committed, and this is not an error. If another launch has the directory, it is an error.
- *The disk hangs.* The agent gives up when nothing has grown for `total_s`, or when its caller asks
  for it. An agent that helps waits without a limit.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs

from ..clock import monotonic, sleep
from ..errors import CheckpointCorruptError, CheckpointError, CheckpointFencedError, format_error
from ..rendezvous.interface import RendezvousInfo
from ..threads import daemon_thread
from .boxes import TensorShard, describe_missing, format_numbers, read_shards
from .catalog import MANIFEST_NAME, PIN_NAME, CheckpointCatalog, DataFile
from .commit import NOT_WRITABLE_ERRORS, Committer, FileDeletedError
from .end_plan import (
    Commit,
    Done,
    Held,
    Put,
    Timeouts,
    folder_of,
    is_end_folder,
    list_parts,
    next_end_step,
)
from .refs import (
    Line,
    StateKey,
    StateRef,
    continue_line,
    is_saved,
    line_now,
    on_line,
    parse_folder_name,
    position,
)
from .safetensors_header import DTYPES, ITEM_BYTES, read_head, read_meta
from .snapshot_slots import list_snapshots, map_snapshot
from .storage import (
    CHECKSUM_BYTES,
    CheckpointStorage,
    open_storage,
)

log = logging.getLogger("elasticlib.checkpoint")

WAIT_INTERVAL_S = 0.1  # between two checks whether the end save must end
MAX_PUTS = 4  # of one part, whose file another process deletes each time

_VALUES = ".values."  # the prefix of an empty file that names a digest of plain values
_ITEM_BYTES = {name: ITEM_BYTES[code] for code, name in DTYPES.items()}


# -- reading ---------------------------------------------------------------------------------------


class Growth:
    """The sizes of files in the folders of an end save, and when each was last seen to grow."""

    def __init__(self) -> None:
        self.newest = monotonic()  # when anything was last seen to grow, or the first look
        self._seen: dict[str, dict[str, tuple[int, float]]] = {}  # by folder and file

    def note(self, folder: str, sizes: Mapping[str, int]) -> None:
        """Note the sizes of all files in a folder."""
        before, now = self._seen.get(folder, {}), monotonic()
        rows = {name: (size, now) for name, size in sizes.items()}
        rows |= {name: row for name, row in before.items() if row[0] == sizes.get(name)}
        if rows != before:
            self.newest = now
        self._seen[folder] = rows

    def stalled(self, folder: str, for_s: float) -> set[str]:
        """Return the files of a folder that have not grown for so many seconds."""
        before = monotonic() - for_s
        return {name for name, (_, at) in self._seen.get(folder, {}).items() if at <= before}


def growing_end_folders(
    storage: CheckpointStorage, line: Line, newer_than: StateRef | None, growth: Growth
) -> list[str]:
    """Return the folders of states of the line that agents may still be writing.

    A restore that would choose an older state waits for them. Call this again with the same
    `growth`: a folder in which nothing grows for twice `Timeouts.settle_s` is left out.

    Args:
        storage: the checkpoint directory.
        line: the line that the job is on.
        newer_than: the state that would be restored without them.
        growth: what the earlier calls have seen.

    Raises:
        OSError: the directory cannot be read.
    """
    growing, limit_s = [], 2 * Timeouts().settle_s
    lowest = (position(line, newer_than) if newer_than else None) or (-1, -1)
    for folder in filter(is_end_folder, storage.list_folders()):
        ref = parse_folder_name(folder)
        if ref is None or (position(line, ref) or lowest) <= lowest:
            continue
        sizes = storage.list_files(folder)
        growth.note(folder, sizes)
        if MANIFEST_NAME not in sizes and sizes.keys() - growth.stalled(folder, limit_s):
            growing.append(folder)
    return growing


def _read_data_file(storage: CheckpointStorage, folder: str, name: str, size: int) -> DataFile:
    """Return the description of a durable data file for a manifest.

    Raises:
        CheckpointCorruptError: the file does not end with a checksum.
    """
    end = bytearray(CHECKSUM_BYTES)
    storage.read_into(f"{folder}/{name}", memoryview(end), start=max(0, size - CHECKSUM_BYTES))
    try:
        return DataFile(name, size, int(end, 16))
    except ValueError as error:
        raise CheckpointCorruptError(
            f"{folder}/{name} was damaged: it ends with {end!r}"
        ) from error


# -- one agent's work ------------------------------------------------------------------------------


@attrs.define(eq=False)
class StateWriter:
    """Writes the newest complete state of one name, together with the other agents.

    One thread uses it. Each CheckpointManager of a job has a name of its own in the memory.
    """

    memory: Path  # the directory of the agent's snapshots
    refs: Sequence[StateRef]  # the snapshots of the name
    generation: int  # of the last workers
    is_leaving: bool  # see `EndSave`
    limits: Timeouts
    storage: CheckpointStorage | None = None  # see `EndSave`
    growth: Growth = attrs.field(factory=Growth)
    saved_step: int | None = None  # the step that an agent has written
    _states: list[tuple[StateRef, ...]] | None = None  # newest first; None: not listed yet
    _shards: dict[str, list[TensorShard]] = attrs.field(factory=dict)  # by snapshot or data file
    _incomplete: set[tuple[str, ...]] = attrs.field(factory=set)  # data files that do not suffice
    _values: dict[str, set[str]] = attrs.field(factory=dict)  # digests of values, by folder
    _num_puts: Counter[StateRef] = attrs.field(factory=Counter)
    _problem: str = ""  # why this agent writes nothing more
    _unreadable: tuple[StateRef, str] | None = None  # the newest such snapshot, and the reason
    _failing_since: float | None = None  # when the first of several errors was
    _storage: CheckpointStorage = attrs.field(init=False)
    _catalog: CheckpointCatalog = attrs.field(init=False)
    _committer: Committer = attrs.field(init=False)
    _line: Line = ()

    @property
    def latest(self) -> StateRef:
        """The snapshot that was made last."""
        return max(self.refs, key=lambda ref: (ref.writer.order, ref.number))

    @property
    def folder(self) -> str:
        """The checkpoint directory; empty if there is none."""
        return self.latest.folder

    def advance(self) -> Put | Commit | Done | None:
        """Do one step and return it. Return None if there is nothing to do for `poll_s`."""
        try:
            step = self._next_step()
            if isinstance(step, Done) and step.problem and not self.is_leaving:
                return None
            if isinstance(step, Commit):
                self._commit(step.held)
            if isinstance(step, Put):
                if not self._put(step.ref, step.name):
                    return None
                self._failing_since = None
            return step
        except FileDeletedError as error:
            log.info("%s: a part is written again: %s", self.folder, error)
        except CheckpointFencedError as error:
            return Done("" if self._was_superseded() else str(error))
        except (CheckpointError, OSError) as error:
            return self._note_error(error)
        return None

    def describe_failure(self, reason: str) -> str:
        """Return the error message for states that were not written."""
        newest = self._states[0][0] if self._states else self.latest
        return f"the snapshot of step {newest.step} was not written to {self.folder}: {reason}"

    def describe_difference(self) -> str:
        """Return what is lost if the ranks had different values in the state that was written."""
        for refs in self._states or ():
            if refs[0].step == self.saved_step:
                own = {ref.values for ref in refs if ref.values}
                if len(own | self._values.get(folder_of(refs[0]), set())) > 1:
                    return (
                        f"{self.folder}: step {self.saved_step} was written with the values of one "
                        "rank only. Other ranks had other plain values or generators, which are "
                        "lost: make them equal on all ranks, or name them in "
                        "CheckpointManager(..., per_rank=(...))"
                    )
        return ""

    def _note_error(self, error: Exception) -> Done | None:
        """Note an error of the disk. After one that lasts, this agent writes nothing more."""
        now, problem = monotonic(), format_error(error)
        if self._problem:
            return Done(self._problem)  # What the others do cannot be read either.
        self._failing_since = self._failing_since or now
        cause = error if isinstance(error, OSError) else error.__cause__
        is_transient = isinstance(cause, OSError) and cause.errno not in NOT_WRITABLE_ERRORS
        is_retried = is_transient and now - self._failing_since < self.limits.retry_s
        outcome = "trying again" if is_retried else "not trying again"
        log.warning("%s: %s", self.describe_failure(problem), outcome)
        if is_retried:
            sleep(self.limits.retry_pause_s)
        else:
            self._problem = problem
        return None

    # -- what to do -----------------------------------------------------------------------------

    def _next_step(self) -> Put | Commit | Done | None:
        if self._states is None:
            self._begin()
        refs = self._catalog.list_refs(reread=False)
        if not self._states:
            lost, reason = self._unreadable or (None, "")
            return Done("" if lost is None or is_saved(refs, self._line, lost) else reason)
        if self._was_superseded():
            step = self._states[0][0].step
            log.info("step %d is not written: a later generation continues the job", step)
            return Done()
        sizes: dict[str, Mapping[str, int]] = {}
        for folder in filter(is_end_folder, self._storage.list_folders()):
            sizes[folder] = self._storage.list_files(folder)
            self.growth.note(folder, sizes[folder])
            values = {n.removeprefix(_VALUES) for n in sizes[folder] if n.startswith(_VALUES)}
            self._values.setdefault(folder, set()).update(values)
        newest = next((ref for ref in on_line(self._line, refs) if ref.is_usable), None)
        oldest = self._states[-1][0]
        if newest and is_end_folder(newest.place) and is_saved([newest], self._line, oldest):
            self.saved_step = newest.step
        quiet_s = monotonic() - self.growth.newest
        states = []
        for own in self._states:
            folder, is_covered = folder_of(own[0]), is_saved(refs, self._line, own[0])
            if self.is_leaving or folder in sizes:
                held = self._look(own, sizes.get(folder, {}), quiet_s)
                states.append(attrs.evolve(held, is_saved=is_covered))
        return next_end_step(states, quiet_s, self.limits, self._problem) if states else None

    def _begin(self) -> None:
        """Find the states that can be written."""
        self._storage = self.storage or open_storage(self.folder)
        self._catalog = CheckpointCatalog(self._storage)
        refs, latest = self._catalog.list_refs(), self.latest.writer
        fence = self._catalog.known_fence()
        self._line = line_now(fence, [*self.refs, *refs], latest.launch)
        # Workers of the last generation may have exited before they made a snapshot.
        order = max(latest.order, (self.generation, 0))
        label = f"agent {os.getpid()} on {socket.gethostname()}"
        writer = attrs.evolve(latest, generation=order[0], number=order[1], label=label)
        self._committer = Committer(self._catalog, writer, self._line, None)
        states: dict[StateKey, dict[int | None, StateRef]] = {}
        for ref in on_line(self._line, sorted(self.refs, key=lambda ref: ref.copy)):
            if ref.part not in states.get(ref.state, {}) and self._can_read(ref):
                states.setdefault(ref.state, {})[ref.part] = ref
        self._states = [tuple(by_part.values()) for by_part in states.values()]
        # A corrupt checkpoint does not count. If each agent read all parts of a sharded one, a node
        # that must leave would have too little time.
        for ref in refs if self._states else ():
            newest = self._states[0][0]
            is_read = not ref.parts and ref.place != folder_of(newest)
            if is_read and is_saved([ref], self._line, newest):
                with contextlib.suppress(CheckpointError):
                    self._catalog.check(ref)

    def _can_read(self, ref: StateRef) -> bool:
        """Return whether a snapshot is intact, as far as its header shows, and note its shards."""
        try:
            with map_snapshot(self.memory, ref) as view:
                if view is None:
                    return False
                meta = read_meta(view)
                self._shards[ref.place] = read_shards(meta) if ref.parts else []
        except CheckpointError as error:
            log.warning("the snapshot %s of step %d is skipped: %s", ref.place, ref.step, error)
            self._unreadable = self._unreadable or (ref, f"it cannot be read: {error}")
            return False
        return True

    def _was_superseded(self) -> bool:
        with contextlib.suppress(CheckpointError, OSError):  # the commit reports a corrupt fence
            return self._committer.was_superseded()
        return False

    def _look(self, own: tuple[StateRef, ...], sizes: Mapping[str, int], quiet_s: float) -> Held:
        """Return what is in the folder of a state of which this agent has these parts."""
        limits, num_parts, folder = self.limits, own[0].parts, folder_of(own[0])
        stall_s = limits.stall_s if self._storage.shows_growth else limits.peers_s
        numbers: Sequence[int | None] = range(num_parts) if num_parts else [None]
        files, free = list_parts(sizes, numbers, self.growth.stalled(folder, stall_s))
        held = Held(own, files, free)
        if absent := [part or 0 for part in numbers if part not in files]:
            which = f"{format_numbers(absent, 'part')} of {num_parts}"
            missing = (
                f"is incomplete: no node has written {which}" if num_parts else "is in no file"
            )
            is_enough = num_parts and self._is_enough(held, sizes)
            held = attrs.evolve(held, missing="" if is_enough else missing)
        is_late = any(ref.copy and ref.part in free for ref in own) and quiet_s >= limits.settle_s
        if held.missing and num_parts and is_late:
            shards = {s for name in files.values() for s in self._shards_in(f"{folder}/{name}")}
            covered = {r.part for r in own if shards.issuperset(self._shards[r.place] or {None})}
            held = attrs.evolve(held, covered=frozenset(covered))
        return held

    def _is_enough(self, held: Held, sizes: Mapping[str, int]) -> bool:
        """Return whether the durable parts contain every element, although some are not there.

        Their headers are read only if nobody is writing and the files may be large enough.
        """
        names = (held.folder, *sorted(held.files.values()))
        num_parts, own = held.refs[0].parts, self._shards[held.refs[0].place]
        tensors = {(shard.name, shard.shape, shard.dtype) for shard in own}
        num_bytes = sum(math.prod(shape) * _ITEM_BYTES.get(kind, 0) for _, shape, kind in tensors)
        is_busy = len(held.files) + len(held.free) < num_parts
        is_small = sum(sizes[name] for name in held.files.values()) < num_bytes
        if not held.files or is_busy or is_small or names in self._incomplete:
            return False
        shards = {
            part: self._shards_in(f"{held.folder}/{name}")
            for part, name in held.files.items()
            if part is not None
        }
        is_enough = not describe_missing(shards, num_parts)
        if not is_enough:
            self._incomplete.add(names)
        return is_enough

    def _shards_in(self, path: str) -> list[TensorShard]:
        """Return the shards in a durable part."""

        def read_first(size: int) -> bytes:
            buffer = bytearray(size)
            return bytes(buffer[: self._storage.read_into(path, memoryview(buffer))])

        if path not in self._shards:
            self._shards[path] = read_shards(read_meta(read_head(read_first)))
        return self._shards[path]

    # -- doing it -------------------------------------------------------------------------------

    def _put(self, ref: StateRef, name: str) -> bool:
        """Write a part. Return False if another agent writes it, or the snapshot is gone."""
        folder = folder_of(ref)
        # Workers of the last generation may have exited before they claimed the directory.
        self._committer.claim()
        if self._num_puts[ref] == MAX_PUTS:
            raise CheckpointError(f"another process has deleted {folder} {MAX_PUTS} times")
        with map_snapshot(self.memory, ref) as view:
            if view is None:
                states = (tuple(r for r in refs if r != ref) for refs in self._states or ())
                self._states = [refs for refs in states if refs]
                return False
            is_written = self._committer.put(folder, name, view)
        self._num_puts[ref] += is_written
        if ref.values and ref.values not in self._values.get(folder, ()):
            self._storage.replace(f"{folder}/{_VALUES}{ref.values}", b"")
            # An agent that commits removes such files after the commit, and this one may be later.
            if MANIFEST_NAME in self._storage.list_files(folder):
                self._storage.remove(f"{folder}/{_VALUES}{ref.values}")
        return is_written

    def _commit(self, held: Held) -> None:
        """Commit a complete state, and remove what its manifest does not name."""
        ref, folder = held.refs[0], held.folder
        sizes = self._storage.list_files(folder)
        named = [held.files[part] for part in sorted(held.files, key=lambda part: part or 0)]
        if gone := [name for name in named if name not in sizes]:
            raise FileDeletedError(f"{folder}/{gone[0]} was deleted before the commit")
        rows = tuple(_read_data_file(self._storage, folder, n, sizes[n]) for n in named)
        # No field tells which agent commits.
        writer, line = attrs.evolve(ref.writer, label=""), continue_line(ref.line, self._line)
        state = attrs.evolve(ref, writer=writer, line=line)
        num_parts = len(rows) if ref.parts else 0
        self._committer.commit(folder, rows, state, parts=num_parts, world_size=ref.parts)
        log.info("step %d was written to %s, from the last snapshot", ref.step, self.folder)
        for name in self._storage.list_files(folder).keys() - {*named, MANIFEST_NAME, PIN_NAME}:
            self._storage.remove(f"{folder}/{name}")


class EndSave:
    """The end save of one agent.

    Args:
        memory: the directory of the agent's snapshots.
        info: the last generation; None if there was none.
        is_leaving: whether this node's run is over. Otherwise the agent only writes parts that
            agents whose runs are over need.
        storage: the checkpoint directory, if it is not the one that the snapshots name.
        limits: the time limits.
    """

    def __init__(
        self,
        memory: Path,
        info: RendezvousInfo | None,
        *,
        is_leaving: bool = True,
        storage: CheckpointStorage | None = None,
        limits: Timeouts | None = None,
    ) -> None:
        self._memory, self._info, self._storage = memory, info, storage
        self._is_leaving, self._limits = is_leaving, limits or Timeouts()
        self._stop = threading.Event()
        self.saved: int | None = None  # the step that was written, by any agent
        self._writers: list[StateWriter] = []  # that have not ended
        self._problems: list[str] = []
        self._started_at = 0.0

    def run(self, cancel_reason: Callable[[], str] = str) -> str:
        """Write the snapshots. Block until they are written, or there is no progress any more.

        Args:
            cancel_reason: returns why the writing must end now, or an empty text. This method calls
                it several times per second.

        Returns:
            An error message about what was not written. It is empty if nothing is lost, or after a
            call of `stop`.
        """
        # Nothing can interrupt a thread that writes to a disk that hangs.
        thread = daemon_thread(self._save_all, "agent-end-save", self._problems.append)
        self._started_at = monotonic()
        thread.start()
        reason = self._wait(thread, cancel_reason)
        if self._stop.is_set():
            return ""
        late = [writer.describe_failure(reason) for writer in tuple(self._writers)]
        self._stop.set()
        return "; ".join([*self._problems, *late])

    def stop(self) -> None:
        """Start nothing more and report nothing. Thread-safe."""
        self._stop.set()

    def _wait(self, thread: threading.Thread, cancel_reason: Callable[[], str]) -> str:
        """Return why the wait ended before the thread did, or an empty text."""
        limits, is_announced = self._limits, not self._is_leaving
        total_s = limits.total_s if self._is_leaving else math.inf
        while thread.is_alive() and not self._stop.is_set():
            now = monotonic()
            progress = (self._started_at, *(w.growth.newest for w in tuple(self._writers)))
            if now - max(progress) >= total_s:
                return f"it was not written, and there was no progress for {total_s:g} s"
            if reason := cancel_reason():
                return reason
            if not is_announced and now >= self._started_at + limits.announce_s:
                is_announced = True
                log.info(
                    "still writing the last snapshots, until there is no progress for %g s; the "
                    "third SIGINT gives them up",
                    total_s,
                )
            thread.join(min(WAIT_INTERVAL_S, total_s))
        return ""

    def _save_all(self) -> None:
        try:
            self._writers = self._create_writers()
        except Exception as error:
            self._problems.append(f"snapshots in memory were not written: {format_error(error)}")
            return
        while self._writers and not self._stop.is_set():
            is_idle = True
            for writer in tuple(self._writers):
                try:
                    step = writer.advance()
                except Exception as error:
                    # Any error must be part of the report on how the run ended.
                    step = Done(format_error(error))
                if self._stop.is_set():
                    return
                is_idle &= step is None
                if isinstance(step, Done):
                    self._note_end(writer, step)
            if is_idle:
                self._stop.wait(self._limits.poll_s)

    def _note_end(self, writer: StateWriter, end: Done) -> None:
        if writer.saved_step is not None:
            self.saved = writer.saved_step
        if end.lost:
            log.warning("%s", writer.describe_failure(f"it {end.lost}"))
        problem = writer.describe_failure(end.problem) if end.problem else ""
        if problem := problem or writer.describe_difference():
            self._problems.append(problem)
        self._writers.remove(writer)

    def _create_writers(self) -> list[StateWriter]:
        """Return a writer for the snapshots of each name that have a checkpoint directory."""
        by_name: dict[str, list[StateRef]] = {}
        for ref in list_snapshots(self._memory):
            by_name.setdefault(ref.name, []).append(ref)
        limits, generation = self._limits, self._info.generation if self._info else 0
        if self._info is None or self._info.world_size == 1:
            limits = attrs.evolve(limits, settle_s=0.0, peers_s=0.0)  # There is nobody to wait for.
        rest = (generation, self._is_leaving, limits, self._storage)
        writers = (StateWriter(self._memory, refs, *rest) for _, refs in sorted(by_name.items()))
        return [writer for writer in writers if writer.folder]
