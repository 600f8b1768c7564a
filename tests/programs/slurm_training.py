"""What docs/slurm.md calls `train.py`, with torch, gloo and real checkpoints; it reports as
slurm_worker.py does."""

import time
from pathlib import Path

import torch
import torch.distributed as dist
from slurm_worker import enter_folder, say_place

from elasticlib import CheckpointManager, context


def main() -> None:
    enter_folder()
    dist.init_process_group("gloo")
    rank, state = dist.get_rank(), {"step": torch.zeros((), dtype=torch.int64)}
    end, stop = torch.zeros(()), None
    with CheckpointManager("checkpoints") as manager:
        manager.restore(state)
        step = int(state["step"])
        Path(f"start.{rank}.{step}").touch()
        context().report_starting()
        say_place()
        while stop is None and not end:
            step += 1
            state["step"].fill_(step)
            end.fill_(Path("finish").exists())
            dist.all_reduce(end)
            time.sleep(0.02)
            context().step(step)
            stop = context().should_stop()
        manager.save(step, state)
    Path(f"end.{rank}.{step}.{stop.reason if stop else 'finished'}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
