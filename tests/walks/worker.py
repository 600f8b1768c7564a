"""The worker of each walk: `worker.py FOLDER exit|stay|stop|disk|lost`; it says in FOLDER/said what
it did.

`exit`: the first one ends with code 3 when FOLDER/go is there. `stop`: it polls should_stop(), and
ends when that says so. `disk`: it saves a state and restores it. `lost`: the first rank makes a
snapshot of its state when FOLDER/go is there. They end with success when FOLDER/finish is there.
"""

import time

BEGAN = time.monotonic_ns()

import json  # noqa: E402 - the time of the first line comes first
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

folder, mode = Path(sys.argv[1]), sys.argv[2]


def say(what: str, at: int) -> None:
    said = {"what": what, "at": at, "pid": os.getpid(), "node": os.environ["WALK_NODE"]}
    with (folder / "said").open("a") as file:
        file.write(f"{json.dumps(said)}\n")


def states() -> tuple[dict[str, Any], dict[str, Any]]:
    """A state to save, and one to restore."""
    import torch

    def state() -> dict[str, Any]:
        net = torch.nn.Linear(8, 8)
        return {"net": net, "optimizer": torch.optim.AdamW(net.parameters()), "epoch": 1}

    return state(), state()


first = not (folder / "said").exists()
say("began", BEGAN)
if mode == "stop":
    import elasticlib

    context = elasticlib.context()
    context.starting()
if mode in ("disk", "lost"):
    import elasticlib

    saved, restored = states()
    manager = elasticlib.CheckpointManager(folder / "checkpoints")
if mode == "disk":
    manager.restore(restored)  # which imports
    say("saves", time.monotonic_ns())
    manager.save(1, saved).wait()
    manager.restore(restored)
    say("restored", time.monotonic_ns())
if mode == "lost":
    say("ready", time.monotonic_ns())
while not (folder / "finish").exists():
    time.sleep(0.01)  # a step
    if mode == "exit" and first and (folder / "go").exists():
        say("exits", time.monotonic_ns())
        sys.exit(3)
    if mode == "lost" and os.environ["RANK"] == "0" and (folder / "go").exists():
        (folder / "go").unlink()
        say("keeps", time.monotonic_ns())
        manager.snapshot(1, saved)
    if mode == "stop" and context.should_stop():
        say("stopped", time.monotonic_ns())
        break
