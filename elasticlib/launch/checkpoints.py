"""`elasticlib checkpoints`: what lies in a folder of checkpoints, whether it is whole, what can go;
and states to and from what torch itself writes.

Tables for people, `--json` for programs. Only `convert` needs torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import attrs

from ..checkpoint.commit import Committer, Writer
from ..checkpoint.folder import CheckpointFolder, Found, Retention, open_place
from ..checkpoint.pack_head import Row, read_head, rows_of
from ..clock import date_of, monotonic, wall
from ..errors import CheckpointError, ConfigError
from ..observe.wording import duration, size
from ..visible import visible
from .command_tools import Table, complain, show, table_lines

REPORT_SECONDS = 5.0
"""Between two lines about progress, where there is no terminal to show it in place."""
REDRAW_SECONDS = 0.2
HEAD = ("STEP", "SIZE", "SAVED", "AGE", "WORLD", "METRICS", "BY", "STATE")

COMPLETE, VERIFIED = "complete", "verified"
"""The state of a checkpoint whose files are all there with their sizes, and of one every byte of
which was read and compared with its checksum."""

FORMS = ("folder", "torch", "dcp")
"""What `convert` writes: our folder of checkpoints, a file of torch.save, a folder of DCP's."""


def add_checkpoints(parser: argparse.ArgumentParser) -> None:
    parser.description = "What a CheckpointManager has saved in a folder, or below an fsspec URL."
    acts = parser.add_subparsers(required=True, metavar="ACTION")
    _add(
        acts,
        "ls",
        _list,
        "list the checkpoints, judged by their manifests and sizes; verify reads them as well",
    )
    verify = _add(
        acts, "verify", _verify, "read every byte of them; the exit status is 1 if one is damaged"
    )
    verify.add_argument("--step", type=int, help="only the checkpoint of this step")
    show = _add(
        acts, "show", _show, "print the tree of a state, with shapes and dtypes; reads no tensor"
    )
    show.add_argument("--step", type=int, help="the checkpoint of this step; else the newest")
    prune = _add(
        acts, "prune", _prune, "delete what is not to be kept; never the newest that is whole"
    )
    prune.add_argument(
        "--keep-last", type=int, required=True, metavar="N", help="keep the newest N"
    )
    prune.add_argument(
        "--keep-every", type=int, default=0, metavar="N", help="keep steps that are a multiple of N"
    )
    prune.add_argument(
        "--keep-best",
        type=_best,
        metavar="METRIC:min|max[:N]",
        help="keep the N (1 by default) with the best value of this metric",
    )
    prune.add_argument("--dry-run", action="store_true", help="say what would go, delete nothing")
    _add_convert(acts)


def _add_convert(acts: Any) -> None:
    parser = _add(
        acts,
        "convert",
        _convert,
        "convert one state between a folder of checkpoints, a file of torch.save and a folder of "
        "torch.distributed.checkpoint (DCP)",
        source="any of the three; which one is seen from what it is",
        target="what is written; must not exist yet",
    )
    parser.add_argument(
        "--to",
        choices=FORMS,
        required=True,
        help="the form of TARGET: a folder of checkpoints, a torch.save file, or a DCP folder",
    )
    parser.add_argument(
        "--step",
        type=int,
        help="of a folder of checkpoints the step to convert, else the newest; with --to folder "
        "the step that the state is saved as (required)",
    )


def _best(text: str) -> tuple[str, str, int]:
    metric, *rest = text.split(":")
    order, count = (*rest, "1")[:2] if 1 <= len(rest) <= 2 else ("", "")
    if not metric or order not in ("min", "max") or not count.isdecimal():
        raise argparse.ArgumentTypeError(f"need METRIC:min or METRIC:max:3, got {text!r}")
    return metric, order, int(count)


def _add(
    acts: Any, name: str, act: Callable[[argparse.Namespace], int], says: str, **places: str
) -> argparse.ArgumentParser:
    """places: what it is called with, unless that is a folder of checkpoints."""
    parser: argparse.ArgumentParser = acts.add_parser(name, help=says, description=says)
    for place, what in (places or {"dir": "a folder, or an fsspec URL"}).items():
        parser.add_argument(place, metavar=place.upper(), help=what)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.set_defaults(run=lambda chosen: _answered(name, lambda: act(chosen)))
    return parser


def _folder(chosen: argparse.Namespace) -> CheckpointFolder:
    path = chosen.dir
    if "://" not in path and not os.path.isdir(path):
        raise CheckpointError(f"there is no folder {path}")
    return CheckpointFolder(open_place(path))


def _answered(name: str, act: Callable[[], int]) -> int:
    """The exit status; what goes wrong is said in a sentence."""
    try:
        return act()
    except ConfigError as error:
        return complain(f"checkpoints {name}: error", error, 2)
    except (CheckpointError, FileNotFoundError) as error:
        return complain(f"checkpoints {name}", error, 1)


def _list(chosen: argparse.Namespace) -> int:
    _print(chosen, _folder(chosen).found(), range(len(HEAD)), COMPLETE)
    return 0


def _verify(chosen: argparse.Namespace) -> int:
    folder = _folder(chosen)
    found = folder.found() if chosen.step is None else [_one(folder, chosen.step)]
    total = sum(one.manifest.size for one in found if one.manifest)
    with Progress("verified", total) as progress:
        checked = [folder.verified(one, progress.seen) for one in found]
    _print(chosen, checked, (0, 1, -1), VERIFIED)
    return int(any(one.flaw for one in checked))


