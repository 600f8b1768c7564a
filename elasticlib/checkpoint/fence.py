"""Who may write into a folder of checkpoints: one writer at a time, and never an older one again.

The folder says who has it. A later generation of a launch takes it from an earlier one, and a
new launch from the one before; whom it was taken from cannot commit any more, nor take it back.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Container, Mapping

import attrs

from ..errors import CheckpointCorrupt
from ..foreign import read_fields, read_object
from .manifest import target_of

FORMAT = 1
NAME = "fence.json"
REMEMBERED = 64
"""So many launches that lost the folder are refused by name; it is small, and they are few."""

_DATA = re.compile(r"(?:state|part-[0-9]+)\.([0-9a-f]{16})\.[0-9]+\.pack")


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


def claim(fence: Fence | None, writer: Writer, *, beside: bool = False) -> Fence | str:
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
        return Fence(writer, (*fence.lost, holder.start)[-REMEMBERED:])
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
        return f"{NAME} is gone from it"
    holder = fence.holder
    if holder.token == writer.token:
        return ""
    if beside and (holder.start, holder.generation) == (writer.start, writer.generation):
        return ""
    return f"{holder} has taken it over from {writer}"


def encode(fence: Fence) -> bytes:
    """One line of JSON, and one with its sum."""
    body = json.dumps({"format": FORMAT, **attrs.asdict(fence)}).encode("ascii")
    return body + b"\n%08x\n" % zlib.crc32(body)


def decode(data: bytes) -> Fence:
    """The fence again. Raises CheckpointCorrupt."""
    body, _, summed = data.removesuffix(b"\n").rpartition(b"\n")
    try:
        if int(summed, 16) != zlib.crc32(body):
            raise ValueError("it was changed or cut short")
        fields = read_object(body)
        if fields.get("format") != FORMAT:
            raise ValueError(f"format {fields.get('format')!r:.80}, this version reads {FORMAT}")
        lost = fields.get("lost")
        if type(lost) is not list or not all(type(start) is str for start in lost):
            raise ValueError(f"lost is {lost!r:.80}, must be a list of names")
        return Fence(read_fields(Writer, fields.get("holder")), tuple(lost))
    except ValueError as error:
        raise CheckpointCorrupt(f"{NAME} cannot be read: {error}") from error


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
