"""A worker that takes a snapshot after each step and resumes from the newest one that it finds.

Usage: snapshot_worker.py FOLDER [size N] [parts] [paced]. The state is N numbers that are all equal
to the step. With `parts`, each rank has its own part of the state. The worker's report lists the
snapshots in its agent's memory (`snapshots`, as [step, part, number of parts]) and those with wrong
contents (`wrong`). FOLDER/ranks.progress holds, for each rank, the step of the snapshot that it
started last and of the last complete one. With `paced`, the worker makes no step beyond the number
in FOLDER/permit. It exits with success when FOLDER/finish exists.
"""

import os
import sys
import time
from pathlib import Path

import torch
from context_worker import Ranks, read_option, write_json
from fault_worker import NAMES

from elasticlib.checkpoint.pack import plan_layout, unpack
from elasticlib.checkpoint.refs import Writer, begin
from elasticlib.checkpoint.snapshot_source import SnapshotSource, snapshot_folder


def is_intact(memory: SnapshotSource, snapshot) -> bool:
    state = unpack(memory.view(snapshot), copy=False)
    return state["step"] == snapshot.step and bool((state["numbers"] == snapshot.step).all())


def find_newest_complete_step(snapshots) -> int:
    parts: dict[int, set[int]] = {}
    for snapshot in snapshots:
        parts.setdefault(snapshot.step, set()).add(snapshot.part)
        if len(parts[snapshot.step]) == max(1, snapshot.parts):
            return snapshot.step
    return 0


def main() -> None:
    folder = Path(sys.argv[1])
    report = {name: os.environ[name] for name in NAMES} | {"pid": os.getpid(), "still_running": []}
    rank, world = int(report["RANK"]), int(report["WORLD_SIZE"])
    attempt = snapshot_folder()
    assert attempt is not None
    launch = (os.environ["TORCHELASTIC_RUN_ID"], os.environ["ELASTICLIB_INCARNATION"])
    writer = Writer(*launch, int(report["ELASTICLIB_GENERATION"]))
    part = {"part": rank, "parts": world} if "parts" in sys.argv else {}
    memory = SnapshotSource(attempt, writer, folder=str(folder / "disk"))
    snapshots = memory.list_states()
    step = find_newest_complete_step(snapshots)
    report |= {"node": os.environ["NODE"], "memory": str(Path(attempt).parent)}
    report["snapshots"] = [[one.step, one.part or 0, one.parts] for one in snapshots]
    report["wrong"] = [str(one) for one in snapshots if not is_intact(memory, one)]
    ranks = Ranks(folder, report["ELASTICLIB_GENERATION"], rank, world)
    progress = Ranks(folder, "progress", rank, world)
    # All ranks have read the memory before any of them makes a step.
    name = f"report.{report['ELASTICLIB_GENERATION']}.{rank}.{os.getpid()}.json"
    write_json(folder / name, report)
    ranks.wait_for_all(0)
    base = next((one for one in snapshots if one.step == step), None)
    memory.begin(writer, begin(base, writer))
    numbers = torch.zeros(int(read_option("size", "8")))
    while True:
        step += 1
        while "paced" in sys.argv and int((folder / "permit").read_text()) < step:
            if (folder / "finish").exists():
                return
            time.sleep(1e-3)
        ranks.wait_for_all(step)
        progress.write(2 * rank, step)
        memory.keep(
            step,
            plan_layout({"step": step, "numbers": numbers.fill_(step)}, {"shards": []}),
            **part,
        )
        progress.write(2 * rank + 1, step)


if __name__ == "__main__":
    main()
