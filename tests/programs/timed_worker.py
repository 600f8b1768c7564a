"""Sets a timer by torch's client, and hangs past it the first time; tells of it in a folder.

Rank 1 does so once rank 0 has told of its own, as its end is that of both.
"""

import os
import sys
import threading
import time
from pathlib import Path

from torch.distributed.elastic import timer

folder, rank = Path(sys.argv[1]), os.environ["RANK"]
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))


def await_told(name):
    while not (folder / name).exists():
        time.sleep(0.005)


with timer.expires(after=60.0, scope="long enough"):
    pass
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
hangs = first and rank == "1"
if hangs:
    await_told("0.0")
with timer.expires(after=0.3 if hangs else 60.0, scope="a step"):
    if hangs:
        threading.Event().wait(60.0)
(folder / f"{rank}.{os.environ['TORCHELASTIC_RESTART_COUNT']}").touch()
if first:
    threading.Event().wait(60.0)
