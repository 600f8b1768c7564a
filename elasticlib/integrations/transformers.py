"""transformers' Trainer as a worker that its agent can stop: at a step, with a checkpoint of it.

The Trainer keeps its own loop, checkpoints and data; this listens, and finds what is whole.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        "elasticlib.integrations.transformers needs transformers: pip install"
        f" 'transformers[torch]', or the extra, pip install 'elasticlib[transformers]' ({error})"
    ) from error

from ..workers.context import StopRequest, context


class ElasticCallback(TrainerCallback):
    """Tells the agent each step, and the loss as often as the Trainer logs it; when the agent asks,
    has the Trainer save and leave `train`.

    Attributes:
        stopped: why and until when, once it has; None before.
    """

    def __init__(self) -> None:
        self.stopped: StopRequest | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **rest: Any,
    ) -> None:
        context().report_starting()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **rest: Any,
    ) -> TrainerControl:
        context().step(state.global_step)
        self.stopped = context().should_stop()
        if self.stopped is not None:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # it would take of the time that there is to save
        return control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **rest: Any,
    ) -> None:
        loss = (logs or {}).get("loss")  # of training; others are eval_loss and train_loss
        if isinstance(loss, (int, float)):
            context().step(state.global_step, loss=loss)

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **rest: Any,
    ) -> TrainerControl:
        """The Trainer calls this as it leaves, too, in the midst of an epoch, after its own
        callback has asked for what an epoch's end is to have: all is saved by then."""
        if self.stopped is not None:
            control.should_save = control.should_evaluate = False
        return control

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **rest: Any,
    ) -> None:
        context().report_saved(state.global_step)


def newest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The `checkpoint-N` of the highest N in `folder` that was written to its end; None of none.

    For `train(resume_from_checkpoint=...)`. The Trainer writes `trainer_state.json` last, so a
    folder without it, or with one that is cut short, is of a save that was killed: it is passed
    over, where transformers' own `get_last_checkpoint` takes it. So is one with an earlier save's
    state, where weights, optimizer or generators end before the end that they tell of. Of what
    several ranks write side by side (FSDP, DeepSpeed) rank 0's end says nothing.
    """
    steps: dict[int, Path] = {}
    for path in Path(folder).glob("checkpoint-*"):
        number = re.fullmatch(r"checkpoint-(\d+)", path.name)
        if number and _is_whole(path, int(number[1])):
            steps[int(number[1])] = path
    return str(steps[max(steps)]) if steps else None


def _is_whole(folder: Path, step: int) -> bool:
    try:
        state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        return bool(state["global_step"] == step) and all(
            whole(file) for pattern, whole in _SAVED.items() for file in folder.glob(pattern)
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _ends_where_it_says(file: Path) -> bool:
    """A `.safetensors` begins with the length of its header, and that header, in JSON."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > size:
            return False
        header = json.loads(opened.read(length))
    ends = [part["data_offsets"][1] for name, part in header.items() if name != "__metadata__"]
    return size == 8 + length + max(ends, default=0)


_SAVED: dict[str, Callable[[Path], bool]] = {
    "*.safetensors": _ends_where_it_says,
    # torch's own, whose directory is at the end.
    "*.pt": is_zipfile,
    "*.pth": is_zipfile,
    "pytorch_model*.bin": is_zipfile,
}
