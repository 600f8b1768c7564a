"""`elasticlib report`: one page on a run, written to a file or to the standard output."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

from ..errors import ElasticError
from ..observe.report import Report, report

STDOUT = "-"
_ODD = re.compile(r"[^\w.-]+")


def add_report(commands: Any) -> None:
    """Add the subcommand to those of `elasticlib`."""
    parser = commands.add_parser(
        "report",
        help="write a page on a run: timeline, recoveries, failures",
        description="Write one self-contained HTML page on a run, while it goes on or afterwards.",
    )
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="the run's id, the folder of its logs, or a file of its events; several files of one "
        "run's nodes make one page; by default the newest run here that goes on, or if none "
        "does the newest",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="where to write it, - for the standard output; RUN.html by default",
    )
    parser.set_defaults(run=_write)


def _write(chosen: argparse.Namespace) -> int:
    try:
        made = report(chosen.runs or "")
        if chosen.output == STDOUT:
            sys.stdout.buffer.write(made.html().encode())
            sys.stdout.buffer.flush()
        else:
            print(made.save(chosen.output or _file(made)))
    except ElasticError as error:
        print(f"elasticlib report: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        where = chosen.output or error.filename
        print(f"elasticlib report: cannot write {where}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _file(made: Report) -> str:
    """Named after the run, in the current folder."""
    name = _ODD.sub("_", made.history.run).lstrip(".")[:100]
    return f"{name or 'run'}.html"
