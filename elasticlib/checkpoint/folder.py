"""The checkpoints in a folder, as anybody may read them; nothing here changes anything.

A checkpoint is what a whole manifest names: its files with their sizes and sums, who wrote them,
and when. Each of the manifest's own bytes is summed, too. A checkpoint counts from the moment at
which its manifest, written last, is in place. Its data are summed when they are read: what is
damaged is found out before it is used.

The newest few are kept, one each so many steps, those that are pinned, and always the last good
one. Nothing is deleted while no checkpoint that stays is known to be good, and never what could not
be read: it may be whole.
"""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import mmap
import os
import re
import zlib
from collections.abc import Callable, Container, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from ..errors import CheckpointCorrupt, CheckpointError, ConfigError, Unreadable
from ..foreign import read_fields, read_object
from .place import (
    CHUNK,
    Fill,
    LocalPlace,
    NotAFile,
    Place,
    RemotePlace,
    new_memory,
    no_news,
    read_summed,
)
from .safetensors_header import PREFIX_BYTES, read_size

if TYPE_CHECKING:
    from .tensor_layout import MapLocation

log = logging.getLogger("elasticlib.checkpoint")
T = TypeVar("T")

FORMAT = 3
"""A checkpoint whose manifest has another format is left alone, and an older checkpoint does not
take its place."""

MANIFEST = "manifest.json"
MAX_STEP = MAX_BYTES = 2**63 - 1

_FOLDER = re.compile(r"step-([0-9]{10,19})")
_FILE = re.compile(r"[^/\0]+")
_YEAR_10000 = 253402300800
"""In seconds since 1970, the first that no calendar here can show."""


# -- a manifest: pure ------------------------------------------------------------------------------


class OtherFormat(CheckpointCorrupt):
    """The manifest is not damaged, but a version with another format wrote it."""


@attrs.frozen
class DataFile:
    """A file of a checkpoint: its name in the checkpoint's folder, bytes, and their checksum."""

    name: str
    size: int
    checksum: int  # see `place.checksum_of`


@attrs.frozen
class Manifest:
    """One checkpoint.

    step: after which the state was taken. parts: 0 for a state that is the same on all ranks, in
    one file; else so many ranks wrote a file each, in the order of their ranks. run, launch,
    generation, writer: see `commit.Writer`. saved_at: seconds since 1970 by the writer's wall
    clock, for people. world: the number of ranks that the job had; 0 where it is not known. pinned:
    whether retention never deletes this checkpoint.
    """

    step: int
    files: tuple[DataFile, ...]
    parts: int = 0
    run: str = ""
    launch: str = ""
    generation: int = 0
    writer: str = ""
    saved_at: float = 0.0
    world: int = 0
    pinned: bool = False

    @property
    def size(self) -> int:
        """Of all its data, in bytes."""
        return sum(file.size for file in self.files)


def check_step(step: object) -> int:
    """The step, if it can be one. Raises CheckpointError."""
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise CheckpointError(f"a step is an int from 0 to {MAX_STEP}, got {step!r}")
    return step


def folder_of(step: int) -> str:
    """The name of the folder of a step's checkpoint; names sort as the steps do, to 10^10."""
    return f"step-{step:010d}"


def step_of(folder: str) -> int | None:
    """The step whose folder has this name; None if it is no such name."""
    match = _FOLDER.fullmatch(folder)
    step = int(match[1]) if match else -1
    return step if 0 <= step <= MAX_STEP and folder_of(step) == folder else None


def encode_manifest(manifest: Manifest) -> bytes:
    """One line of JSON, and one with its sum."""
    fields = {"format": FORMAT, **attrs.asdict(manifest)}
    return summed(json.dumps(fields, separators=(",", ":")).encode("ascii"))


def summed(body: bytes, label: bytes = b"crc32 ") -> bytes:
    """With a line behind it that has its sum."""
    return body + b"\n%b%08x\n" % (label, zlib.crc32(body))


