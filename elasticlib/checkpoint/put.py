"""A state that was read, put back into the objects, containers and tensors of the one that is.

All of it is compared before any of it is changed, so a state that does not fit changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, TypeAlias

import torch

from ..errors import CheckpointError, StateMismatch, describe
from .shards import changed, is_stateful, local_of, rebuild, shape_of

_PLAIN = (bool, int, float, complex, str, bytes, set, torch.Size, torch.dtype, torch.device)


def check_names(state: object) -> dict[str, Any]:
    """What `restore` can change in place. Raises CheckpointError."""
    if not isinstance(state, dict):
        raise CheckpointError(
            f"restore puts what was saved into a dict of names, got a {type(state).__qualname__}: "
            'give {"model": model, ...}, and save the same'
        )
    return state


def fit(state: Mapping[str, Any], found: object, *, strict: bool = True) -> None:
    """Whether `put` can put `found` into `state`; objects with `load_state_dict` are not asked.

    Raises:
        StateMismatch: it cannot. The message names what is missing on either side, or the first
            things that do not fit, with both shapes or types.
    """
    if not isinstance(found, dict):
        raise StateMismatch(f"what was saved is no dict of names, but a {_name(found)}")
    if strict:
        missing = [name for name in state if name not in found]
        surplus = [name for name in found if name not in state]
        if missing or surplus:
            raise StateMismatch(_about_names(missing, surplus))
    unfit = [
        sentence
        for name in state
        if name in found
        for sentence in _unfit(state[name], found[name], f"state[{name!r}]")
    ]
    if unfit:
        more = f" (and {len(unfit) - 3} more like this)" if len(unfit) > 3 else ""
        raise StateMismatch("; ".join(unfit[:3]) + more)


Cuts: TypeAlias = Mapping[str, torch.Tensor]


def put(state: MutableMapping[str, Any], found: Mapping[str, Any], cuts: Cuts) -> None:
    """Put `found` into `state`, in place; both are known to `fit`. See `restore_from`.

    Args:
        state: what is changed.
        found: what was read.
        cuts: `shards.cuts_of` the state, if `found` has notes of DTensors.

    Raises:
        CheckpointError: an object refused its state, or failed. What stands before it in `state`
            has been changed by then.
    """
    with torch.no_grad():
        for name in state:
            if name in found:
                state[name] = _put(state[name], found[name], f"state[{name!r}]", cuts)


def _about_names(missing: list[str], surplus: list[str]) -> str:
    told = []
    if missing:
        told.append(f"nothing was saved under {', '.join(map(repr, missing))}")
    if surplus:
        told.append(f"the state has no {', '.join(map(repr, surplus))}, which was saved")
    return "; ".join(told) + ": give the same names, or strict=False to restore those in both"


def _unfit(old: Any, new: Any, where: str) -> Iterator[str]:
    if is_stateful(old) or old is None:
        return
    if isinstance(old, torch.Tensor):
        if shape_of(old) != shape_of(new):
            yield f"{where} is {shape_of(old)}, and {shape_of(new)} was saved"
    elif isinstance(old, dict | list | tuple) and not isinstance(old, torch.Size):
        yield from _unfit_inside(old, new, where)
    elif not isinstance(old, _PLAIN):
        yield f"{where} is a {_name(old)}, which has no load_state_dict"


def _unfit_inside(old: Any, new: Any, where: str) -> Iterator[str]:
    if type(old) is not type(new):
        yield f"{where} is a {_name(old)}, and a {_name(new)} was saved"
        return
    theirs = new if isinstance(new, dict) else dict(enumerate(new))
    for key, part in old.items() if isinstance(old, dict) else enumerate(old):
        if key in theirs:
            yield from _unfit(part, theirs[key], f"{where}[{key!r}]")
        elif is_stateful(part):
            yield f"nothing was saved for {where}[{key!r}], a {_name(part)}"


def _name(value: object) -> str:
    return type(value).__qualname__


def _put(old: Any, new: Any, where: str, cuts: Cuts) -> Any:
    """What is to stand where `old` does: `old` itself wherever it could be changed in place."""
    if is_stateful(old):
        _load(old, new, where, cuts)
        return old
    if isinstance(old, torch.Tensor):
        local_of(old).copy_(local_of(new))
        return old
    if isinstance(old, dict):
        parts = {
            key: _put(old.get(key), part, f"{where}[{key!r}]", cuts) for key, part in new.items()
        }
        old.clear()
        old.update(parts)
        return old
    if type(old) in (list, tuple):
        before = [*old, *[None] * len(new)]
        items = [
            _put(item, part, f"{where}[{at}]", cuts)
            for at, (item, part) in enumerate(zip(before, new, strict=False))
        ]
        if type(old) is tuple:
            return tuple(items)
        old[:] = items
        return old
    return rebuild(owned(new), cuts)


def _load(old: Any, new: Any, where: str, cuts: Cuts) -> None:
    # A module copies what it is given into its own parameters, and needs no copy before.
    mine = new if isinstance(old, torch.nn.Module) else owned(new)
    try:
        with torch.enable_grad():
            old.load_state_dict(rebuild(mine, cuts))
    except Exception as error:
        raise CheckpointError(
            f"{where}, a {_name(old)}, could not load its state: {describe(error)}"
        ) from error


def owned(value: Any) -> Any:
    """A copy that shares no memory with the pack that `value` was read from."""
    copies: dict[int, torch.Tensor] = {}

    def change(part: object) -> object:
        if not isinstance(part, torch.Tensor):
            return part
        # One tensor under two names stays one.
        if id(part) not in copies:
            copies[id(part)] = _copy(part)
        return copies[id(part)]

    return changed(value, change)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
    return copy.requires_grad_() if tensor.requires_grad else copy
