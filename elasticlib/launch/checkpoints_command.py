"""The command `elasticlib checkpoints`: list or verify the checkpoints in a directory.

It prints a table, or JSON with `--json`. It does not import torch.
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
from ..clock import format_utc, monotonic, wall
from ..errors import CheckpointError, ConfigError
from ..observe.formatting import format_bytes, format_duration
from .cli_output import Table, print_error, show

PROGRESS_LINE_INTERVAL_S = 5.0  # without a terminal
PROGRESS_REDRAW_INTERVAL_S = 0.2
HEAD = ("STEP", "SIZE", "SAVED", "AGE", "WORLD", "PINNED", "RUN", "STATE")

COMPLETE = "complete"  # all files exist with their sizes
VERIFIED = "verified"  # in addition, every byte was read and compared with its checksum


def add_checkpoints(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `elasticlib checkpoints`."""
    parser.description = (
        "List the checkpoints that a CheckpointManager has saved in a directory or below an fsspec "
        "URL. Their manifests and the sizes of their files are checked."
    )
    parser.add_argument("dir", metavar="DIR", help="a directory or an fsspec URL")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="also read every byte and compare it with its checksum; the exit status is 1 if a "
        "checkpoint is corrupt",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    try:
        return _verify(args) if args.verify else _list(args)
    except ConfigError as error:
        return print_error("checkpoints: error", error, 2)
    except (CheckpointError, FileNotFoundError) as error:
        return print_error("checkpoints", error, 1)


def _catalog(args: argparse.Namespace) -> CheckpointCatalog:
    path = args.dir
    if "://" not in path and not os.path.isdir(path):
        raise CheckpointError(f"directory {path} does not exist")
    return CheckpointCatalog(open_storage(path))


def _list(args: argparse.Namespace) -> int:
    _print(args, _catalog(args).list_entries(), range(len(HEAD)), COMPLETE)
    return 0


def _verify(args: argparse.Namespace) -> int:
    catalog = _catalog(args)
    entries = catalog.list_entries()
    total = sum(entry.manifest.size for entry in entries if entry.manifest)
    with Progress("verified", total) as progress:
        checked = [catalog.verified(entry, progress.add) for entry in entries]
    _print(args, checked, (0, 1, -1), VERIFIED)
    return int(any(entry.corruption for entry in checked))


def _print(
    args: argparse.Namespace,
    entries: Sequence[CheckpointEntry],
    columns: Sequence[int],
    state_if_intact: str,
) -> None:
    """Print checkpoints as a document or as a table of these columns.

    Args:
        args: the arguments of the command.
        entries: the checkpoints.
        columns: the indices of the columns.
        state_if_intact: the state of intact checkpoints, `COMPLETE` or `VERIFIED`.
    """
    if args.json:
        print(json.dumps([_fields(entry, state_if_intact) for entry in entries], indent=1))
    elif entries:
        table = (HEAD, *(_row(entry, state_if_intact) for entry in entries))
        head, *rows = [[row[at] for at in columns] for row in table]
        show(Table(head, rows))
    else:
        print(f"no checkpoints in {args.dir}")


class Progress:
    """Shows how many bytes are done: in place on a terminal, else as a line every few seconds.

    Args:
        verb: what is done with the bytes, for example "verified".
        total: the number of bytes.
        stream: where to print; stderr by default.
        interval_s: the time between two reports.
    """

    def __init__(
        self,
        verb: str,
        total: int,
        stream: TextIO | None = None,
        *,
        interval_s: float | None = None,
    ) -> None:
        self._verb, self._total = verb, total
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        default = PROGRESS_REDRAW_INTERVAL_S if self._is_terminal else PROGRESS_LINE_INTERVAL_S
        self._interval_s = default if interval_s is None else interval_s
        self._done = 0
        self._started_at = self._reported_at = monotonic()
        self._has_output = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._has_output and self._is_terminal:
            print("\r\x1b[K", end="", file=self._stream, flush=True)

    def add(self, chunk: memoryview) -> None:
        """Count a chunk as done."""
        self._done += len(chunk)
        now = monotonic()
        if now - self._reported_at < self._interval_s:
            return
        self._reported_at, self._has_output = now, True
        speed = format_bytes(self._done / max(now - self._started_at, 1e-9))
        line = f"{self._verb} {format_bytes(self._done)} of {format_bytes(self._total)}, {speed}/s"
        text = f"\r{line}\x1b[K" if self._is_terminal else f"{line}\n"
        print(text, end="", file=self._stream, flush=True)


def _fields(entry: CheckpointEntry, state_if_intact: str) -> dict[str, Any]:
    manifest = entry.manifest
    status = state_if_intact
    if entry.corruption:
        status = "unreadable" if entry.is_unreadable else "corrupt"
    fields: dict[str, Any] = {"step": entry.step, "status": status, "error": entry.corruption}
    if manifest is not None:
        fields |= {
            "bytes": manifest.size,
            "parts": manifest.num_parts,
            "saved_at": manifest.saved_at,
            "run": manifest.run_id,
            "generation": manifest.generation,
            "world": manifest.world_size or None,
            "pinned": manifest.is_pinned,
        }
    return fields


def _row(entry: CheckpointEntry, state_if_intact: str) -> tuple[str, ...]:
    manifest = entry.manifest
    state = entry.problem.removeprefix("is ") if entry.corruption else state_if_intact
    if manifest is None:
        return (str(entry.step), *"------", state)
    parts = f" in {manifest.num_parts} parts" if manifest.num_parts else ""
    run = f"{manifest.run_id} generation {manifest.generation}" if manifest.run_id else "-"
    return (
        str(entry.step),
        format_bytes(manifest.size) + parts,
        format_utc(manifest.saved_at),
        format_duration(max(0.0, wall() - manifest.saved_at)),
        str(manifest.world_size or "-"),
        "pinned" if manifest.is_pinned else "-",
        run,
        state,
    )
