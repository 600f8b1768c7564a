"""`plain.py FOLDER [unsaved]`: plain torch, for torchrun, ft_launcher and no launcher at all.

All ranks begin at the newest checkpoint, and the first writes one every fourth step. With
`unsaved`, for the undisturbed run, there are no checkpoints.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from work import Checkpoints, Progress, loss_of, make


def main(folder: Path, *, saving: bool = True) -> None:
    rank = dist.get_rank()
    model, optimizer = make()
    checkpoints = Checkpoints(folder, model, optimizer, rank)
    # All read before any goes on, as DDP waits for all.
    step = checkpoints.restore()
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    progress = Progress(folder, rank)
    while True:
        optimizer.zero_grad()
        loss_of(parallel, step, rank).backward()
        optimizer.step()
        step += 1
        if saving:
            checkpoints.after(step)
        progress.done(step)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]), saving="unsaved" not in sys.argv)
