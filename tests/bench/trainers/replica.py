"""Training script for torchft: `replica.py DIR`. Each worker is a replica under its own torchrun.

A replica that restarts copies model, optimizer and step from the other one. If both are lost, they
restart from a checkpoint, which one of them writes. A step counts when it is committed, also by one
replica alone.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from work import Checkpoints, ProgressFile, compute_loss, create_model

replica = int(os.environ["REPLICA_GROUP_ID"])
model, optimizer = create_model()


def load(state):
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
    min_replica_size=1,
    load_state_dict=load,
    state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
    replica_id=f"replica{replica}",
    timeout=timedelta(seconds=5),
)
checkpoints = Checkpoints(Path(sys.argv[1]), model, optimizer, 0)
step = checkpoints.restore()
manager.load_state_dict({"step": step, "batches_committed": 2 * step})
parallel = DistributedDataParallel(manager, model)
replicated_optimizer = Optimizer(manager, optimizer)
progress = ProgressFile(Path(sys.argv[1]), replica)
while True:
    replicated_optimizer.zero_grad()
    before = manager.current_step()
    compute_loss(parallel, before, replica).backward()
    replicated_optimizer.step()
    if manager.current_step() > before:
        if manager.participating_rank() == 0:
            checkpoints.save_if_due(manager.current_step())
        progress.record_step(manager.current_step())
