"""A worker that snapshots after each step, and goes on from the newest that it finds.

`snapshot_worker.py FOLDER [size N] [parts] [paced]`. Its state is N numbers that are all its step;
with `parts` each rank has its own part. Its place says what it found in its agent's memory
(`held`, as [step, part, parts]) and which of it was wrong. FOLDER/progress.ranks holds, for each
rank, the step that it has begun to snapshot and the last one that is done. `paced`: it takes no
step beyond the number in FOLDER/permit. It ends with success when FOLDER/finish is there.
"""

import os
import sys
import time
from pathlib import Path

import torch
from context_worker import Ranks, option, write
from fault_worker import NAMES

from elasticlib.checkpoint.pack import plan_layout, unpack
from elasticlib.checkpoint.snapshot_source import SnapshotSource, snapshot_location


def is_right(memory: SnapshotSource, held) -> bool:
    state = unpack(memory.view(held), copy=False)
    return state["step"] == held.step and bool((state["numbers"] == held.step).all())


def newest_complete(found) -> int:
    parts: dict[int, set[int]] = {}
    for held in found:
        parts.setdefault(held.step, set()).add(held.part)
        if len(parts[held.step]) == max(1, held.num_parts):
            return held.step
    return 0


def main() -> None:
    folder = Path(sys.argv[1])
    report = {name: os.environ[name] for name in NAMES} | {"pid": os.getpid(), "still_running": []}
    rank, world = int(report["RANK"]), int(report["WORLD_SIZE"])
    where = snapshot_location()
    assert where is not None
    line = {"part": rank, "parts": world, "sharded": True} if "parts" in sys.argv else {}
    memory = SnapshotSource(where, folder=str(folder / "disk"))
    found = memory.list_states()
    step = newest_complete(found)
    report |= {"node": os.environ["NODE"], "memory": str(Path(where.folder).parent)}
    report["held"] = [[held.step, held.part, held.num_parts] for held in found]
    report["wrong"] = [str(held) for held in found if not is_right(memory, held)]
    ranks = Ranks(folder, report["ELASTICLIB_GENERATION"], rank, world)
    progress = Ranks(folder, "progress", rank, world)
    # All have looked before any goes on.
    write(folder / f"report.{report['ELASTICLIB_GENERATION']}.{rank}.{os.getpid()}.json", report)
    ranks.together(0)
    memory.resume_from(step)
    numbers = torch.zeros(int(option("size", "8")))
    while True:
        step += 1
        while "paced" in sys.argv and int((folder / "permit").read_text()) < step:
            if (folder / "finish").exists():
                return
            time.sleep(1e-3)
        ranks.together(step)
        progress.write(2 * rank, step)
        memory.keep(
            step,
            plan_layout({"step": step, "numbers": numbers.fill_(step)}, {"shards": []}),
            **line,
        )
        progress.write(2 * rank + 1, step)


if __name__ == "__main__":
    main()
