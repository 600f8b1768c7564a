"""The worker of each walk: `worker.py FOLDER exit|stay|stop`; it says in FOLDER/said what it did.

`exit`: the first one ends with code 3 when FOLDER/go is there. `stop`: it polls should_stop(), and
ends when that says so. They end with success when FOLDER/finish is there.
"""

import time

BEGAN = time.monotonic_ns()

import json  # noqa: E402 - the time of the first line comes first
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

folder, mode = Path(sys.argv[1]), sys.argv[2]


def say(what: str, at: int) -> None:
    said = {"what": what, "at": at, "pid": os.getpid(), "node": os.environ["WALK_NODE"]}
    with (folder / "said").open("a") as file:
        file.write(f"{json.dumps(said)}\n")


first = not (folder / "said").exists()
say("began", BEGAN)
if mode == "stop":
    import elasticlib

    context = elasticlib.context()
    context.starting()
while not (folder / "finish").exists():
    time.sleep(0.01)  # a step
    if mode == "exit" and first and (folder / "go").exists():
        say("exits", time.monotonic_ns())
        sys.exit(3)
    if mode == "stop" and context.should_stop():
        say("stopped", time.monotonic_ns())
        break
