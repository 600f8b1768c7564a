"""A worker with DEPTH processes, each the child of the one before; `nested_worker.py FOLDER DEPTH`.

Every third of them is deaf to SIGTERM, and every fifth leads a process group of its own. The last
one leaves FOLDER/nested.GENERATION, with the pids of all.
"""

import os
import signal
import sys
from pathlib import Path


def main() -> None:
    folder, depth = Path(sys.argv[1]), int(sys.argv[2])
    line = [os.getpid()]
    for number in range(depth):
        if os.fork():
            break
        line.append(os.getpid())
        if number % 3 == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if number % 5 == 0:
            os.setpgid(0, 0)
    else:
        name = f"nested.{os.environ['ELASTICLIB_GENERATION']}"
        (folder / f"{name}.part").write_text(" ".join(map(str, line)))
        (folder / f"{name}.part").rename(folder / name)
    while True:
        signal.pause()


main()
