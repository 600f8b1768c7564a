"""A worker that restores a state, saves or keeps some steps, and waits.

Usage: rollback_worker.py FOLDER RESTORED SAVED KEPT. The worker restores step RESTORED (0: the
newest), saves the steps of the comma-separated list SAVED, and snapshots those of KEPT. Then it
creates FOLDER/ready, and exits with code 0 or 3 when FOLDER/finish or FOLDER/fail exists.
"""

import sys
import time
from pathlib import Path

import torch

from elasticlib import CheckpointManager


def steps(text: str) -> list[int]:
    return [int(step) for step in text.split(",") if step]


def main() -> None:
    folder, restored, saved, kept = Path(sys.argv[1]), int(sys.argv[2]), *map(steps, sys.argv[3:])
    state = {"w": torch.zeros(4), "step": 0}
    with CheckpointManager(folder / "checkpoints") as manager:
        manager.restore(state, step=restored or None)
        for step in [*saved, *kept]:
            state["step"] = step
            if step in saved:
                manager.save(step, state).wait()
            else:
                assert manager.snapshot(step, state)
        (folder / "ready").touch()
        while not (folder / "finish").exists():
            if (folder / "fail").exists():
                raise SystemExit(3)
            time.sleep(0.01)


if __name__ == "__main__":
    main()
