"""`replica.py FOLDER`: with torchft. Each worker is a replica of its own, under its own torchrun.

A replica that comes back takes model, optimizer and step from the one that went on, so that nothing
is written to a disk. A step counts whenever it is committed, be it by one replica alone.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from work import Progress, loss_of, make

replica = int(os.environ["REPLICA_GROUP_ID"])
model, optimizer = make()


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
parallel = DistributedDataParallel(manager, model)
committing = Optimizer(manager, optimizer)
progress = Progress(Path(sys.argv[1]), replica)
while True:
    committing.zero_grad()
    before = manager.current_step()
    loss_of(parallel, before, replica).backward()
    committing.step()
    if manager.current_step() > before:
        progress.done(manager.current_step())
