"""A state that was read, put back into the objects, containers and tensors of the one that is.

All of it is compared before any of it is changed, so a state that does not fit changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch

from ..errors import CheckpointError, StateMismatch, describe
from .outline import is_array, is_leaf
from .state import (
    Holder,
    Way,
    changed,
    holder_of,
    is_mapping,
    is_sequence,
    is_sharded_kind,
    parts_of,
    spoken,
    with_parts,
)
from .storages import Copies, bits_of, form_of, unexpanded


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
    plan = _Plan()
    for name in state:
        if name in found:
            plan.make(state[name], found[name], (name,))
    if plan.unfit:
        more = f" (and {len(plan.unfit) - 3} more like this)" if len(plan.unfit) > 3 else ""
        raise StateMismatch("; ".join(plan.unfit[:3]) + more)


def put(state: MutableMapping[str, Any], found: Mapping[str, Any]) -> None:
    """Put `found` into `state`, in place; both are known to `fit`. See `restore_from`.

    Args:
        state: what is changed.
        found: what was read. Its DTensors are this state's own, and no memory of others'.

    Raises:
        CheckpointError: an object refused its state, or failed. What stands before it in `state`
            has been changed by then.
    """
    plan = _Plan()
    steps = {name: plan.make(state[name], found[name], (name,)) for name in state if name in found}
    with torch.no_grad():
        for name, step in steps.items():
            state[name] = step()


def owned(value: Any, copies: Copies | None = None) -> Any:
    """A copy that shares no memory with the pack that `value` was read from, which has no
    DTensors."""
    made = Copies() if copies is None else copies

    def copy(_way: Way, part: object) -> object:
        if isinstance(part, torch.Tensor) and not is_sharded_kind(part):
            return made.of(part)
        return part

    return changed(value, copy)


def _about_names(missing: list[str], surplus: list[str]) -> str:
    told = []
    if missing:
        told.append(f"nothing was saved under {', '.join(map(repr, missing))}")
    if surplus:
        told.append(f"the state has no {', '.join(map(repr, surplus))}, which was saved")
    return "; ".join(told) + ": give the same names, or strict=False to restore those in both"


class _Plan:
    """How one state goes into another: what does not fit, as sentences, and what is to be done.

    What several things in the state share, they share again.
    """

    def __init__(self) -> None:
        self.unfit: list[str] = []
        self._copies = Copies()

    def make(self, old: Any, new: Any, way: Way) -> Callable[[], Any]:
        """What puts `new` where `old` stands, and returns what is to stand there then: `old` itself
        wherever it can be changed in place."""
        if isinstance(old, torch.Tensor):
            return self._into_tensor(old, new, way)
        holder = holder_of(old)
        if holder is not None:
            return partial(self._load, old, holder, new, way)
        if is_array(old):
            return self._into_array(old, new, way)
        if is_mapping(old) or is_sequence(old):
            return self._into_container(old, new, way)
        if old is not None and not is_leaf(old):
            self.unfit.append(f"{spoken(way)} is a {_name(old)}, which has no load_state_dict")
        return partial(self._own, new)

    def _own(self, new: Any) -> Any:
        return owned(new, self._copies)

    def _into_tensor(self, old: Any, new: Any, way: Way) -> Callable[[], Any]:
        if shape_of(old) != shape_of(new):
            self.unfit.append(f"{spoken(way)} is {shape_of(old)}, and {shape_of(new)} was saved")
        elif not _is_alike_where(local_of(old), local_of(new)):
            what = f"{shape_of(old)} that is expanded"
            self.unfit.append(f"{spoken(way)} is {what}, and what was saved is not")

        def copy() -> Any:
            target = unexpanded(local_of(old))
            target.copy_(local_of(new)[tuple(slice(n) for n in target.shape)])
            return old

        return copy

    def _into_array(self, old: Any, new: Any, way: Way) -> Callable[[], Any]:
        about = f"a NumPy array of {old.shape} {old.dtype}"
        saved = f"a NumPy array of {new.shape} {new.dtype}" if is_array(new) else f"a {_name(new)}"
        if about != saved:
            self.unfit.append(f"{spoken(way)} is {about}, and {saved} was saved")
        if not old.flags.writeable:
            return partial(self._own, new)

        def copy() -> Any:
            old[...] = new
            return old

        return copy

    def _into_container(self, old: Any, new: Any, way: Way) -> Callable[[], Any]:
        if type(old) is not type(new):
            self.unfit.append(f"{spoken(way)} is a {_name(old)}, and a {_name(new)} was saved")
            return partial(self._own, new)
        if type(old) is deque and old.maxlen != new.maxlen:
            what = f"a deque of maxlen {old.maxlen}, and one of {new.maxlen} was saved"
            self.unfit.append(f"{spoken(way)} is {what}")
        mine, theirs = parts_of(old), parts_of(new)
        for key, part in mine.items():
            if key not in theirs and holder_of(part) is not None:
                where = spoken((*way, key))
                self.unfit.append(f"nothing was saved for {where}, a {_name(part)}")
        steps = {key: self.make(mine.get(key), theirs[key], (*way, key)) for key in theirs}

        def refill() -> Any:
            parts = {key: step() for key, step in steps.items()}
            if isinstance(old, tuple):
                return with_parts(old, parts)
            old.clear()
            old.update(parts) if is_mapping(old) else old.extend(parts.values())
            return old

        return refill

    def _load(self, old: Any, holder: Holder, new: Any, way: Way) -> Any:
        # A module copies what it is given into its own parameters, and needs no copy before.
        mine = new if isinstance(old, torch.nn.Module) else owned(new, self._copies)
        try:
            with torch.enable_grad():
                holder.take(mine)
        except Exception as error:
            raise CheckpointError(
                f"{spoken(way)}, a {_name(old)}, could not load its state: {describe(error)}"
            ) from error
        return old


def shape_of(value: Any) -> str:
    """In words, what a tensor must have in common with another to be copied into it."""
    if not isinstance(value, torch.Tensor):
        return f"a {_name(value)}"
    cut = f" sharded as {list(getattr(value, 'placements', ()))}" if is_sharded_kind(value) else ""
    return f"a tensor of {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{cut}"


def local_of(value: Any) -> torch.Tensor:
    """What this rank has of a tensor: of a plain one all of it."""
    found: torch.Tensor = value.to_local() if is_sharded_kind(value) else value
    return found


def _is_alike_where(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether elements of `new` that share one place in `old` are equal."""
    once = unexpanded(old)
    if once.shape == old.shape:
        return True
    like = new[tuple(slice(n) for n in once.shape)].expand(new.shape)
    # As bits: what is no number is not equal to itself.
    return form_of(like) == form_of(new) or torch.equal(bits_of(like), bits_of(new))


def _name(value: object) -> str:
    return type(value).__qualname__
