"""Training script in plain torch: `plain.py DIR [unsaved]`.

torchrun, ft_launcher and the baseline without a launcher use it. All ranks resume from the newest
checkpoint, and rank 0 writes one every fourth step. With `unsaved`, which the baseline uses, there
are no checkpoints.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from work import Checkpoints, ProgressFile, compute_loss, create_model


def main(directory: Path, *, has_checkpoints: bool = True) -> None:
    """Train until the process is killed."""
    rank = dist.get_rank()
    model, optimizer = create_model()
    checkpoints = Checkpoints(directory, model, optimizer, rank)
    # Every rank has restored before any rank trains, because DDP waits for all ranks.
    step = checkpoints.restore()
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    progress = ProgressFile(directory, rank)
    while True:
        optimizer.zero_grad()
        compute_loss(parallel, step, rank).backward()
        optimizer.step()
        step += 1
        if has_checkpoints:
            checkpoints.save_if_due(step)
        progress.record_step(step)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]), has_checkpoints="unsaved" not in sys.argv)
