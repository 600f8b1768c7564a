"""The training script of the README's picture under torchrun: `plain_training.py DIRECTORY`.

It does not use elasticlib. Rank 0 saves a checkpoint after every fourth step. The script ends when
there is a file DIRECTORY/finish.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from toy_training import StepLog, ToyTraining, is_finished

SAVE_EVERY = 4


def count_generation(directory: Path) -> int:
    """Return how often the workers of the job were started, the same number on all ranks."""
    number = torch.zeros((), dtype=torch.int64)
    if dist.get_rank() == 0:
        number += 1 + len(list(directory.glob("generation.*")))
        (directory / f"generation.{int(number)}").touch()
    dist.broadcast(number, src=0)
    return int(number)


def train(directory: Path) -> None:
    training = ToyTraining()
    parts = {"model": training.net, "optimizer": training.optimizer}
    checkpoint, step = directory / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        step = saved["step"]
    log = StepLog(directory, count_generation(directory))
    while not is_finished(directory):
        training.train_step(step)
        step += 1
        log.write(step)
        if step % SAVE_EVERY == 0 and dist.get_rank() == 0:
            states = {name: part.state_dict() for name, part in parts.items()}
            temporary = checkpoint.with_suffix(f".{os.getpid()}")
            torch.save({**states, "step": step}, temporary)
            temporary.replace(checkpoint)


def main() -> None:
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
