"""A worker that prints its rank and attempt on each stream, and exits when the test creates a file.

Usage: printing_worker.py FOLDER. In the first attempt, a rank exits with code 3 when
FOLDER/fail.RANK exists. All ranks exit with success when FOLDER/finish exists. The worker reports
steps to its agent.
"""

import os
import sys
import time
from pathlib import Path

import elasticlib


def main() -> None:
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    print(f"out {rank} {attempt}", flush=True)
    print(f"err {rank} {attempt}", file=sys.stderr, flush=True)
    (folder / f"printed.{attempt}.{rank}").touch()
    step, context = 0, elasticlib.context()
    while not (folder / "finish").exists():
        if attempt == "0" and (folder / f"fail.{rank}").exists():
            print(f"last words {rank}", end="", flush=True)
            sys.exit(3)
        context.step(step, loss=1.0)
        step += 1
        time.sleep(0.01)
    print(f"bye {rank}", end="", flush=True)


if __name__ == "__main__":
    main()
