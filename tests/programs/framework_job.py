"""One of the frameworks' examples, with faults: `framework_job.py NAME KILLS HOLD TRACE FOLDER`.

KILLS are steps, comma-separated: in generation n rank 1 kills itself as it begins the nth, and
leaves the time in the file HOLD.killed. No step is begun past the number in the file HOLD, while it
is there. TRACE is the prefix of what `traces.read_traces` reads, and FOLDER the example's argument.

The examples know nothing of this: which samples a step uses is seen where their rows of numbers
come to the model, and the epoch of a step follows from its number.
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
name, kills, hold, trace = sys.argv[1:5]
killed_at = [int(step) for step in kills.split(",") if step]
generation = int(os.environ["ELASTICLIB_GENERATION"])


def held(step):
    try:
        return step > int(Path(hold).read_text() or step)
    except FileNotFoundError:
        return False


class Seen:
    """What this rank has begun."""

    def __init__(self):
        self.rows, self.step = [], None

    def resumed(self, step):
        self.step = step
        append_trace(trace, resumed=step, at=time.time())

    def begin(self, rows):
        """The next step, on these rows of numbers, each of which is one sample's."""
        self.step += 1
        while held(self.step):
            time.sleep(0.01)
        numbers = [self.rows.index(row) for row in rows.tolist()]
        epoch, world = (self.step - 1) // STEPS_AN_EPOCH, int(os.environ["WORLD_SIZE"])
        append_trace(trace, step=self.step, epoch=epoch, indices=numbers, world_size=world)
        if os.environ["RANK"] == "1" and killed_at[generation - 1 :][:1] == [self.step]:
            Path(f"{hold}.killed").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)


seen = Seen()


class SeenDataset(torch.utils.data.TensorDataset):
    def __init__(self, inputs, targets):
        super().__init__(inputs, targets)
        seen.rows = inputs.tolist()


def before_forward(module, inputs):
    if isinstance(module, torch.nn.Linear):
        seen.begin(inputs[0])


def watch_linear_regression():
    torch.utils.data.TensorDataset = SeenDataset
    register_module_forward_pre_hook(before_forward)


def watch_lightning():
    from lightning.pytorch import LightningModule

    watch_linear_regression()
    LightningModule.on_train_start = lambda self: seen.resumed(self.trainer.global_step)


def watch_transformers():
    from transformers import Trainer

    compute_loss = Trainer.compute_loss

    def compute_and_tell(self, model, inputs, *args, **rest):
        if seen.step is None:
            seen.rows = [sample["input_ids"].tolist() for sample in self.train_dataset]
            seen.resumed(self.state.global_step)
        seen.begin(inputs["input_ids"])
        return compute_loss(self, model, inputs, *args, **rest)

    Trainer.compute_loss = compute_and_tell


def watch_manager():
    restore = CheckpointManager.restore

    def restore_and_tell(self, *args, **rest):
        found = restore(self, *args, **rest)
        seen.resumed(found.step)
        return found

    watch_linear_regression()
    CheckpointManager.restore = restore_and_tell


{"lightning": watch_lightning, "transformers": watch_transformers}.get(name, watch_manager)()
del sys.argv[1:5]
ended = runpy.run_module(f"elasticlib.examples.with_{name}", run_name="__main__", alter_sys=True)
if os.environ["RANK"] == "0":
    print(f"weights sha256 {weights_sha256(ended['net'].cpu())}", flush=True)
