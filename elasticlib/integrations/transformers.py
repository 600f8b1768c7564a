"""transformers' Trainer as a worker that its agent can stop: at a step, with a checkpoint of it.

The Trainer keeps its own loop, checkpoints and data; this listens, and finds what is whole.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        "elasticlib.integrations.transformers needs transformers: pip install"
        f" 'transformers[torch]', or the extra, pip install 'elasticlib[transformers]' ({error})"
    ) from error

from ..workers.context import Stop, context


class ElasticCallback(TrainerCallback):
    """Tells the agent each step, and when it asks, has the Trainer save and leave `train`.

    Attributes:
        stopped: why and until when, once it has; None before.
    """

    def __init__(self) -> None:
        self.stopped: Stop | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **rest: Any,
    ) -> None:
        context().starting()

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

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **rest: Any,
    ) -> None:
        context().saved(state.global_step)


def newest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The `checkpoint-N` of the highest N in `folder` that was written to its end; None of none.

    For `train(resume_from_checkpoint=...)`. The Trainer writes `trainer_state.json` last, so a
    folder without it, or with one that is cut short, is of a save that was killed: it is passed
    over, where transformers' own `get_last_checkpoint` takes it. Of what several ranks write side
    by side (FSDP, DeepSpeed) rank 0's end says nothing.
    """
    steps: dict[int, Path] = {}
    for path in Path(folder).glob("checkpoint-*"):
        number = re.fullmatch(r"checkpoint-(\d+)", path.name)
        if number and _is_whole(path / "trainer_state.json", int(number[1])):
            steps[int(number[1])] = path
    return str(steps[max(steps)]) if steps else None


def _is_whole(file: Path, step: int) -> bool:
    try:
        return bool(json.loads(file.read_text(encoding="utf-8"))["global_step"] == step)
    except (OSError, ValueError, KeyError, TypeError):
        return False
