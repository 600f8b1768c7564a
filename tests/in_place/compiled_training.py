"""Training of a compiled model on a device, for workers that continue in another group."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
from scripted_agent import write_record
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from training import BATCH, Job, is_last

import elasticlib


def train_compiled(folder: Path, number: int, device: str, backend: str) -> None:
    """Train, and record the pid, the compiled graphs and the device memory at each step."""
    elasticlib.init_process_group(backend)
    job = Job(logical=False)
    model = job.model.to(device)
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    loop = elasticlib.steps(job.batches, job.state, epochs=1000)
    for attempt in loop:
        with attempt as indices:
            if attempt.is_new_group:
                parallel = DistributedDataParallel(compiled)
            job.optimizer.zero_grad()
            # Each batch has the same shape, because the model is compiled once for each shape.
            rows = (indices * BATCH)[:BATCH]
            x, y = job.x[rows].to(device), job.y[rows].to(device)
            mse_loss(parallel(x), y).backward()
            job.optimizer.step()
        if attempt.is_committed:
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            allocated_bytes = torch.cuda.memory_allocated() if device == "cuda" else 0
            group = int(os.environ["ELASTICLIB_GENERATION"])
            write_record(
                folder,
                number,
                step=attempt.step,
                pid=os.getpid(),
                graphs=graphs,
                allocated_bytes=allocated_bytes,
                group=group,
                world=dist.get_world_size(),
            )
        if is_last(folder, loop.step):
            break
    write_record(
        folder, number, parameters=nn.utils.parameters_to_vector(model.parameters()).tolist()
    )
