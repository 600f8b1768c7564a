"""An elasticrun whose workers listen: a notice becomes a file that they look for.

`listening_agent.py FLAGS... SCRIPT FOLDER ARGS...`; the notice stands in
FOLDER/notice.NODE.GENERATION.
"""

import logging
import os
import sys
from pathlib import Path

from elasticlib import LocalWorkers, Workers
from elasticlib.launch.arguments import parse
from elasticlib.launch.elastic_launch import run_node
from elasticlib.workers.interface import StopNotice


class Listening(LocalWorkers, Workers):
    """Workers that read their notices in a folder."""

    def __init__(self, folder: str, ignored: tuple[int, ...]) -> None:
        super().__init__(os.environ, ignored_signals=ignored)
        self._notices = Path(folder)
        self._generation = 0

    def start(self, group, ended) -> None:
        self._generation = group.generation
        super().start(group, ended)

    def notify(self, notice: StopNotice) -> bool:
        path = self._notices / f"notice.{os.environ['NODE']}.{self._generation}"
        path.write_text(f"{notice.reason} {notice.grace_s:g}")
        return True


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config, script = parse(sys.argv[1:])
    ignored = config.supervision.agent.agent_only_signals
    result = run_node(config, script, Listening(script.args[0], ignored))
    print(f"{result.state.value.upper()}: {result.reason}")
    return result.exit_code


sys.exit(main())
