"""Writes down what it was told, and does what its launch asks of it; it imports no torch.

`promised.py FOLDER [RESTART:RANK:DEED ...] ...`: once all workers of this attempt are here, the
rank that is named for this restart raises (`raise`) or ends with that exit code; those beside it
wait to be stopped. Other arguments are written down.
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
    seen = {
        "environment": dict(os.environ),
        "argv": sys.argv,
        "name": __name__,
        "pid": os.getpid(),
    }
    # First, as the others may end this one as soon as it is here.
    print("out", rank)
    print("err", rank, file=sys.stderr)
    path = folder / f"{restart}.{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(seen))
    path.with_suffix(".part").rename(path)
    deeds = [arg.split(":") for arg in sys.argv if arg.count(":") == 2]
    now = {deed[1]: deed[2] for deed in deeds if deed[0] == restart}
    if not now:
        return
    until = time.monotonic() + 60
    while len(list(folder.glob(f"{restart}.*.json"))) < int(os.environ["WORLD_SIZE"]):
        assert time.monotonic() < until, "the others did not come"
        time.sleep(0.005)
    if rank not in now:
        signal.pause()
    if now[rank] == "raise":
        raise ValueError("the loss is not finite")
    sys.exit(int(now[rank]))


if __name__ == "__main__":
    main()
