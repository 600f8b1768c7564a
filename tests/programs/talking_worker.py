"""A worker that writes a line on each stream, with its rank and attempt, and ends when told to.

`talking_worker.py FOLDER`: a rank exits with code 3 once FOLDER/fail.RANK is there, in the first
attempt alone; all end with success when FOLDER/finish is. It tells of steps as it goes on.
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
    (folder / f"talks.{attempt}.{rank}").touch()
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
