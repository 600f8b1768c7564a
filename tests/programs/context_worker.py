"""A worker in step with all others, that asks `elasticlib.context()` after each; without torch.

`context_worker.py FOLDER [save SECONDS] [checkpoint EVERY] [hang RANK STEP]`. A step ends for
nobody before all ranks are in it. Rank 0 writes the steps done to FOLDER/steps and, when it saves,
FOLDER/checkpoint, from which the next generation goes on; where they stop each leaves
FOLDER/stopped.GENERATION.RANK. They end with success some steps after FOLDER/finish is there. A
rank that is to hang does so once, in that step.
"""

import json
import mmap
import os
import random
import struct
import sys
import time
from pathlib import Path

from fault_worker import NAMES

import elasticlib

STEPS_MORE = 5


class Ranks:
    """What the ranks of a generation know of one another: the step that each is in, and where
    all finish."""

    def __init__(self, folder: Path, generation: str, rank: int, world: int) -> None:
        path = folder / f"ranks.{generation}"
        with open(os.open(path, os.O_RDWR | os.O_CREAT), "r+b") as file:
            file.truncate(4096)
            self.memory = mmap.mmap(file.fileno(), 4096)
        self.rank, self.world = rank, world

    def read(self, slot: int) -> int:
        return struct.unpack_from("q", self.memory, 8 * slot)[0]

    def write(self, slot: int, value: int) -> None:
        struct.pack_into("q", self.memory, 8 * slot, value)

    def together(self, step: int) -> None:
        self.write(self.rank, step + 1)
        while min(self.read(rank) for rank in range(self.world)) < step + 1:
            time.sleep(1e-4)

    @property
    def finish(self) -> int:
        return self.read(100)


def write(path: Path, what: object) -> None:
    aside = path.with_name(f"{path.name}.part")
    aside.write_text(json.dumps(what))
    aside.rename(path)


def option(name: str, default: str) -> str:
    words = sys.argv[2:]
    return words[words.index(name) + 1] if name in words else default


def hang_once(folder: Path) -> None:
    if not (folder / "hung").exists():
        (folder / "hung").touch()
        time.sleep(600)


def main() -> None:
    folder = Path(sys.argv[1])
    report = {name: os.environ[name] for name in NAMES} | {"pid": os.getpid(), "still_running": []}
    report["node"] = os.environ.get("NODE", "")
    generation, rank = report["ELASTICLIB_GENERATION"], int(report["RANK"])
    ranks = Ranks(folder, generation, rank, int(report["WORLD_SIZE"]))
    write(folder / f"report.{generation}.{rank}.{os.getpid()}.json", report)
    every, seconds = int(option("checkpoint", "0")), float(option("save", "0"))
    hang = sys.argv[sys.argv.index("hang") + 1 :][:2] if "hang" in sys.argv else []
    context, checkpoint, step = elasticlib.context(), folder / "checkpoint", 0
    if checkpoint.exists():
        step = json.loads(checkpoint.read_text()) + 1
        context.report_restored(step - 1, source="peer" if rank else "memory", seconds=0.01)

    def save() -> None:
        time.sleep(seconds)
        if rank == 0:
            write(checkpoint, step)
        context.report_saved(step)

    context.report_starting()
    while not (ranks.finish and step >= ranks.finish):
        time.sleep(random.uniform(0.0, 0.004))
        if hang == [str(rank), str(step)]:
            hang_once(folder)
        ranks.together(step)
        if rank == 0:
            with (folder / "steps").open("a") as file:
                file.write(f"{step}\n")
            if (folder / "finish").exists() and not ranks.finish:
                ranks.write(100, step + STEPS_MORE)
        context.report_snapshot(step)
        context.step(step, loss=1 / (step + 1), samples=4)
        stop = context.should_stop()
        if stop:
            said = {"step": step, "reason": stop.reason, "left": stop.seconds_left}
            save()
            write(folder / f"stopped.{generation}.{rank}", said)
            return
        if every and step % every == every - 1:
            save()
        step += 1


if __name__ == "__main__":
    main()
