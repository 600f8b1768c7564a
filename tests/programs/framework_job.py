"""Run one of the framework examples with faults, and trace the samples of each step.

Usage: framework_job.py NAME KILLS HOLD TRACE FOLDER. KILLS are comma-separated steps: in generation
n, rank 1 kills itself when it starts the n-th of them, and writes the time to the file HOLD.killed.
While the file HOLD exists, no rank starts a step after the number in it. TRACE is the prefix of the
files for `traces.read_traces`, and FOLDER is the argument of the example.

The examples are not changed for this. The samples of a step are identified when their rows of
numbers reach the model, and the epoch of a step follows from its number.
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from elasticlib import CheckpointManager
from elasticlib.examples.train_text import append_trace, weights_sha256

STEPS_AN_EPOCH = 10
name, kills, hold_file, trace = sys.argv[1:5]
killed_at = [int(step) for step in kills.split(",") if step]
generation = int(os.environ["ELASTICLIB_GENERATION"])


def must_wait(step):
    """Return True if the file HOLD does not permit the step yet."""
    try:
        return step > int(Path(hold_file).read_text() or step)
    except FileNotFoundError:
        return False


class Progress:
    """The step of this rank and the rows of its data set."""

    def __init__(self):
        self.rows, self.step = [], None
        self.net = None  # of an example that trains in a function, whose variables do not remain

    def record_resume(self, step):
        self.step = step
        append_trace(trace, resumed=step, at=time.time())

    def start_step(self, rows):
        """Start the next step, on these rows of numbers. Each row is one sample."""
        self.step += 1
        while must_wait(self.step):
            time.sleep(0.01)
        numbers = [self.rows.index(row) for row in rows.tolist()]
        epoch, world = (self.step - 1) // STEPS_AN_EPOCH, int(os.environ["WORLD_SIZE"])
        append_trace(trace, step=self.step, epoch=epoch, indices=numbers, world_size=world)
        if os.environ["RANK"] == "1" and killed_at[generation - 1 :][:1] == [self.step]:
            Path(f"{hold_file}.killed").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)


progress = Progress()


class RecordedDataset(torch.utils.data.TensorDataset):
    def __init__(self, inputs, targets):
        super().__init__(inputs, targets)
        progress.rows = inputs.tolist()


def before_forward(module, inputs):
    if isinstance(module, torch.nn.Linear):
        progress.start_step(inputs[0])


def watch_linear_regression():
    torch.utils.data.TensorDataset = RecordedDataset
    register_module_forward_pre_hook(before_forward)


def watch_lightning():
    from lightning.pytorch import LightningModule

    watch_linear_regression()
    LightningModule.on_train_start = lambda self: progress.record_resume(self.trainer.global_step)


def watch_transformers():
    from transformers import Trainer

    compute_loss = Trainer.compute_loss

    def compute_and_record(self, model, inputs, *args, **rest):
        if progress.step is None:
            progress.rows = [sample["input_ids"].tolist() for sample in self.train_dataset]
            progress.record_resume(self.state.global_step)
        progress.start_step(inputs["input_ids"])
        return compute_loss(self, model, inputs, *args, **rest)

    Trainer.compute_loss = compute_and_record


def watch_manager():
    restore = CheckpointManager.restore

    def restore_and_record(self, state, **rest):
        result = restore(self, state, **rest)
        progress.net = state["model"]
        progress.record_resume(result.step)
        return result

    watch_linear_regression()
    CheckpointManager.restore = restore_and_record


{"lightning": watch_lightning, "transformers": watch_transformers}.get(name, watch_manager)()
del sys.argv[1:5]
example = f"elasticlib.examples.with_{name}"
variables = runpy.run_module(example, run_name="__main__", alter_sys=True)
if os.environ["RANK"] == "0":
    net = variables["net"] if progress.net is None else progress.net
    print(f"weights sha256 {weights_sha256(net.cpu())}", flush=True)
