"""Check, before a restore changes anything, that tensors and objects can take a saved state.

torch's modules and optimizers check a state while they load it, after the first part has been
changed, and convert tensors of another dtype without an error. The functions here find the same
differences without a change. An object that loads its state in a way of its own (it overrides
`load_state_dict`, or has hooks) is checked only as far as its way is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.nn.parameter import is_lazy

from ..errors import StateMismatchError, wrapper_hint
from ..untrusted import class_name_with_article
from .state_tree import StatePath, format_path, is_dtensor
from .tensor_layout import dtype_name

_SHOWN_NAMES = 3
# torch's optimizers create these parts of their state with the shape and dtype of the parameter.
_LIKE_PARAMETER = {
    *("acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq"),
    *("momentum_buffer", "prev", "square_avg", "step_size", "sum"),
}
_FSDP_HOOKS = "torch.distributed.fsdp."  # the module of hooks that rename no tensors


# -- tensors ---------------------------------------------------------------------------------------


def describe_tensor(value: Any) -> str:
    """Describe the properties that a tensor must share with another to be copied into it."""
    if not isinstance(value, torch.Tensor):
        return class_name_with_article(value)
    if value.is_nested:
        return "a nested tensor"
    placements = list(getattr(value, "placements", ()))
    suffix = f" sharded as {placements}" if is_dtensor(value) else ""
    return f"a tensor of {tuple(value.shape)} {dtype_name(value.dtype)}{suffix}"


def describe_difference(target: Any, saved: Any, *, allow_cast: bool) -> str:
    """Describe why a saved value cannot be copied into a tensor, or return "" if it can.

    Args:
        target: the live tensor.
        saved: the saved value.
        allow_cast: whether floating types may be converted.

    Returns:
        The end of a sentence about the live tensor.
    """
    mine, theirs = describe_tensor(target), describe_tensor(saved)
    if mine == theirs:
        return ""
    remedy = ""
    if isinstance(saved, torch.Tensor) and not saved.is_nested and not target.is_nested:
        is_like = target.shape == saved.shape and is_dtensor(target) == is_dtensor(saved)
        if is_like and target.dtype != saved.dtype:
            remedy = cast_remedy(target.dtype, saved.dtype)
            if allow_cast and is_castable(target.dtype, saved.dtype):
                return ""
    return f"is {mine}, and {theirs} was saved{remedy}"


def is_castable(dtype: torch.dtype, saved: torch.dtype) -> bool:
    """Return True if `allow_cast` permits to convert a saved dtype to another one."""
    return dtype.is_floating_point and saved.is_floating_point


def cast_remedy(dtype: torch.dtype, saved: torch.dtype) -> str:
    """Return the end of an error message about a tensor that was saved with another dtype."""
    if is_castable(dtype, saved):
        return ": create it with the saved dtype, or give allow_cast=True to convert it"
    return ": create it with the saved dtype, because only floating types can be converted"


# -- modules ---------------------------------------------------------------------------------------


def _module_mismatches(
    module: torch.nn.Module, saved: object, path: StatePath, *, allow_cast: bool
) -> list[str]:
    """Return sentences about the differences because of which a module cannot load a state."""
    if type(module).load_state_dict is not torch.nn.Module.load_state_dict:
        return []
    if not isinstance(saved, Mapping):
        mine, theirs = class_name_with_article(module), class_name_with_article(saved)
        return [f"{format_path(path)} is {mine}, and {theirs} was saved"]
    expected, foreign = _expected_names(module)
    known = {name: saved[name] for name in saved if not f"{name}".startswith(foreign)}
    mismatches = []
    if not _has_hooks(module, "_load_state_dict_post_hooks"):  # They can ignore names.
        mismatches += _name_mismatches(module, expected.keys(), known, path)
    for name, target in expected.items():
        if name in known and isinstance(target, torch.Tensor) and not is_lazy(target):
            reason = describe_difference(target, known[name], allow_cast=allow_cast)
            mismatches += [f"{format_path((*path, name))} {reason}"] if reason else []
    return mismatches


def _expected_names(module: torch.nn.Module) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return what a module loads, as torch does, and the prefixes of names that it may change.

    The first result has the tensors, and None for the extra state of a module, by name.
    """
    expected: dict[str, Any] = {}
    foreign: list[str] = []
    for name, part in module.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        load = type(part)._load_from_state_dict
        is_own = not load.__module__.startswith("torch.nn.modules.")
        if is_own or _has_own_hooks(part._load_state_dict_pre_hooks):
            foreign.append(prefix)
        if prefix.startswith(tuple(foreign)):
            continue
        expected |= part.named_parameters(prefix=name, recurse=False, remove_duplicate=False)
        for key, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            if key not in part._non_persistent_buffers_set:
                expected[prefix + key] = buffer
        if type(part).set_extra_state is not torch.nn.Module.set_extra_state:
            expected[prefix + _EXTRA_STATE_KEY_SUFFIX] = None
    return expected, tuple(foreign)


def _has_hooks(module: torch.nn.Module, kind: str) -> bool:
    return any(_has_own_hooks(getattr(part, kind)) for part in module.modules())


