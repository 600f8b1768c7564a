"""Callback for transformers' Trainer, and a function that finds its last complete checkpoint.

The Trainer keeps its own training loop, checkpoints and data loading. The callback reports steps to
the agent, and lets the Trainer save and stop when the agent requests it.
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
    """Callback that reports steps to the agent, and saves and stops when the agent requests it.

    The loss is reported as often as the Trainer logs it. After a stop request, the Trainer saves a
    checkpoint, and `train` returns with `stop_request` set. The script must then exit.

    Attributes:
        stop_request: Reason and deadline of the stop request for which `train` returned, or None.
    """

    def __init__(self) -> None:
        self.stop_request: StopRequest | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        context().report_starting()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> TrainerControl:
        context().step(state.global_step)
        self.stop_request = context().should_stop()
        if self.stop_request is not None:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # leave the remaining time for the save
        return control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        loss = (logs or {}).get("loss")  # not eval_loss, and not train_loss, a mean at the end
        if isinstance(loss, (int, float)):
            context().step(state.global_step, loss=loss)

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> TrainerControl:
        # The Trainer also calls this when it stops within an epoch, after it has saved. Its own
        # callback may have requested a save and an evaluation for the end of the epoch.
        if self.stop_request is not None:
            control.should_save = control.should_evaluate = False
        return control

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        context().report_saved(state.global_step)


def last_complete_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """Return the complete `checkpoint-N` with the highest N, or None if there is none.

    Use it for `train(resume_from_checkpoint=...)`. transformers' own `get_last_checkpoint` also
    returns a checkpoint whose save was interrupted. The Trainer writes `trainer_state.json` last,
    so a checkpoint is skipped if this file is missing, truncated or of another step, or if a file
    of weights, optimizer or random generators is truncated.

    The function cannot detect files that other ranks did not finish (FSDP, DeepSpeed), because
    `trainer_state.json` only shows that rank 0 has finished.

    Args:
        output_dir: The Trainer's `output_dir`.
    """
    checkpoints: dict[int, Path] = {}
    for path in Path(output_dir).glob("checkpoint-*"):
        match = re.fullmatch(r"checkpoint-(\d+)", path.name)
        if match and _is_complete(path, int(match[1])):
            checkpoints[int(match[1])] = path
    return str(checkpoints[max(checkpoints)]) if checkpoints else None


def _is_complete(checkpoint: Path, step: int) -> bool:
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        return bool(state["global_step"] == step) and all(
            is_complete(file)
            for pattern, is_complete in _FILE_CHECKS.items()
            for file in checkpoint.glob(pattern)
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _is_complete_safetensors(file: Path) -> bool:
    """Return True if the size of a safetensors file is the one that its header implies.

    The file starts with the length of the header, followed by the header in JSON.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_size = int.from_bytes(stream.read(8), "little")
        if header_size > size:
            return False
        header = json.loads(stream.read(header_size))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return size == 8 + header_size + max(ends, default=0)


_FILE_CHECKS: dict[str, Callable[[Path], bool]] = {
    "*.safetensors": _is_complete_safetensors,
    # A file of torch.save is a ZIP archive, whose directory is at the end.
    "*.pt": is_zipfile,
    "*.pth": is_zipfile,
    "pytorch_model*.bin": is_zipfile,
}
