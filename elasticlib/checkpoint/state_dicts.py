"""Recognize what must not be given in a state: state dicts, and objects that torch has sharded.

The state dict of an object must not be given where the object itself has to be.

A state dict is a copy. `restore` would fill in the copy and leave the object as it is, and a dict
that was built once before the training loop would be saved unchanged every time. Both lose the
object's state without an error, so `save`, `snapshot` and `restore` reject such a dict.

A module's state dict is accepted, because its tensors are the module's own parameters and buffers.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..data.position import STATE_FIELDS

_OPTIMIZER = {"state", "param_groups"}
_SCALER = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
_SCHEDULERS = (
    {"base_lrs", "last_epoch", "_step_count", "_last_lr"},  # nearly all schedulers
    {"min_lrs", "num_bad_epochs", "cooldown_counter", "mode_worse"},  # ReduceLROnPlateau
    {"_schedulers", "_last_lr"},  # SequentialLR and ChainedScheduler
)
_FSDP2 = (
    " (FSDP2), of which each rank saves its part. Without that, save the state "
    "with torch.distributed.checkpoint"
)
# Each state dict above has at least one of these keys, and few other dicts have.
_MARKERS = ("param_groups", "growth_factor", "_last_lr", "mode_worse", "consumed")


def state_dict_owner(value: dict[Any, Any]) -> str | None:
    """Return the kind of object that returned this state dict, or None if that is not certain."""
    if not any(key in value for key in _MARKERS):
        return None
    keys = value.keys()
    if keys == _OPTIMIZER and _are_param_groups(value["param_groups"]):
        return "optimizer"
    if keys == _SCALER:
        return "gradient scaler"
    if keys == STATE_FIELDS:  # the samplers of `data` and their iterators
        return "sampler"
    if any(keys >= names for names in _SCHEDULERS):
        return "learning-rate scheduler"
    return None


def describe_state_dict(owner: str) -> str:
    """Return the end of the error message that rejects the state dict of this kind of object."""
    article = "an" if owner == "optimizer" else "a"
    return (
        f"is the state_dict() of {article} {owner}, which is a copy: restore cannot change the "
        f"{owner} through it. Put the {owner} itself there. (To keep plain values, use "
        "save_checkpoint and load_checkpoint.)"
    )


def describe_sharded_object(value: object) -> str | None:
    """Return why an object cannot be saved by rank 0 for all ranks, as the end of an error message.

    FSDP1 and ZeroRedundancyOptimizer give each rank another part of a state, in plain tensors. So
    the parts of the other ranks would be lost. Return None for any other object.
    """
    kinds = type(value).__mro__
    if any(
        kind.__name__ == "ZeroRedundancyOptimizer"
        and kind.__module__.startswith("torch.distributed.optim")
        for kind in kinds
    ):
        return (
            "is a ZeroRedundancyOptimizer, of whose state each rank has another part: use a plain "
            f"optimizer, or shard the model with fully_shard{_FSDP2}"
        )
    fsdp = sys.modules.get("torch.distributed.fsdp")
    wrapper = getattr(fsdp, "FullyShardedDataParallel", ())
    parameters: list[Any] = []
    if isinstance(value, torch.optim.Optimizer):
        parameters = [one for group in value.param_groups for one in group["params"]]
    modules = value.modules() if isinstance(value, torch.nn.Module) else ()
    if any(isinstance(module, wrapper) for module in modules) or any(
        getattr(parameter, "_fsdp_flattened", False) for parameter in parameters
    ):
        return (
            "belongs to a model that FullyShardedDataParallel (FSDP1) has sharded, of whose state "
            f"each rank has another part: shard the model with fully_shard{_FSDP2}"
        )
    return None


def _are_param_groups(groups: object) -> bool:
    if type(groups) is not list or not groups:
        return False
    return all(type(group) is dict and type(group.get("params")) is list for group in groups)
