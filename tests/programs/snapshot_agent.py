"""An elasticrun that writes the newest snapshots to a disk at the end, one file a step and part.

`snapshot_agent.py FLAGS... SCRIPT FOLDER ARGS...`
"""

import logging
import sys
from pathlib import Path

from elasticlib.checkpoint.memory import Record
from elasticlib.launch.arguments import parse
from elasticlib.launch.elastic_launch import run_node


def write(record: Record, pack: memoryview) -> bool:
    """Beside, then in place, as little as a test needs."""
    target = Path(record.folder, f"{record.step}.{record.part}.pack")
    target.parent.mkdir(exist_ok=True)
    aside = target.with_suffix(".part")
    aside.write_bytes(pack)
    aside.rename(target)
    return True


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config, script = parse(sys.argv[1:])
    result = run_node(config, script, persist=write)
    print(f"{result.state.value.upper()}: {result.reason}")
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
