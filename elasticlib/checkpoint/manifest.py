"""What one checkpoint consists of, and which checkpoints are kept; pure.

A manifest names the files with their sizes and sums, who wrote them, and when; each of its own
bytes is summed, too. A checkpoint counts from the moment at which its manifest, written last, is in
place.

The newest few are kept, one each so many steps, the best, and always the last good one. Nothing is
deleted while no checkpoint that stays is known to be good, and never what could not be read: it may
be whole.
"""

from __future__ import annotations

import enum
import json
import re
import zlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from ..errors import CheckpointCorrupt, CheckpointError, ConfigError
from ..foreign import read_fields, read_object

FORMAT = 3
"""1 has packs of format 1, and 2 those of format 2; metrics and world are of 3. A version that
reads no others leaves those of a later one alone, and takes none older in their place."""

NAME = "manifest.json"
MAX_STEP = MAX_BYTES = 2**63 - 1

_FOLDER = re.compile(r"step-([0-9]{10,19})")
_FILE = re.compile(r"[^/\0]+")
_ASIDE = re.compile(r"\.(?P<target>.+)\.[0-9a-f]{8}\.partial", re.DOTALL)
_YEAR_10000 = 253402300800
"""In seconds since 1970, the first that no calendar here can show."""


class OtherFormat(CheckpointCorrupt):
    """Not a byte of the manifest was changed: a newer version wrote it so."""


@attrs.frozen
class DataFile:
    """A file of a checkpoint: its name in the checkpoint's folder, bytes, and their CRC-32."""

    name: str
    size: int
    crc32: int


@attrs.frozen
class Manifest:
    """One checkpoint.

    step: after which the state was taken. parts: 0 for a state that is the same on all ranks, in
    one file; else so many ranks wrote a file each, in the order of their ranks. run, launch,
    generation, writer: see `commit.Writer`. saved_at: seconds since 1970 by the writer's wall
    clock, for people. metrics: what the script measured of the state, such as its loss; finite
    numbers by name. world: the number of ranks that the job had; 0 where it is not known.
    """

    step: int
    files: tuple[DataFile, ...]
    parts: int = 0
    run: str = ""
    launch: str = ""
    generation: int = 0
    writer: str = ""
    saved_at: float = 0.0
    metrics: Mapping[str, float] = attrs.Factory(dict)
    world: int = 0

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


def aside_name(target: str, token: int) -> str:
    """A hidden name that no checkpoint has, under which `target` is written before it is whole;
    `token` tells apart those who write it."""
    return f".{target}.{token % 2**32:08x}.partial"


def target_of(name: str) -> str | None:
    """The name that the file `name` was being written for; None if it is no such file."""
    match = _ASIDE.fullmatch(name)
    return match["target"] if match else None


def encode(manifest: Manifest) -> bytes:
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


def decode(data: bytes) -> Manifest:
    """The manifest again.

    Raises:
        CheckpointCorrupt: it was cut short or changed, or is none. OtherFormat: it is of a newer
            version.
    """
    body = body_of(data)
    if body is None:
        raise CheckpointCorrupt("its manifest was changed or cut short")
    try:
        return _manifest(read_object(body))
    except ValueError as error:
        raise CheckpointCorrupt(f"its manifest is none: {error}") from error


def _manifest(fields: dict[str, Any]) -> Manifest:
    found = fields.pop("format", None)
    if type(found) is not int or found < 1:
        raise ValueError(f"its format is {found!r:.80}, must be 1 to {FORMAT}")
    surplus = fields.keys() - attrs.fields_dict(Manifest).keys()
    if found < 3:
        surplus |= fields.keys() & {"metrics", "world"}
    if found > FORMAT or surplus:
        newer = f"format {found}" if found > FORMAT else f"the field {min(surplus)!r:.80}"
        raise OtherFormat(f"its manifest has {newer}, this version reads formats 1 to {FORMAT}")
    rows = fields.pop("files", None)
    if type(rows) is not list:
        raise ValueError(f"files is {rows!r:.80}, must be a list")
    files = tuple(read_fields(DataFile, row) for row in rows)
    metrics = fields.pop("metrics", {})
    if type(metrics) is not dict or not all(map(_is_finite, metrics.values())):
        raise ValueError(f"metrics are {metrics!r:.80}, must be finite numbers by name")
    manifest = read_fields(Manifest, fields, files=files, metrics=metrics)
    reason = _out_of_range(manifest)
    if reason:
        raise ValueError(reason)
    return manifest