def _has_own_hooks(hooks: Mapping[int, Any]) -> bool:
    """Return True if any hook may change which names are loaded."""
    return any(not getattr(h, "__module__", "").startswith(_FSDP_HOOKS) for h in hooks.values())


def _name_mismatches(
    module: torch.nn.Module, expected: Iterable[str], saved: Mapping[str, Any], path: StatePath
) -> list[str]:
    expected = {*expected}
    missing = [name for name in expected if name not in saved]
    surplus = [name for name in saved if name not in expected]
    if not missing and not surplus:
        return []
    reasons = [f"nothing was saved for {_shorten(missing)}"] if missing else []
    reasons += [f"it has no {_shorten(surplus)}, which was saved"] if surplus else []
    names = dict(module.named_parameters())
    what = f"{format_path(path)}, {class_name_with_article(module)}, has other names than were"
    return [f"{what} saved: {'; '.join(reasons)}{wrapper_hint(names, saved)}"]


def _shorten(names: Iterable[object]) -> str:
    """Return the first names, and the count of the rest."""
    shown = sorted(map(repr, names))
    more = len(shown) - _SHOWN_NAMES
    return ", ".join(shown[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


# -- optimizers ------------------------------------------------------------------------------------


def _optimizer_mismatches(
    optimizer: torch.optim.Optimizer, saved: Any, path: StatePath, *, allow_cast: bool
) -> list[str]:
    """Return sentences about the differences because of which an optimizer cannot load a state."""
    if not _loads_like_torch(optimizer):
        return []
    what = f"{format_path(path)}, {class_name_with_article(optimizer)},"
    try:
        sizes = [len(group["params"]) for group in saved["param_groups"]]
        states = [(number, dict(state)) for number, state in saved["state"].items()]
    except (AttributeError, KeyError, TypeError, ValueError):
        theirs = class_name_with_article(saved)
        return [f"{what} got {theirs} that is not the state of an optimizer"]
    own_sizes = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != own_sizes:
        return [
            f"{what} has {_describe_groups(own_sizes)}, and {_describe_groups(sizes)} were saved: "
            "create it with the same groups, in the same order"
        ]
    parameters = dict(_parameters_by_number(optimizer, saved))
    mismatches = []
    for number, state in states:
        parameter = parameters.get(number)
        is_known = type(optimizer).__module__.startswith("torch.optim.") and parameter is not None
        for name, value in state.items():
            if is_known and name in _LIKE_PARAMETER and isinstance(value, torch.Tensor):
                reason = describe_difference(parameter, value, allow_cast=allow_cast)
                where = format_path((*path, "state", number, name))
                mismatches += [f"{where} {reason}"] if reason else []
    return mismatches


def _loads_like_torch(optimizer: torch.optim.Optimizer) -> bool:
    own_hooks = (
        optimizer._optimizer_load_state_dict_pre_hooks,
        optimizer._optimizer_load_state_dict_post_hooks,
    )
    is_own = type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict
    return not is_own and not any(own_hooks)


def _describe_groups(sizes: list[int]) -> str:
    groups = f"{len(sizes)} parameter group{'s' if len(sizes) != 1 else ''}"
    return f"{groups} of {', '.join(map(str, sizes))} parameters" if sizes else groups


def _parameters_by_number(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]
) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield the number of each parameter in the saved state, and the live parameter."""
    numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    yield from zip(numbers, parameters, strict=True)


def put_back_dtypes(optimizer: torch.optim.Optimizer, loaded: Any) -> None:
    """Undo the conversions that torch has made when an optimizer loaded a state.

    torch converts each tensor in the state of a parameter to the dtype of the parameter, also
    counters, and averages that the optimizer keeps in a higher precision.

    Args:
        optimizer: the optimizer.
        loaded: the state that it has loaded. Its tensors belong to the optimizer from now on.
    """
    if not _loads_like_torch(optimizer):
        return
    for number, parameter in _parameters_by_number(optimizer, loaded):
        state = loaded["state"].get(number)
        for name, value in state.items() if isinstance(state, dict) else ():
            current = optimizer.state[parameter].get(name)
            if name == "step" or not isinstance(value, torch.Tensor):
                continue
            if isinstance(current, torch.Tensor) and current.dtype != value.dtype:
                optimizer.state[parameter][name] = value.to(current.device)


# -- all objects -----------------------------------------------------------------------------------


def object_mismatches(value: Any, saved: object, path: StatePath, *, allow_cast: bool) -> list[str]:
    """Return sentences about the known reasons for which an object cannot load a state."""
    mismatches: list[str] = []
    check = getattr(value, "check_state_dict", None)  # Objects of elasticlib have this method.
    try:
        if callable(check):
            check(saved)
    except StateMismatchError as error:
        what = f"{format_path(path)}, {class_name_with_article(value)}, could not load its state"
        mismatches.append(f"{what}: {error}")
    if isinstance(value, torch.nn.Module):
        mismatches += _module_mismatches(value, saved, path, allow_cast=allow_cast)
    if isinstance(value, torch.optim.Optimizer):
        mismatches += _optimizer_mismatches(value, saved, path, allow_cast=allow_cast)
    return mismatches
