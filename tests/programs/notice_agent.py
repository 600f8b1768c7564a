"""An elasticrun whose workers receive stop notices, as files.

Usage: notice_agent.py FLAGS... SCRIPT FOLDER ARGS... The agent writes each notice to
FOLDER/notice.NODE.GENERATION.
"""

import logging
import os
import sys
from pathlib import Path

import attrs

from elasticlib import LocalWorkers
from elasticlib.launch.arguments import parse_options
from elasticlib.launch.elastic_launch import run_node
from elasticlib.workers.interface import StopNotice


class NoticedWorkers(LocalWorkers):
    """Workers that find their notices in a directory."""

    def __init__(self, folder: str, ignored: tuple[int, ...]) -> None:
        super().__init__(os.environ, ignored_signals=ignored)
        self._notices = Path(folder)
        self._generation = 0

    def start(self, group, on_exit) -> None:
        self._generation = group.info.generation
        super().start(group, on_exit)

    def view(self):
        return {n: attrs.evolve(one, takes_notices=True) for n, one in super().view().items()}

    def notify(self, notice: StopNotice, call: int | None) -> None:
        del call  # These workers never call should_stop.
        path = self._notices / f"notice.{os.environ['NODE']}.{self._generation}"
        path.write_text(f"{notice.reason} {notice.grace_s:g}")


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options, script = parse_options(sys.argv[1:])
    ignored = options.agent.agent_only_signals
    result = run_node(options, script, NoticedWorkers(script.args[0], ignored))
    print(f"{result.state.value.upper()}: {result.reason}")
    return result.exit_code


sys.exit(main())
