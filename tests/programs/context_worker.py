"""A worker that uses `elasticlib.context()` in each step, in step with all others; without torch.

Usage: context_worker.py FOLDER [save SECONDS] [checkpoint EVERY] [hang RANK STEP]. A step ends when
all ranks have reached it. Rank 0 appends each completed step to FOLDER/steps. When it saves, it
writes the step to FOLDER/checkpoint, from which the next generation continues. A rank that stops
writes FOLDER/stopped.GENERATION.RANK. When FOLDER/finish exists, all ranks exit with success a few
steps later. The rank that is to hang does so once, in that step.
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

STEPS_BEFORE_FINISH = 5
LAST_STEP_SLOT = 100  # larger than any rank


class Ranks:
    """Memory that the ranks of a generation share: the step of each rank, and the last step."""

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

    def wait_for_all(self, step: int) -> None:
        self.write(self.rank, step + 1)
        while min(self.read(rank) for rank in range(self.world)) < step + 1:
            time.sleep(1e-4)

    @property
    def last_step(self) -> int:
        return self.read(LAST_STEP_SLOT)


def write_json(path: Path, value: object) -> None:
    """Replace the file atomically."""
    temporary = path.with_name(f"{path.name}.part")
    temporary.write_text(json.dumps(value))
    temporary.rename(path)


def read_option(name: str, default: str) -> str:
    """Return the argument after `name` on the command line."""
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
    write_json(folder / f"report.{generation}.{rank}.{os.getpid()}.json", report)
    every, seconds = int(read_option("checkpoint", "0")), float(read_option("save", "0"))
    hang = sys.argv[sys.argv.index("hang") + 1 :][:2] if "hang" in sys.argv else []
    context, checkpoint, step = elasticlib.context(), folder / "checkpoint", 0
    if checkpoint.exists():
        step = json.loads(checkpoint.read_text()) + 1
        context.report_restored(step - 1, source="peer" if rank else "memory", seconds=0.01)

    def save() -> None:
        time.sleep(seconds)
        if rank == 0:
            write_json(checkpoint, step)
        context.report_saved(step)

    context.report_starting()
    while not (ranks.last_step and step >= ranks.last_step):
        time.sleep(random.uniform(0.0, 0.004))
        if hang == [str(rank), str(step)]:
            hang_once(folder)
        ranks.wait_for_all(step)
        if rank == 0:
            with (folder / "steps").open("a") as file:
                file.write(f"{step}\n")
            if (folder / "finish").exists() and not ranks.last_step:
                ranks.write(LAST_STEP_SLOT, step + STEPS_BEFORE_FINISH)
        context.report_snapshot(step)
        context.step(step, loss=1 / (step + 1), samples=4)
        stop = context.should_stop()
        if stop:
            result = {"step": step, "reason": stop.reason, "seconds_left": stop.seconds_left}
            save()
            write_json(folder / f"stopped.{generation}.{rank}", result)
            return
        if every and step % every == every - 1:
            save()
        step += 1


if __name__ == "__main__":
    main()
