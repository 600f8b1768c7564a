"""A worker that records its environment and arguments, and fails if its arguments request it.

Usage: record_and_fail.py FOLDER [RESTART:RANK:ACTION ...] ... It does not import torch. When all
workers of attempt RESTART have started, RANK ends: ACTION is its exit code, or `raise` for an
exception. The other ranks of that attempt wait to be stopped. Other arguments are only recorded.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    folder = Path(sys.argv[1])
    restart, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    record = {
        "environment": dict(os.environ),
        "argv": sys.argv,
        "name": __name__,
        "pid": os.getpid(),
    }
    # Print first, because the others may end this worker when its record exists.
    print("out", rank)
    print("err", rank, file=sys.stderr)
    path = folder / f"{restart}.{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(record))
    path.with_suffix(".part").rename(path)
    commands = [arg.split(":") for arg in sys.argv if arg.count(":") == 2]
    actions = {rank: action for number, rank, action in commands if number == restart}
    if not actions:
        return
    deadline = time.monotonic() + 60
    while len(list(folder.glob(f"{restart}.*.json"))) < int(os.environ["WORLD_SIZE"]):
        assert time.monotonic() < deadline, "the other workers did not start"
        time.sleep(0.005)
    if rank not in actions:
        signal.pause()
    if actions[rank] == "raise":
        raise ValueError("the loss is not finite")
    sys.exit(int(actions[rank]))


if __name__ == "__main__":
    main()
