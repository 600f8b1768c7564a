"""The training script of the README's picture under elasticrun: `elastic_training.py DIRECTORY`.

It ends when there is a file DIRECTORY/finish.
"""

import os
import sys
from pathlib import Path

import torch.distributed as dist
from toy_training import StepLog, ToyTraining, is_finished

from elasticlib import CheckpointManager, context


def train(manager: CheckpointManager, directory: Path) -> None:
    training = ToyTraining()
    state = {"model": training.net, "optimizer": training.optimizer}
    step = manager.restore(state).step
    log = StepLog(directory, int(os.environ["ELASTICLIB_GENERATION"]))
    while not is_finished(directory) and not context().should_stop():
        loss = training.train_step(step)
        step += 1
        manager.snapshot(step, state)
        context().step(step, loss=loss)
        log.write(step)
    manager.save(step, state)


def main() -> None:
    directory = Path(sys.argv[1])
    dist.init_process_group("gloo")
    with CheckpointManager(directory / "checkpoints") as manager:
        train(manager, directory)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
