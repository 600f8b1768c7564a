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

from ..checkpoint.catalog import CheckpointCatalog, describe_problem
from ..checkpoint.refs import Integrity, Line, StateRef, fork_step, position
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
        "URL. Their manifests and the sizes of their files are checked. A state is abandoned "
        "once the job has gone back to a step before it and has saved something since then."
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
    catalog = _catalog(args)
    refs = _newest_first(catalog)
    _print(args, refs, catalog.line(refs), range(len(HEAD)), COMPLETE)
    return 0


def _verify(args: argparse.Namespace) -> int:
    catalog = _catalog(args)
    refs = _newest_first(catalog)
    total = sum(ref.size for ref in refs if ref.is_usable)
    with Progress("verified", total) as progress:
        checked = [catalog.verified(ref, progress.add) for ref in refs]
    _print(args, checked, catalog.line(refs), (0, 1, -1), VERIFIED)
    return int(any(ref.problem for ref in checked))


def _newest_first(catalog: CheckpointCatalog) -> list[StateRef]:
    refs = catalog.list_refs()
    line = catalog.line(refs)

    def order(ref: StateRef) -> tuple[object, ...]:
        return (ref.step, position(line, ref) is not None, ref.saved_at, ref.number)

    return sorted(refs, key=order, reverse=True)


def _print(
    args: argparse.Namespace,
    refs: Sequence[StateRef],
    line: Line,
    columns: Sequence[int],
    state_if_intact: str,
) -> None:
    """Print checkpoints as a document or as a table of these columns.

    Args:
        args: the arguments of the command.
        refs: the checkpoints.
        line: the line of the job.
        columns: the indices of the columns.
        state_if_intact: the state of intact checkpoints, `COMPLETE` or `VERIFIED`.
    """
    if args.json:
        print(json.dumps([_fields(ref, line, state_if_intact) for ref in refs], indent=1))
    elif refs:
        table = (HEAD, *(_row(ref, line, state_if_intact) for ref in refs))
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


def _fields(ref: StateRef, line: Line, state_if_intact: str) -> dict[str, Any]:
    status = state_if_intact
    if ref.problem:
        status = "unreadable" if ref.integrity is Integrity.UNREADABLE else "corrupt"
    is_abandoned = position(line, ref) is None
    fields: dict[str, Any] = {
        "step": ref.step,
        "folder": ref.place,
        "status": status,
        "error": ref.problem,
        "abandoned": is_abandoned,
    }
    if is_abandoned:
        fields["fork_step"] = fork_step(ref, line)
    if not ref.problem:
        fields |= {
            "bytes": ref.size,
            "parts": ref.parts,
            "saved_at": ref.saved_at,
            "run": ref.writer.run,
            "generation": ref.writer.generation,
            "world": ref.world_size or None,
            "pinned": ref.is_pinned,
            "metrics": dict(ref.metrics),
        }
    return fields


def _row(ref: StateRef, line: Line, state_if_intact: str) -> tuple[str, ...]:
    state = describe_problem(ref).removeprefix("is ") if ref.problem else state_if_intact
    if position(line, ref) is None:
        fork = fork_step(ref, line)
        state += ", abandoned" if fork is None else f", abandoned when the job went back to {fork}"
    if ref.problem:
        return (str(ref.step), *"------", state)
    parts = f" in {ref.parts} parts" if ref.parts else ""
    writer = ref.writer
    return (
        str(ref.step),
        format_bytes(ref.size) + parts,
        format_utc(ref.saved_at),
        format_duration(max(0.0, wall() - ref.saved_at)),
        str(ref.world_size or "-"),
        "pinned" if ref.is_pinned else "-",
        f"{writer.run} generation {writer.generation}" if writer.run else "-",
        state,
    )
