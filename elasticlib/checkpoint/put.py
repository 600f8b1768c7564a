"""A state that was read, put back into the objects, containers and tensors of the one that is.

All of it is compared before any of it is changed, so a state that does not fit changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch

from ..errors import CheckpointError, StateMismatch, describe
from . import arrays
from .containers import Way, changed, is_mapping, is_sequence, is_stateful, parts_of, with_parts
from .gather import is_sharded_kind
from .storages import Copies, bits_of, form_of, unexpanded
from .tree import is_leaf


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


def put(state: MutableMapping[str, Any], found: Mapping[str, Any]) -> None:
    """Put `found` into `state`, in place; both are known to `fit`. See `restore_from`.

    Args:
        state: what is changed.
        found: what was read. Its DTensors are this state's own, and no memory of others'.

    Raises:
        CheckpointError: an object refused its state, or failed. What stands before it in `state`
            has been changed by then.
    """
    putting = _Putting()
    with torch.no_grad():
        for name in state:
            if name in found:
                state[name] = putting.put(state[name], found[name], f"state[{name!r}]")


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
        elif not _is_alike_where(local_of(old), local_of(new)):
            yield f"{where} is {shape_of(old)} that is expanded, and what was saved is not"
    elif arrays.is_array(old):
        if not arrays.is_array(new) or arrays.shape_of(old) != arrays.shape_of(new):
            saved = arrays.shape_of(new) if arrays.is_array(new) else f"a {_name(new)}"
            yield f"{where} is {arrays.shape_of(old)}, and {saved} was saved"
    elif is_mapping(old) or is_sequence(old):
        yield from _unfit_inside(old, new, where)
    elif not is_leaf(old):
        yield f"{where} is a {_name(old)}, which has no load_state_dict"


def _unfit_inside(old: Any, new: Any, where: str) -> Iterator[str]:
    if type(old) is not type(new):
        yield f"{where} is a {_name(old)}, and a {_name(new)} was saved"
        return
    if type(old) is deque and old.maxlen != new.maxlen:
        yield f"{where} is a deque of maxlen {old.maxlen}, and one of {new.maxlen} was saved"
    theirs = parts_of(new)
    for key, part in parts_of(old).items():
        if key in theirs:
            yield from _unfit(part, theirs[key], f"{where}[{key!r}]")
        elif is_stateful(part):
            yield f"nothing was saved for {where}[{key!r}], a {_name(part)}"


def shape_of(value: Any) -> str:
    """In words, what a tensor must have in common with another to be copied into it."""
    if not isinstance(value, torch.Tensor):
        return f"a {_name(value)}"
    sharded: Any = value
    cut = f" sharded as {list(sharded.placements)}" if is_sharded_kind(value) else ""
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


class _Putting:
    """One state's way back. What several things in it share, they share again."""

    def __init__(self) -> None:
        self._copies = Copies()

    def put(self, old: Any, new: Any, where: str) -> Any:
        """What is to stand where `old` does: `old` itself wherever it could be changed in place."""
        if is_stateful(old):
            self._load(old, new, where)
            return old
        if isinstance(old, torch.Tensor):
            target = unexpanded(local_of(old))
            target.copy_(local_of(new)[tuple(slice(n) for n in target.shape)])
            return old
        if arrays.is_array(old) and old.flags.writeable:
            old[...] = new
            return old
        if is_mapping(old):
            parts = {
                key: self.put(old.get(key), part, f"{where}[{key!r}]") for key, part in new.items()
            }
            old.clear()
            old.update(parts)
            return old
        if is_sequence(old):
            return self._put_items(old, new, where)
        return owned(new, self._copies)

    def _put_items(self, old: Any, new: Any, where: str) -> Any:
        before = [*old, *[None] * len(new)]
        items = {
            at: self.put(item, part, f"{where}[{at}]")
            for at, (item, part) in enumerate(zip(before, new, strict=False))
        }
        if isinstance(old, tuple):
            return with_parts(old, items)
        old.clear()
        old.extend(items.values())
        return old

    def _load(self, old: Any, new: Any, where: str) -> None:
        # A module copies what it is given into its own parameters, and needs no copy before.
        mine = new if isinstance(old, torch.nn.Module) else owned(new, self._copies)
        try:
            with torch.enable_grad():
                old.load_state_dict(mine)
        except Exception as error:
            raise CheckpointError(
                f"{where}, a {_name(old)}, could not load its state: {describe(error)}"
            ) from error


def owned(value: Any, copies: Copies | None = None) -> Any:
    """A copy that shares no memory with the pack that `value` was read from, which has no
    DTensors."""
    made = Copies() if copies is None else copies

    def change(_way: Way, part: object) -> object:
        if isinstance(part, torch.Tensor) and not is_sharded_kind(part):
            return made.of(part)
        return part

    return changed(value, change)
