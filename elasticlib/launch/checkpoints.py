"""`elasticlib checkpoints`: what lies in a folder of checkpoints, whether it is whole, what can go.

Tables for people, `--json` for programs; torch is not needed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from ..checkpoint.commit import Committer
from ..checkpoint.fence import Writer
from ..checkpoint.folder import CheckpointFolder, Found, open_place
from ..checkpoint.prune import Retention
from ..clock import date_of, monotonic
from ..errors import CheckpointError, ConfigError
from ..visible import visible

REPORT_SECONDS = 5.0
"""Between two lines about progress, where there is no terminal to show it in place."""
REDRAW_SECONDS = 0.2


def add_checkpoints(commands: Any) -> None:
    """Add the subcommand to those of `elasticlib`."""
    parser = commands.add_parser(
        "checkpoints",
        help="list, verify or prune a folder of checkpoints",
        description="What a CheckpointManager has saved in a folder, or below an fsspec URL.",
    )
    acts = parser.add_subparsers(required=True, metavar="ACTION")
    _add(acts, "ls", _list, "list the checkpoints, judged by their manifests and sizes")
    verify = _add(
        acts, "verify", _verify, "read every byte of them; the exit status is 1 if one is damaged"
    )
    verify.add_argument("--step", type=int, help="that of this step alone")
    prune = _add(
        acts, "prune", _prune, "delete what is not to be kept; never the newest that is whole"
    )
    prune.add_argument(
        "--keep-last", type=int, required=True, metavar="N", help="keep the newest N"
    )
    prune.add_argument(
        "--keep-every", type=int, default=0, metavar="N", help="keep each step that N divides"
    )
    prune.add_argument("--dry-run", action="store_true", help="say what would go, delete nothing")


def _add(
    acts: Any, name: str, act: Callable[[argparse.Namespace, CheckpointFolder], int], says: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = acts.add_parser(name, help=says, description=says)
    parser.add_argument("folder", metavar="DIR", help="a folder, or an fsspec URL")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.set_defaults(run=lambda chosen: _run(name, act, chosen))
    return parser


def _run(
    name: str,
    act: Callable[[argparse.Namespace, CheckpointFolder], int],
    chosen: argparse.Namespace,
) -> int:
    try:
        if "://" not in chosen.folder and not os.path.isdir(chosen.folder):
            raise CheckpointError(f"there is no folder {chosen.folder}")
        return act(chosen, CheckpointFolder(open_place(chosen.folder)))
    except ConfigError as error:
        print(f"elasticlib checkpoints {name}: error: {error}", file=sys.stderr)
        return 2
    except CheckpointError as error:
        print(f"elasticlib checkpoints {name}: {error}", file=sys.stderr)
        return 1


def _list(chosen: argparse.Namespace, folder: CheckpointFolder) -> int:
    found = folder.found()
    if chosen.json:
        print(json.dumps([_fields(one) for one in found], indent=1))
    elif found:
        _table(("STEP", "SIZE", "SAVED", "BY", "STATE"), [_row(one) for one in found])
    else:
        print(f"no checkpoints in {folder.place.name}")
    return 0


def _verify(chosen: argparse.Namespace, folder: CheckpointFolder) -> int:
    found = folder.found()
    if chosen.step is not None:
        found = [one for one in found if one.step == chosen.step]
        if not found:
            raise CheckpointError(f"there is no {folder.describe(chosen.step)}")
    total = sum(one.manifest.size for one in found if one.manifest)
    checked = []
    with Progress("verified", total) as progress:
        for one in found:
            checked.append(folder.verified(one, progress.seen))
    if chosen.json:
        print(json.dumps([_fields(one) for one in checked], indent=1))
    elif checked:
        _table(("STEP", "SIZE", "STATE"), [(*_row(one)[:2], _row(one)[-1]) for one in checked])
    else:
        print(f"no checkpoints in {folder.place.name}")
    return int(any(one.flaw for one in checked))


def _prune(chosen: argparse.Namespace, folder: CheckpointFolder) -> int:
    retention = Retention(chosen.keep_last, chosen.keep_every)
    # It never claims the folder: a job that writes there goes on.
    committer = Committer(folder, Writer("", "", 0, ""), retention)
    with Progress("verified", 0) as progress:
        choose = committer.choose if chosen.dry_run else committer.prune
        selection = choose(progress.seen)
    if chosen.json:
        print(json.dumps({"kept": selection.kept, "deleted": selection.deleted}))
        return 0
    verb = "would delete" if chosen.dry_run else "deleted"
    print(f"{verb} {_steps(selection.deleted)}; kept {_steps(selection.kept)}")
    if selection.reason and selection.kept:
        print(f"nothing goes: {selection.reason}", file=sys.stderr)
        return 1
    return 0


class Progress:
    """How many bytes are done: in place on a terminal, else a line every few seconds.

    total: bytes, 0 if nobody knows. every: seconds between two reports.
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
        speed = size_text(self._done / max(now - self._began, 1e-9))
        of = f" of {size_text(self._total)}" if self._total else ""
        line = f"{self._verb} {size_text(self._done)}{of}, {speed}/s"
        text = f"\r{line}\x1b[K" if self._terminal else f"{line}\n"
        print(text, end="", file=self._stream, flush=True)


def size_text(size: float) -> str:
    """Bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _fields(one: Found) -> dict[str, Any]:
    made = one.manifest
    fields: dict[str, Any] = {"step": one.step, "whole": not one.flaw, "flaw": one.flaw}
    if made is not None:
        fields |= {"bytes": made.size, "parts": made.parts, "saved_at": made.saved_at}
        fields |= {"run": made.run, "generation": made.generation}
    return fields


def _row(one: Found) -> tuple[str, ...]:
    made, state = one.manifest, one.trouble.removeprefix("is ") if one.flaw else "whole"
    if made is None:
        return (str(one.step), "-", "-", "-", state)
    size = size_text(made.size) + (f" in {made.parts} parts" if made.parts else "")
    by = f"{made.run} generation {made.generation}" if made.run else "-"
    return (str(one.step), size, date_of(made.saved_at), by, state)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    for row in (head, *rows):
        cells = zip(row, widths, strict=True)
        # Names in it are whoever's who wrote the folder, and not for a terminal to obey.
        print(visible("  ".join(cell.ljust(width) for cell, width in cells).rstrip()))


def _steps(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) if steps else "none"
