"""A worker with a chain of DEPTH processes, each the child of the one before.

Usage: nested_worker.py FOLDER DEPTH. Every third process ignores SIGTERM, and every fifth leads a
process group of its own. The last one writes the pids of all to FOLDER/nested.GENERATION.
"""

import os
import signal
import sys
from pathlib import Path


def main() -> None:
    folder, depth = Path(sys.argv[1]), int(sys.argv[2])
    pids = [os.getpid()]
    for number in range(depth):
        if os.fork():
            break
        pids.append(os.getpid())
        if number % 3 == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if number % 5 == 0:
            os.setpgid(0, 0)
    else:
        name = f"nested.{os.environ['ELASTICLIB_GENERATION']}"
        (folder / f"{name}.part").write_text(" ".join(map(str, pids)))
        (folder / f"{name}.part").rename(folder / name)
    while True:
        signal.pause()


main()
