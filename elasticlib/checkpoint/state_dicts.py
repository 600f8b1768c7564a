"""Recognize the state dicts of torch's objects where the object itself has to be given.

A state dict is a copy. `restore` would fill in the copy and leave the object as it is, and a dict
that was built once before the training loop would be saved unchanged every time. Both lose the
object's state without an error, so `save`, `snapshot` and `restore` reject such a dict.

A module's state dict is accepted, because its tensors are the module's own parameters and buffers.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from ..errors import CheckpointError
from .state import Way, is_container, parts_of, spoken

_OPTIMIZER = {"state", "param_groups"}
_SCALER = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
_SCHEDULERS = (
    {"base_lrs", "last_epoch", "_step_count", "_last_lr"},  # nearly all schedulers
    {"min_lrs", "num_bad_epochs", "cooldown_counter", "mode_worse"},  # ReduceLROnPlateau
    {"_schedulers", "_last_lr"},  # SequentialLR and ChainedScheduler
)


def reject_state_dicts(state: object) -> None:
    """Raise CheckpointError if `state` contains the state dict of an optimizer, a learning-rate
    scheduler or a gradient scaler. What the objects in `state` return themselves is not checked."""
    pending: deque[tuple[Way, Any]] = deque([((), state)])
    visited = set()
    while pending:
        way, value = pending.popleft()
        owner = state_dict_owner(value)
        if owner is not None:
            article = "an" if owner == "optimizer" else "a"
            raise CheckpointError(
                f"{spoken(way)} is the state_dict() of {article} {owner}, which is a copy: restore "
                f"cannot change the {owner} through it. Put the {owner} itself there. (To keep "
                "plain values, use save_checkpoint and load_checkpoint.)"
            )
        if id(value) not in visited:
            visited.add(id(value))
            for key, part in parts_of(value).items():
                if is_container(type(part)):
                    pending.append(((*way, key), part))


def state_dict_owner(value: object) -> str | None:
    """Return what kind of object returned this state dict, or None if that is not certain."""
    if type(value) is not dict:
        return None
    keys = value.keys()
    if keys == _OPTIMIZER and _are_param_groups(value["param_groups"]):
        return "optimizer"
    if keys == _SCALER:
        return "gradient scaler"
    if any(keys >= names for names in _SCHEDULERS):
        return "learning-rate scheduler"
    return None


def _are_param_groups(groups: object) -> bool:
    if type(groups) is not list or not groups:
        return False
    return all(type(group) is dict and type(group.get("params")) is list for group in groups)