def body_of(data: bytes, label: bytes = b"crc32 ") -> bytes | None:
    """What `summed` was given; None if any byte was changed since then, or is missing."""
    body = data[: -len(summed(b"", label))]
    return body if summed(body, label) == data else None


def decode_manifest(data: bytes) -> Manifest:
    """The manifest again.

    Raises:
        CheckpointCorrupt: it was cut short or changed, or is none. OtherFormat: a version
            with another format wrote it.
    """
    body = body_of(data)
    if body is None:
        raise CheckpointCorrupt("its manifest was changed or cut short")
    try:
        return _manifest(read_object(body))
    except ValueError as error:
        raise CheckpointCorrupt(f"its manifest is not valid: {error}") from error


def _manifest(fields: dict[str, Any]) -> Manifest:
    found = fields.pop("format", None)
    if type(found) is not int:
        raise ValueError(f"its format is {found!r:.80}, must be {FORMAT}")
    surplus = fields.keys() - attrs.fields_dict(Manifest).keys()
    if found != FORMAT or surplus:
        other = f"format {found}" if found != FORMAT else f"the field {min(surplus)!r:.80}"
        raise OtherFormat(f"its manifest has {other}, this version reads format {FORMAT}")
    rows = fields.pop("files", None)
    if type(rows) is not list:
        raise ValueError(f"files is {rows!r:.80}, must be a list")
    files = tuple(read_fields(DataFile, row) for row in rows)
    manifest = read_fields(Manifest, fields, files=files)
    reason = _out_of_range(manifest)
    if reason:
        raise ValueError(reason)
    return manifest


def _out_of_range(manifest: Manifest) -> str | None:
    files, parts = manifest.files, manifest.parts
    if not 0 <= manifest.step <= MAX_STEP or parts < 0 or manifest.generation < 0:
        return f"step {manifest.step}, {parts} parts and generation {manifest.generation}"
    if manifest.world < 0:
        return f"it was saved by {manifest.world} ranks"
    if not 0 <= manifest.saved_at < _YEAR_10000:
        return f"it was saved {manifest.saved_at} s after 1970"
    if len(files) != max(1, parts):
        return f"{len(files)} files for {parts} parts"
    if len({file.name for file in files}) < len(files):
        return "two of its files have one name"
    for file in files:
        if not _FILE.fullmatch(file.name) or file.name in (".", "..", MANIFEST):
            return f"{file.name!r:.80} is not the name of a file beside it"
        if not (0 <= file.size <= MAX_BYTES and 0 <= file.checksum < 1 << 32):
            return f"{file.name} has {file.size} bytes with the checksum {file.checksum:x}"
    return None


def flaw_by_sizes(manifest: Manifest, sizes: dict[str, int]) -> str | None:
    """What is wrong with the files of a checkpoint, seen from their sizes alone; None if nothing.

    Args:
        sizes: bytes of each file in the checkpoint's folder.
    """
    for file in manifest.files:
        if file.name not in sizes:
            return f"{file.name} is missing"
        if sizes[file.name] != file.size:
            return f"{file.name} should have {file.size} bytes, and has {sizes[file.name]}"
    return None


# -- which are kept: pure --------------------------------------------------------------------------


class Health(enum.Enum):
    """GOOD: every byte was written or checked by who asks. BAD: read, and found damaged. UNREAD:
    it could not be read. UNKNOWN: none of these."""

    GOOD = "good"
    UNKNOWN = "unknown"
    UNREAD = "unread"
    BAD = "bad"