def _is_finite(value: object) -> bool:
    # What is no number in JSON is text here, and an int may be larger than any float.
    return type(value) is float or (type(value) is int and -MAX_BYTES <= value <= MAX_BYTES)


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
        if not _FILE.fullmatch(file.name) or file.name in (".", "..", NAME):
            return f"{file.name!r:.80} is no name of a file beside it"
        if not (0 <= file.size <= MAX_BYTES and 0 <= file.crc32 < 1 << 32):
            return f"{file.name} has {file.size} bytes with the CRC-32 {file.crc32:x}"
    return None


def flaw(manifest: Manifest, sizes: dict[str, int]) -> str | None:
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


# -- which are kept --------------------------------------------------------------------------------


class Health(enum.Enum):
    """GOOD: every byte was written or checked by who asks. BAD: read, and found damaged. UNREAD:
    it could not be read. UNKNOWN: none of these."""

    GOOD = "good"
    UNKNOWN = "unknown"
    UNREAD = "unread"
    BAD = "bad"


Metrics = Mapping[int, Mapping[str, float]]
"""By step, what was measured of it."""


@attrs.frozen
class Retention:
    """last: how many of the newest are kept. every: so is each whose step it divides (0: none).
    best: a metric, whether its "min" or "max" is best, and how many of the best are kept, too."""

    last: int = 3
    every: int = 0
    best: tuple[str, str, int] | None = None

    def __attrs_post_init__(self) -> None:
        for name, least in (("last", 1), ("every", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"need keep_{name} >= {least}, a whole number, got {value!r}")
        match self.best:
            case None:
                pass
            case (str(), "min" | "max", int(count)) if type(count) is int and count >= 1:
                pass
            case _:
                raise ConfigError(
                    f'need keep_best such as ("loss", "min", 3): a metric, "min" or "max", and how '
                    f"many (>= 1), got {self.best!r}"
                )


def best_of(steps: Iterable[int], metrics: Metrics, metric: str, order: str) -> list[int]:
    """Those of which this was measured, the best first; of two that are as good, the newer one.

    Args:
        order: "min" if less is better, "max" if more is.
    """
    sign = 1 if order == "min" else -1
    known = (step for step in steps if metric in metrics.get(step, {}))
    return sorted(known, key=lambda step: (sign * metrics[step][metric], -step))


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
    metrics: Metrics = MappingProxyType({}),
) -> Selection:
    """Which of these checkpoints to keep. Those UNREAD stay, and are not counted: what is whole
    does not go in their place.

    Args:
        found: the steps that there are, and how each is.
        just: the step that was written just now: it stays, whatever its number. (Who went back
            to an older step writes smaller ones than there are.)
        metrics: what the manifests say; a step without the metric in question is never best.
    """
    health = dict(found)
    steps = sorted(health)
    unread = [step for step in steps if health[step] is Health.UNREAD]
    usable = [step for step in steps if health[step] in (Health.GOOD, Health.UNKNOWN)]
    good = [step for step in steps if health[step] is Health.GOOD]
    if not good:
        return Selection(tuple(steps), (), "none is known to be good")
    kept = {*usable[-retention.last :], good[-1], *unread}
    if retention.every:
        kept |= {step for step in usable if step % retention.every == 0}
    if retention.best:
        metric, order, count = retention.best
        kept |= {*best_of(usable, metrics, metric, order)[:count]}
    if just in health:
        kept.add(just)
    return Selection(tuple(sorted(kept)), tuple(step for step in steps if step not in kept))