def _print(
    chosen: argparse.Namespace, found: Sequence[Found], columns: Sequence[int], intact: str
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


def _prune(chosen: argparse.Namespace) -> int:
    folder = _folder(chosen)
    retention = Retention(chosen.keep_last, chosen.keep_every, chosen.keep_best)
    # It never claims the folder: a job that writes there goes on.
    committer = Committer(folder, Writer("", "", 0, ""), retention)
    with Progress("verified", 0) as progress:
        selection = committer.prune(progress.seen, dry_run=chosen.dry_run)
    if chosen.json:
        print(json.dumps({"kept": selection.kept, "deleted": selection.deleted}))
        return 0
    verb = "would delete" if chosen.dry_run else "deleted"
    print(f"{verb} {_steps(selection.deleted)}; kept {_steps(selection.kept)}")
    if selection.reason and selection.kept:
        print(f"nothing goes: {selection.reason}", file=sys.stderr)
        return 1
    return 0


def _one(folder: CheckpointFolder, step: int | None) -> Found:
    """What there is of a step; else the newest."""
    found = [one for one in folder.found() if step in (None, one.step)]
    if found:
        return found[0]
    name = folder.place.name
    raise CheckpointError(
        f"there is no checkpoint in {name}"
        if step is None
        else f"there is no {folder.describe(step)}"
    )


def _show(chosen: argparse.Namespace) -> int:
    folder = _folder(chosen)
    found = _one(folder, chosen.step)
    made = found.manifest
    if made is None:
        raise CheckpointError(f"{folder.describe(found.step)} {found.trouble}")
    rows = rows_of([read_head(folder.head(made, at)) for at in range(len(made.files))])
    if chosen.json:
        print(
            json.dumps({**_fields(found), "state": [attrs.asdict(row) for row in rows]}, indent=1)
        )
        return 0
    step, much, saved, _, world, metrics, by, _ = _row(found)
    print(visible(f"step {step}: {much}, saved {saved} by {by}, world {world}, metrics {metrics}"))
    inner = [row for row in rows if row.path] or rows
    tree = [("  " * (len(row.path) - 1) + "".join(row.path[-1:]), _about(row)) for row in inner]
    print("\n".join(table_lines(Table((), tree))))
    return 0


def _about(row: Row) -> str:
    if row.shape is not None:
        words = f"{row.dtype} {list(row.shape)}"
        return f"{words}, {row.about}" if row.about else words
    return row.about if row.kind == "value" else f"{row.kind} of {row.about}"


def _convert(chosen: argparse.Namespace) -> int:
    # It imports torch, which nothing else here does.
    from ..checkpoint import convert

    source, target = chosen.source, chosen.target
    if (
        "://" not in target
        and Path(target).exists()
        and (not os.path.isdir(target) or os.listdir(target))
    ):
        raise CheckpointError(f"{target} is there already: name a new file or folder")
    ours = convert.is_folder(source)
    if ours and chosen.to == "folder":
        raise ConfigError(f"{source} is a folder of checkpoints already")
    if not ours and chosen.to == "folder" and chosen.step is None:
        raise ConfigError("--to folder needs --step N: the step that the state is saved as")
    state, step = convert.read(source, chosen.step if ours else None)
    lost = convert.write(target, state, chosen.to, step if ours else chosen.step)
    if chosen.json:
        step = step if ours else chosen.step
        print(json.dumps({"source": source, "target": target, "step": step, "lost": lost}))
    else:
        print(visible(f"{target} was written" + (f", of step {step}" if ours else "")))
        if lost:
            names = ", ".join(lost)
            print(visible(f"without {names}: DCP keeps no empty containers"), file=sys.stderr)
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
        speed = size(self._done / max(now - self._began, 1e-9))
        of = f" of {size(self._total)}" if self._total else ""
        line = f"{self._verb} {size(self._done)}{of}, {speed}/s"
        text = f"\r{line}\x1b[K" if self._terminal else f"{line}\n"
        print(text, end="", file=self._stream, flush=True)


def _fields(one: Found, intact: str = COMPLETE) -> dict[str, Any]:
    made, flawed = one.manifest, "unreadable" if one.unread else "damaged"
    status = flawed if one.flaw else intact
    fields: dict[str, Any] = {"step": one.step, "status": status, "flaw": one.flaw}
    if made is not None:
        fields |= {"bytes": made.size, "parts": made.parts, "saved_at": made.saved_at}
        fields |= {"run": made.run, "generation": made.generation}
        fields |= {"world": made.world or None, "metrics": dict(made.metrics)}
    return fields


def _row(one: Found, intact: str = COMPLETE) -> tuple[str, ...]:
    made, state = one.manifest, one.trouble.removeprefix("is ") if one.flaw else intact
    if made is None:
        return (str(one.step), *"------", state)
    much = size(made.size) + (f" in {made.parts} parts" if made.parts else "")
    by = f"{made.run} generation {made.generation}" if made.run else "-"
    metrics = " ".join(f"{name}={value:.4g}" for name, value in made.metrics.items())
    age = duration(max(0.0, wall() - made.saved_at))
    world = str(made.world or "-")
    return (str(one.step), much, date_of(made.saved_at), age, world, metrics or "-", by, state)


def _steps(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) if steps else "none"
