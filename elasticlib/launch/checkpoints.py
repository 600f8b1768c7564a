"""`elasticlib checkpoints`: lists the checkpoints in a folder, and verifies them.

It prints a table, or JSON with `--json`. Nothing here needs torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from ..checkpoint.catalog import CheckpointCatalog, CheckpointEntry
from ..checkpoint.storage import open_storage
from ..clock import date_of, monotonic, wall
from ..errors import CheckpointError, ConfigError
from ..observe.formatting import format_bytes, format_duration
from .command_tools import Table, complain, show

REPORT_SECONDS = 5.0
"""Between two lines about progress, where there is no terminal to show it in place."""
REDRAW_SECONDS = 0.2
HEAD = ("STEP", "SIZE", "SAVED", "AGE", "WORLD", "PINNED", "BY", "STATE")

COMPLETE, VERIFIED = "complete", "verified"
"""The state of a checkpoint whose files are all there with their sizes, and of one every byte of
which was read and compared with its checksum."""


def add_checkpoints(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `elasticlib checkpoints`."""
    parser.description = (
        "List the checkpoints that a CheckpointManager has saved in a folder, or below an fsspec "
        "URL, judged by their manifests and sizes."
    )
    parser.add_argument("dir", metavar="DIR", help="a folder, or an fsspec URL")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="also read every byte and compare it with its checksum; the exit status is 1 if a "
        "checkpoint is damaged",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    """Run the command, and return its exit status; an error is printed as one sentence."""
    try:
        return _verify(chosen) if chosen.verify else _list(chosen)
    except ConfigError as error:
        return complain("checkpoints: error", error, 2)
    except (CheckpointError, FileNotFoundError) as error:
        return complain("checkpoints", error, 1)


def _folder(chosen: argparse.Namespace) -> CheckpointCatalog:
    path = chosen.dir
    if "://" not in path and not os.path.isdir(path):
        raise CheckpointError(f"there is no folder {path}")
    return CheckpointCatalog(open_storage(path))


def _list(chosen: argparse.Namespace) -> int:
    _print(chosen, _folder(chosen).list_entries(), range(len(HEAD)), COMPLETE)
    return 0


def _verify(chosen: argparse.Namespace) -> int:
    folder = _folder(chosen)
    found = folder.list_entries()
    total = sum(one.manifest.size for one in found if one.manifest)
    with Progress("verified", total) as progress:
        checked = [folder.verified(one, progress.seen) for one in found]
    _print(chosen, checked, (0, 1, -1), VERIFIED)
    return int(any(one.corruption for one in checked))


def _print(
    chosen: argparse.Namespace,
    found: Sequence[CheckpointEntry],
    columns: Sequence[int],
    intact: str,
) -> None:
    """Print checkpoints as a document or as a table of these columns.

    Args:
        intact: the state of those without a flaw, `COMPLETE` or `VERIFIED`.
    """
    if chosen.json:
        print(json.dumps([_fields(one, intact) for one in found], indent=1))
    elif found:
        table = (HEAD, *(_row(one, intact) for one in found))
        head, *rows = [[row[at] for at in columns] for row in table]
        show(Table(head, rows))
    else:
        print(f"no checkpoints in {chosen.dir}")


class Progress:
    """How many bytes are done: in place on a terminal, else a line every few seconds.

    total: bytes. every: seconds between two reports.
    """

    def __init__(
        self,
        verb: str,
        total: int,
        stream: TextIO | None = None,
        *,
        every: float | None = None,
    ) -> None:
        self._verb, self._total = verb, total
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        usual = REDRAW_SECONDS if self._terminal else REPORT_SECONDS
        self._every = usual if every is None else every
        self._done = 0
        self._began = self._told = monotonic()
        self._drawn = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn and self._terminal:
            print("\r\x1b[K", end="", file=self._stream, flush=True)

    def seen(self, chunk: memoryview) -> None:
        """These bytes are done, too."""
        self._done += len(chunk)
        now = monotonic()
        if now - self._told < self._every:
            return
        self._told, self._drawn = now, True
        speed = format_bytes(self._done / max(now - self._began, 1e-9))
        line = f"{self._verb} {format_bytes(self._done)} of {format_bytes(self._total)}, {speed}/s"
        text = f"\r{line}\x1b[K" if self._terminal else f"{line}\n"
        print(text, end="", file=self._stream, flush=True)


def _fields(one: CheckpointEntry, intact: str) -> dict[str, Any]:
    made, flawed = one.manifest, "unreadable" if one.is_unreadable else "damaged"
    status = flawed if one.corruption else intact
    fields: dict[str, Any] = {"step": one.step, "status": status, "flaw": one.corruption}
    if made is not None:
        fields |= {"bytes": made.size, "parts": made.num_parts, "saved_at": made.saved_at}
        fields |= {"run": made.run_id, "generation": made.generation}
        fields |= {"world": made.world_size or None, "pinned": made.is_pinned}
    return fields


def _row(one: CheckpointEntry, intact: str) -> tuple[str, ...]:
    made, state = one.manifest, one.problem.removeprefix("is ") if one.corruption else intact
    if made is None:
        return (str(one.step), *"------", state)
    much = format_bytes(made.size) + (f" in {made.num_parts} parts" if made.num_parts else "")
    by = f"{made.run_id} generation {made.generation}" if made.run_id else "-"
    pinned = "pinned" if made.is_pinned else "-"
    age = format_duration(max(0.0, wall() - made.saved_at))
    world = str(made.world_size or "-")
    return (str(one.step), much, date_of(made.saved_at), age, world, pinned, by, state)
