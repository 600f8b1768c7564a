"""The `train.py` of docs/slurm.md, with torch, gloo and real checkpoints.

It reports as slurm_worker.py does.
"""

import time
from pathlib import Path

import torch
import torch.distributed as dist
from slurm_worker import enter_folder, write_report

from elasticlib import CheckpointManager, context


def main() -> None:
    enter_folder()
    dist.init_process_group("gloo")
    rank, state = dist.get_rank(), {"step": torch.zeros((), dtype=torch.int64)}
    should_finish, stop = torch.zeros(()), None
    with CheckpointManager("checkpoints") as manager:
        manager.restore(state)
        step = int(state["step"])
        Path(f"start.{rank}.{step}").touch()
        context().report_starting()
        write_report()
        while stop is None and not should_finish:
            step += 1
            state["step"].fill_(step)
            should_finish.fill_(Path("finish").exists())
            dist.all_reduce(should_finish)
            time.sleep(0.02)
            context().step(step)
            stop = context().should_stop()
        manager.save(step, state)
    Path(f"end.{rank}.{step}.{stop.reason if stop else 'finished'}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