@attrs.frozen
class Retention:
    """last: how many of the newest are kept. every: so is each whose step it divides (0: none)."""

    last: int = 3
    every: int = 0

    def __attrs_post_init__(self) -> None:
        for name, least in (("last", 1), ("every", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"need keep_{name} >= {least}, a whole number, got {value!r}")


@attrs.frozen
class Selection:
    """What stays and what goes, each from old to new, and why nothing goes, if so."""

    kept: tuple[int, ...]
    deleted: tuple[int, ...]
    reason: str = ""


def select(
    found: Iterable[tuple[int, Health]],
    retention: Retention,
    just: int | None = None,
    pinned: Container[int] = (),
) -> Selection:
    """Which of these checkpoints to keep. Those UNREAD stay, and so do those BAD that are newer
    than all that are GOOD. Neither are counted: what is whole does not go in their place.

    Args:
        found: the steps that there are, and how each is.
        just: the step that was written just now: it stays, whatever its number. (Who went back
            to an older step writes smaller ones than there are.)
        pinned: steps whose manifests say that they are pinned; they stay even if damaged.
    """
    health = dict(found)
    steps = sorted(health)
    unread = [step for step in steps if health[step] is Health.UNREAD]
    usable = [step for step in steps if health[step] in (Health.GOOD, Health.UNKNOWN)]
    good = [step for step in steps if health[step] is Health.GOOD]
    if not good:
        return Selection(tuple(steps), (), "none is known to be good")
    # A damaged checkpoint stays until a newer good one exists: it may be the only trace of steps
    # that were trained, and a person may be able to repair it.
    damaged = [step for step in steps if health[step] is Health.BAD and step > good[-1]]
    kept = {*usable[-retention.last :], good[-1], *unread, *damaged}
    if retention.every:
        kept |= {step for step in usable if step % retention.every == 0}
    kept |= {step for step in steps if step in pinned}
    if just in health:
        kept.add(just)
    return Selection(tuple(sorted(kept)), tuple(step for step in steps if step not in kept))


# -- a folder --------------------------------------------------------------------------------------


def open_place(folder: str | os.PathLike[str] | Place) -> Place:
    """The place that a path or URL names, or is. Raises CheckpointError."""
    if isinstance(folder, Place):
        return folder
    text = os.fspath(folder)
    scheme, found, path = text.partition("://")
    if not found:
        return LocalPlace(text)
    return LocalPlace(path) if scheme in ("file", "local") else RemotePlace(text)


@attrs.frozen
class Found:
    """A step's folder: what its manifest says, or why it is no checkpoint (any more).

    unread: whether that is because it could not be read: then it may be one all the same.
    pinned: what its manifest says, even if a data file is missing or has another size.
    """

    step: int
    manifest: Manifest | None
    flaw: str = ""
    unread: bool = False
    pinned: bool = False

    @property
    def trouble(self) -> str:
        """What is wrong, in words."""
        return f"cannot be read: {self.flaw}" if self.unread else f"is damaged: {self.flaw}"


class CheckpointFolder:
    """Reads the checkpoints in one place.

    passed_over: why the last `load` or `latest` did not take those before, by step.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.passed_over: dict[int, str] = {}
        self._known: dict[int, tuple[Manifest, Health]] = {}

    # -- what there is ------------------------------------------------------------------------

    def found(self) -> list[Found]:
        """All that is there, newest first, judged by manifests and sizes alone.

        A folder without a manifest is of a save that was never finished, or of a checkpoint that
        was deleted: it is passed over in silence.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        try:
            steps = [step_of(name) for name in self.place.folders()]
        except OSError as error:
            raise CheckpointError(f"{self.place.name} cannot be read: {error}") from error
        known = sorted((step for step in steps if step is not None), reverse=True)
        return [found for step in known if (found := self.look(step))]

    def look(self, step: int) -> Found | None:
        """One step's; None if there is no such checkpoint."""
        folder = folder_of(step)
        try:
            data = self.place.read(f"{folder}/{MANIFEST}")
            if data is None:
                return None
            manifest = decode_manifest(data)
            if manifest.step != step:
                return Found(step, None, f"its manifest is of step {manifest.step}")
            flaw = flaw_by_sizes(manifest, self.place.files(folder))
            if flaw and self.place.read(f"{folder}/{MANIFEST}") != data:
                # It was replaced or deleted meanwhile, and its files were no longer wanted.
                return self.look(step)
        except OtherFormat as error:
            return Found(step, None, str(error), unread=True)
        except NotAFile as error:
            return Found(step, None, f"its manifest cannot be read: {error}")
        except OSError as error:
            return Found(step, None, str(error), unread=True)
        except CheckpointCorrupt as error:
            return Found(step, None, str(error))
        return Found(step, None if flaw else manifest, flaw or "", pinned=manifest.pinned)

    def named(self, step: int) -> set[str] | None:
        """The files that a step's manifest names; None if that cannot be read: who knows."""
        try:
            data = self.place.read(f"{folder_of(step)}/{MANIFEST}")
            if data is None:
                return set()
            return {file.name for file in decode_manifest(data).files} | {MANIFEST}
        except (CheckpointCorrupt, OSError):
            return None

    def describe(self, step: int) -> str:
        """A checkpoint, for messages."""
        return f"checkpoint {self.place.name}/{folder_of(step)}"

    # -- whether it is whole ------------------------------------------------------------------

    def know(self, manifest: Manifest, health: Health) -> None:
        """Every byte of this checkpoint was written or checked here, and it is so."""
        self._known[manifest.step] = (manifest, health)

    def health(self, manifest: Manifest) -> Health:
        """What is known of the checkpoint that this describes."""
        known, health = self._known.get(manifest.step, (None, Health.UNKNOWN))
        return health if known == manifest else Health.UNKNOWN

    def check(self, manifest: Manifest) -> int:
        """Its step, if it is whole. It is read unless it is known to be good.

        Raises:
            CheckpointCorrupt: it is damaged. Unreadable: it cannot be read; nothing is known of it.
        """
        if self.health(manifest) is not Health.GOOD:
            reason = self.flaw(manifest)
            if reason:
                raise self._damaged(manifest, reason)
            self.know(manifest, Health.GOOD)
        return manifest.step

    def check_file(self, manifest: Manifest, number: int) -> None:
        """Read one file of it. Raises as `check`."""
        reason = self._size_flaw(manifest, number) or self._sum_flaw(manifest, number, None)
        if reason:
            raise self._damaged(manifest, reason)

    def flaw(self, manifest: Manifest, seen: Callable[[memoryview], None] = no_news) -> str | None:
        """What is wrong with a checkpoint, having read every byte of it; None if nothing.

        Raises:
            Unreadable: it cannot be read.
        """
        numbers = range(len(manifest.files))
        sizes = (self._size_flaw(manifest, number) for number in numbers)
        sums = (self._sum_flaw(manifest, number, None, seen) for number in numbers)
        return next(filter(None, sizes), None) or next(filter(None, sums), None)

    def look_for_good(self) -> set[int]:
        """Read from the newest on until one turns out whole; those that could not be read."""
        unread = set()
        for found in self.found():
            try:
                if found.manifest:
                    self.check(found.manifest)
                    break
            except CheckpointCorrupt:
                continue
            except Unreadable as error:
                log.warning("it stays: %s", error)
                unread.add(found.step)
        return unread

    def verified(self, found: Found, seen: Callable[[memoryview], None] = no_news) -> Found:
        """The same with what is found wrong with it when every byte is read."""
        if found.manifest is None:
            return found
        try:
            return attrs.evolve(found, flaw=self.flaw(found.manifest, seen) or "")
        except Unreadable as error:
            return attrs.evolve(found, flaw=str(error.__cause__), unread=True)

    def verify(self, step: int | None = None) -> dict[int, str]:
        """See `CheckpointManager.verify`."""
        found = self.found() if step is None else [self._only(step)]
        flaws = {one.step: self.verified(one).flaw for one in found}
        return {step: flaw for step, flaw in sorted(flaws.items()) if flaw}

    # -- its bytes ----------------------------------------------------------------------------

    def read(self, manifest: Manifest, number: int = 0) -> mmap.mmap:
        """One file of a checkpoint, checked, in memory of its own.

        Raises:
            CheckpointCorrupt: it is damaged. Unreadable: it cannot be read.
        """
        reason = self._size_flaw(manifest, number)
        if reason:
            raise self._damaged(manifest, reason)
        size = manifest.files[number].size
        try:
            memory = new_memory(max(1, size))
        except (OSError, OverflowError) as error:
            # It may be whole: to go on from an older one, on a machine that is too small, loses it.
            what = self.describe(manifest.step)
            raise Unreadable(f"{what} needs {size} bytes of memory: {error}") from error
        reason = self._sum_flaw(manifest, number, memoryview(memory))
        if reason:
            raise self._damaged(manifest, reason)
        if len(manifest.files) == 1:
            self.know(manifest, Health.GOOD)
        return memory

    def mapped(self, manifest: Manifest, number: int) -> mmap.mmap:
        """One file of a checkpoint on this machine's disk, not yet checked; what is written to the
        memory does not change it. Raises as `read`."""
        file, path = manifest.files[number], os.path.join(self.place.name, _path(manifest, number))
        try:
            with self._reading(manifest), open(path, "rb") as opened:
                rights = mmap.PROT_READ | mmap.PROT_WRITE
                return mmap.mmap(opened.fileno(), file.size, mmap.MAP_PRIVATE, rights)
        except (FileNotFoundError, ValueError) as error:
            # It is not there, or shorter than it was.
            raise self._damaged(manifest, f"{file.name}: {error}") from error

    def head(self, manifest: Manifest, number: int = 0) -> bytes:
        """The first bytes of one file, up to the elements of its pack; not checked.

        Raises:
            CheckpointCorrupt: the file is not there. Unreadable: it cannot be read.
        """
        _, size = read_size(self._first(manifest, number, PREFIX_BYTES))
        return self._first(manifest, number, size)

    def _first(self, manifest: Manifest, number: int, count: int) -> bytes:
        """So many bytes of one file, or all that it has; see `head`."""
        file = manifest.files[number]
        buffer = bytearray(min(count, file.size))
        try:
            with self._reading(manifest):
                done = self.place.read_into(_path(manifest, number), memoryview(buffer))
        except FileNotFoundError:
            raise self._damaged(manifest, f"{file.name} is missing") from None
        return bytes(buffer[:done])

    def _damaged(self, manifest: Manifest, reason: str) -> CheckpointCorrupt:
        self.know(manifest, Health.BAD)
        return CheckpointCorrupt(f"{self.describe(manifest.step)} is damaged: {reason}")

    def _size_flaw(self, manifest: Manifest, number: int) -> str | None:
        """What is wrong with the size of a large file, by its first bytes; None if nothing.

        Nobody asks for memory, or reads for an hour, for a file that was made long of nothing. What
        is small is soon summed.
        """
        file = manifest.files[number]
        if file.size <= CHUNK:
            return None
        try:
            size, _ = read_size(self._first(manifest, number, PREFIX_BYTES))
        except CheckpointCorrupt as error:
            return f"{file.name}: {error}"
        return None if size == file.size else f"{file.name} is a pack of {size} bytes"

    def _sum_flaw(
        self,
        manifest: Manifest,
        number: int,
        into: memoryview | None,
        seen: Callable[[memoryview], None] = no_news,
    ) -> str | None:
        """What is wrong with a file, having read every byte of it; None if nothing."""
        file, path = manifest.files[number], _path(manifest, number)

        def read(start: int, buffer: memoryview, piece: Callable[[memoryview], None]) -> int:
            return self.place.read_into(path, buffer, start=start, seen=piece)

        try:
            with self._reading(manifest):
                return sum_flaw(file, read, into, threads=self.place.readers, seen=seen)
        except FileNotFoundError:
            return f"{file.name} is missing"

    @contextlib.contextmanager
    def _reading(self, manifest: Manifest) -> Iterator[None]:
        """Whatever the place answers says nothing of the data, but that a file is not there."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            what = self.describe(manifest.step)
            raise Unreadable(f"{what} cannot be read: {error}") from error

    # -- which one, and its state --------------------------------------------------------------

    def load(
        self, step: int | None, *, like: object = None, map_location: MapLocation = "cpu"
    ) -> Any:
        """See `CheckpointManager.load`."""
        read = partial(self._state, like=like, map_location=map_location)
        if step is not None:
            return read(self._whole(self._only(check_step(step))))
        return self._take_first(self.found(), read)

    def latest(self) -> int | None:
        """See `CheckpointManager.latest`."""
        with contextlib.suppress(FileNotFoundError):
            return self._take_first(self.found(), self.check)
        return None

    def _take_first(self, candidates: Iterable[Found], take: Callable[[Manifest], T]) -> T:
        """What `take` gives for the first of these that it does not raise for.

        Raises:
            FileNotFoundError: there is none. CheckpointCorrupt: there are some, and `take` raised
                for all of them. Unreadable: an earlier one may be whole, and to take a later one
                in its place would be a loss.
        """
        self.passed_over = {}
        for found in candidates:
            try:
                return take(self._whole(found))
            except Unreadable:
                raise
            except CheckpointError as error:
                self.passed_over[found.step] = str(error)
                log.warning("checkpoint skipped: %s", error)
        if self.passed_over:
            raise CheckpointCorrupt(
                f"none of the checkpoints in {self.place.name} can be used: "
                + "; ".join(self.passed_over.values())
            )
        raise FileNotFoundError(f"there is no complete checkpoint in {self.place.name}")

    def _only(self, step: int) -> Found:
        found = self.look(step)
        if found is None:
            raise FileNotFoundError(f"there is no {self.describe(step)}")
        return found

    def _whole(self, found: Found) -> Manifest:
        if found.manifest is None:
            kind = Unreadable if found.unread else CheckpointCorrupt
            raise kind(f"{self.describe(found.step)} {found.trouble}")
        return found.manifest

    def _state(self, manifest: Manifest, *, like: object, map_location: MapLocation) -> Any:
        # Torch takes its time to import, and who looks at a folder does not need it.
        from .pack import unpack

        try:
            if manifest.parts:
                return self._sharded_state(manifest, like, map_location)
            memory = memoryview(self.read(manifest))
            # The memory is the tensors' own: nobody else has it.
            return unpack(memory, map_location=map_location, copy=False)
        except CheckpointCorrupt:
            self.know(manifest, Health.BAD)
            raise

    def _sharded_state(self, manifest: Manifest, like: object, map_location: MapLocation) -> Any:
        from .reshard import load_parts

        heads = [self.head(manifest, number) for number in range(manifest.parts)]
        return load_parts(
            heads,
            lambda number: memoryview(self.read(manifest, number)),
            like,
            map_location=map_location,
        )


def sum_flaw(
    file: DataFile,
    read: Fill,
    into: memoryview | None = None,
    *,
    threads: int = 1,
    seen: Callable[[memoryview], None] = no_news,
) -> str | None:
    """Read bytes, and return how they differ from what is expected, or None if they do not.

    Args:
        file: how many bytes there must be, and their checksum.
        read: reads some of them, as `read_summed` calls it.
        into: where the bytes go; without it they are only checked.
    """
    count, summed = read_summed(read, file.size, into, threads=threads, seen=seen)
    if count != file.size:
        return f"{file.name} has {count} of {file.size} bytes"
    if summed != file.checksum:
        return f"{file.name} should have checksum {file.checksum:08x}, its bytes give {summed:08x}"
    return None


def _path(manifest: Manifest, number: int) -> str:
    return f"{folder_of(manifest.step)}/{manifest.files[number].name}"
