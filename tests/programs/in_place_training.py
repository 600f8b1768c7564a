"""A training with logical workers and `elasticlib.steps`, whose speed a test controls.

Usage: in_place_training.py FOLDER EPOCHS SAMPLES BATCH. Before a worker takes part in a step, it
appends its samples to FOLDER/trace.*, which `traces.read_traces` reads. When the step is committed,
it appends a line to FOLDER/committed.NODE.LOCAL_RANK.PID. While FOLDER/pace exists, each step
sleeps for as many seconds, at a line that changes from step to step, and longer in the second half
of the run, so that the run does not finish. While FOLDER/raise exists, rank 0 raises an error.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import elasticlib
from elasticlib.examples.train_text import append_trace, weights_sha256

folder = Path(sys.argv[1])
EPOCHS, SAMPLES, BATCH = map(int, sys.argv[2:])
LOGICAL = 6  # the largest world size
torch.set_num_threads(1)
elasticlib.init_process_group("gloo")
torch.manual_seed(0)
inputs, targets = torch.randn(SAMPLES, 16), torch.randn(SAMPLES, 1)
layers = (torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
logical = elasticlib.LogicalWorkers(model, LOGICAL)
# Each rank takes the samples of its logical workers from the whole batch.
sampler = elasticlib.ElasticDistributedSampler(inputs, 1, 0, tail="exact")
batches = elasticlib.ElasticBatchSampler(sampler, BATCH)
state = {"model": model, "optimizer": optimizer, "rates": rates}
state |= {"sampler": sampler, "logical": logical}


def pause(at: int, step: int) -> None:
    """Sleep at this line of the step, if it is the one that is due."""
    pace = folder / "pace"
    if at == step % 4 and pace.exists():
        done = step * BATCH / (EPOCHS * SAMPLES)
        pauses = ((0.9, 5.0), (0.75, 2.0), (0.5, 0.5), (0.0, float(pace.read_text())))
        time.sleep(next(seconds for part, seconds in pauses if done >= part))


def train(step: int, indices: list[int]) -> torch.Tensor:
    whole, share = batches.next_batch_size, torch.zeros(())
    first = logical.samples(whole).start
    for worker in logical.step(step):
        places = worker.samples(whole)
        mine = indices[places.start - first : places.stop - first]
        if mine:
            loss = (model(inputs[mine]) - targets[mine]).square().sum() / whole
            loss.backward()
            share += loss.detach()
    pause(1, step)
    logical.reduce()
    pause(2, step)
    optimizer.step()
    rates.step()
    return share


own = folder / f"committed.{os.environ.get('NODE')}.{os.environ['LOCAL_RANK']}.{os.getpid()}"
committed = own.open("a", buffering=1)
with elasticlib.CheckpointManager(folder / "checkpoints", keep_last=2) as manager:
    attempts = elasticlib.steps(
        batches, state, manager=manager, epochs=EPOCHS, logical_workers=logical, save_every=25
    )
    for attempt in attempts:
        with attempt as indices:
            step, world = attempt.step, dist.get_world_size()
            if attempt.is_new_group:
                append_trace(f"{folder}/trace", resumed=step - 1, at=time.time())
            used = {"epoch": attempt.epoch, "indices": indices, "world_size": world}
            append_trace(f"{folder}/trace", step=step, **used)
            pause(0, step)
            if dist.get_rank() == 0 and (folder / "raise").exists():
                raise ValueError("an error of the script's own")
            attempt.report(loss=float(train(step, indices)), samples=len(indices))
            pause(3, step)
        if attempt.is_committed:
            generation = int(os.environ["ELASTICLIB_GENERATION"])
            print(json.dumps([step, generation, world]), file=committed)
if attempts.stop_request:
    print(f"stopped: {attempts.stop_request.reason}", flush=True)
elif dist.get_rank() == 0:
    print(f"done: steps {attempts.step} weights sha256 {weights_sha256(model)}", flush=True)
dist.destroy_process_group()
