"""Put a state that was read into the live state of a training script.

A restore compares everything before it changes anything: a state that does not match changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

import attrs
import torch
from torch.nn.parameter import is_lazy

from ..errors import CheckpointError, StateMismatchError, format_error, wrapper_hint
from ..untrusted import class_name_with_article
from .object_checks import (
    describe_difference,
    describe_tensor,
    object_mismatches,
    put_back_dtypes,
)
from .state_tree import (
    StateAccessor,
    StatePath,
    format_path,
    is_array,
    is_container,
    is_dtensor,
    is_plain_value,
    local_tensor,
    map_leaves,
    parts_of,
    state_accessor,
    with_parts,
)
from .tensor_layout import StridedLayout, element_bytes, without_repeats

_ON_META = (
    "on the meta device, which has no memory to restore into: call model.to_empty(device=...) first"
)
_SHOWN_MISMATCHES = 3
# The beginnings of torch's errors for a state of another module or optimizer.
_TORCH_MISMATCHES = ("Error(s) in loading state_dict", "loaded state dict ")


def check_names(state: object) -> dict[str, Any]:
    """Return `state` if it is a dict of names, as `restore` needs it.

    Raises:
        CheckpointError: `state` is not a dict.
    """
    if not isinstance(state, dict):
        raise CheckpointError(
            f"restore puts what was saved into a dict of names, got a {type(state).__qualname__}: "
            'give {"model": model, ...}, and save the same'
        )
    return state


def plan_restore(
    state: MutableMapping[str, Any],
    saved: object,
    *,
    strict: bool = True,
    allow_cast: bool = False,
) -> Callable[[], None]:
    """Return a function that puts `saved` into `state` in place.

    Until that function is called, nothing changes.

    Args:
        state: Maps names to objects, containers, tensors and plain values. `load_state_dict` is not
            called yet.
        saved: The state that was read. Each DTensor in it is the one at the same path of
            `state`, or a new one if an optimizer in `state` has none there yet.
        strict: Whether a name that only one side has is an error. If not, such names are ignored.
        allow_cast: Whether tensors of floating types are converted to the dtype of the live ones.

    Returns:
        A function that raises CheckpointError if an object rejects its state, or fails. The values
        before it in `state` have been changed by then.

    Raises:
        StateMismatchError: `saved` does not match `state`. The message names the missing names, or
            the first mismatches with both shapes or types.
    """
    if not isinstance(saved, dict):
        raise StateMismatchError(
            f"what was saved is no dict of names, but {class_name_with_article(saved)}"
        )
    if strict:
        _check_same_names(state, saved)
    planner = _RestorePlanner(allow_cast)
    names = [name for name in state if name in saved]
    actions = {name: planner.plan(state[name], saved[name], (name,)) for name in names}
    planner.check_shared_memory()
    mismatches = planner.mismatches
    if mismatches:
        more = len(mismatches) - _SHOWN_MISMATCHES
        suffix = f" (and {more} more like this)" if more > 0 else ""
        raise StateMismatchError("; ".join(mismatches[:_SHOWN_MISMATCHES]) + suffix)

    def put() -> None:
        with torch.no_grad():
            for name, action in actions.items():
                state[name] = action()

    return put


def has_all_names(state: Mapping[str, Any], saved: object) -> bool:
    """Return True if the live state has all names that were saved."""
    return isinstance(saved, dict) and saved.keys() <= state.keys()


def _check_same_names(state: Mapping[str, Any], saved: Mapping[Any, Any]) -> None:
    missing = ", ".join(repr(name) for name in state if name not in saved)
    surplus = ", ".join(repr(name) for name in saved if name not in state)
    sentences = [f"nothing was saved under {missing}"] if missing else []
    sentences += [f"the state has no {surplus}, which was saved"] if surplus else []
    if sentences:
        advice = "give the same names, or strict=False to restore those in both"
        raise StateMismatchError(f"{'; '.join(sentences)}: {advice}")


class TensorCopies:
    """Copies of tensors in new memory. Tensors of the same memory get copies of the same memory."""

    def __init__(self) -> None:
        self._memory: dict[Any, torch.Tensor] = {}
        # The originals are kept, because a new tensor could get the id of a deleted one.
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the copy of a tensor, the same object each time."""
        if id(tensor) not in self._tensors:
            copy = self._memory_of(tensor).detach().requires_grad_(tensor.requires_grad)
            if isinstance(tensor, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
            self._tensors[id(tensor)] = (tensor, copy)
        return self._tensors[id(tensor)][1]

    def _memory_of(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.numel():
            return tensor.detach().clone()
        bits = (tensor.is_conj(), tensor.is_neg())
        key = (tensor.device, tensor.data_ptr(), StridedLayout.of(tensor), bits)
        if key not in self._memory:
            self._memory[key] = tensor.detach().clone()
        return self._memory[key]


@attrs.frozen(eq=False)
class _TensorWrite:
    """A tensor that a restore fills, and the saved one that it is filled from."""

    path: StatePath
    target: torch.Tensor
    source: torch.Tensor


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), StridedLayout.of(tensor)


def _overlapping(writes: list[_TensorWrite]) -> Iterator[list[_TensorWrite]]:
    """Yield groups of writes. Those of different groups do not overlap in memory."""
    group: list[_TensorWrite] = []
    end = 0
    for write in sorted(writes, key=lambda w: (str(w.target.device), w.target.data_ptr())):
        begin = write.target.data_ptr()
        if group and (begin >= end or write.target.device != group[0].target.device):
            yield group
            group, end = [], 0
        group.append(write)
        num_bytes = StridedLayout.of(write.target).extent * write.target.element_size()
        end = max(end, begin + num_bytes)
    yield group


def _describe_conflict(writes: list[_TensorWrite]) -> str:
    """Return why writes into overlapping memory would overwrite each other, or an empty string."""
    for write in writes[1:]:
        if _memory(write.target) != _memory(writes[0].target):
            return (
                "overlap in memory, and a restore fills only tensors that are the same or have "
                "memory of their own: give one of them a copy, tensor.clone()"
            )
        if _memory(write.source) == _memory(writes[0].source):
            continue
        sources = (element_bytes(w.source.to("cpu", w.target.dtype)) for w in (write, writes[0]))
        if not torch.equal(*sources):
            return (
                "share memory, and tensors with other values were saved under these names: tie "
                "them in the same way as when they were saved"
            )
    return ""


class _RestorePlanner:
    """Compares a saved state with a live one, and collects the mismatches and the actions."""

    def __init__(self, allow_cast: bool) -> None:
        self.mismatches: list[str] = []  # sentences
        self._allow_cast = allow_cast
        self._copies = TensorCopies()
        self._writes: list[_TensorWrite] = []

    def plan(self, old: Any, new: Any, path: StatePath) -> Callable[[], Any]:
        """Return a function that puts `new` in place of `old`.

        The function returns the value for this place: `old` itself if it can be changed in place.
        If `new` does not fit, nothing is raised: the mismatch is added to `mismatches`, and the
        function must not be called.
        """
        if isinstance(old, torch.Tensor):
            return self._into_tensor(old, new, path)
        accessor = state_accessor(old)
        if accessor is not None:
            self._check_object(old, new, path)
            return partial(self._load, old, accessor, new, path)
        if is_array(old):
            return self._into_array(old, new, path)
        if is_container(old):
            return self._into_container(old, new, path)
        if old is not None and not is_plain_value(old):
            self._add_mismatch(
                path, f"is {class_name_with_article(old)}, which has no load_state_dict"
            )
        return partial(self._private_copy, new)

    def _add_mismatch(self, path: StatePath, reason: str) -> None:
        self.mismatches.append(f"{format_path(path)} {reason}")

    def _private_copy(self, new: Any) -> Any:
        """Return a copy that shares no memory with the pack that `new` was read from."""

        def copy(_path: StatePath, part: Any) -> Any:
            # A DTensor is that of the live state already, or a new one.
            is_plain = type(part) in (torch.Tensor, torch.nn.Parameter)
            return self._copies.copy_of(part) if is_plain else part

        return map_leaves(new, copy)

    def _into_tensor(self, old: Any, new: Any, path: StatePath) -> Callable[[], Any]:
        """Implement `plan` for a tensor."""
        if difference := describe_difference(old, new, allow_cast=self._allow_cast):
            self._add_mismatch(path, difference)
        elif old.device.type == "meta":
            self._add_mismatch(path, f"is {_ON_META}")
        elif not _has_equal_repeats(local_tensor(old), local_tensor(new)):
            expanded = f"{describe_tensor(old)} that is expanded"
            self._add_mismatch(path, f"is {expanded}, and what was saved is not")
        else:
            self._add_write(path, old, new)

        def copy() -> Any:
            target = without_repeats(local_tensor(old))
            target.copy_(local_tensor(new)[tuple(slice(n) for n in target.shape)])
            return old

        return copy

    def _check_object(self, old: Any, new: Any, path: StatePath) -> None:
        """Add the known reasons for which an object cannot load its state."""
        self.mismatches += object_mismatches(old, new, path, allow_cast=self._allow_cast)
        if isinstance(old, torch.optim.Optimizer):
            parameters = (one for group in old.param_groups for one in group["params"])
            if any(parameter.device.type == "meta" for parameter in parameters):
                self._add_mismatch(path, f"has parameters {_ON_META}")
        if not isinstance(old, torch.nn.Module) or not isinstance(new, Mapping):
            return
        targets = [*old.named_parameters(remove_duplicate=False)]
        for name, target in [*targets, *old.named_buffers(remove_duplicate=False)]:
            source = new.get(name)
            if is_lazy(target) or not isinstance(source, torch.Tensor):
                continue
            if target.device.type == "meta":
                self._add_mismatch((*path, name), f"is {_ON_META}")
            elif source.shape == target.shape:
                self._add_write((*path, name), target, source)

    def _add_write(self, path: StatePath, target: torch.Tensor, source: torch.Tensor) -> None:
        if target.numel() and not is_dtensor(target) and not is_dtensor(source):
            self._writes.append(_TensorWrite(path, target, source))

    def check_shared_memory(self) -> None:
        """Add a mismatch for live tensors in one memory that cannot all have their saved values.

        The tensor that is restored last would overwrite the others.
        """
        for writes in _overlapping(self._writes):
            with torch.no_grad():
                conflict = _describe_conflict(writes)
            if conflict:
                names = " and ".join(format_path(write.path) for write in writes[:3])
                self.mismatches.append(f"{names} {conflict}")

    def _into_array(self, old: Any, new: Any, path: StatePath) -> Callable[[], Any]:
        """Implement `plan` for a NumPy array."""
        mine = f"a NumPy array of {old.shape} {old.dtype}"
        saved = (
            f"a NumPy array of {new.shape} {new.dtype}"
            if is_array(new)
            else class_name_with_article(new)
        )
        if mine != saved:
            self._add_mismatch(path, f"is {mine}, and {saved} was saved")
        if not old.flags.writeable:
            return partial(self._private_copy, new)

        def copy() -> Any:
            old[...] = new
            return old

        return copy

    def _into_container(self, old: Any, new: Any, path: StatePath) -> Callable[[], Any]:
        """Implement `plan` for a container, and plan each of its parts."""
        if type(old) is not type(new):
            self._add_mismatch(
                path,
                f"is {class_name_with_article(old)}, and {class_name_with_article(new)} was saved",
            )
            return partial(self._private_copy, new)
        mine, theirs = parts_of(old), parts_of(new)
        tensors = [key for key, part in mine.items() if isinstance(part, torch.Tensor)]
        if hint := wrapper_hint(tensors, theirs):
            self._add_mismatch(path, f"has other names than were saved{hint}")
        for key, part in mine.items():
            if key not in theirs and state_accessor(part) is not None:
                where = format_path((*path, key))
                self.mismatches.append(
                    f"nothing was saved for {where}, {class_name_with_article(part)}"
                )
        actions = {key: self.plan(mine.get(key), theirs[key], (*path, key)) for key in theirs}

        def refill() -> Any:
            parts = {key: action() for key, action in actions.items()}
            if isinstance(old, tuple):
                return with_parts(old, parts)
            old.clear()
            old.extend(parts.values()) if isinstance(old, list) else old.update(parts)
            return old

        return refill

    def _load(self, old: Any, accessor: StateAccessor, new: Any, path: StatePath) -> Any:
        """Let the object `old` load the state `new`, and return `old`."""
        # A module copies the values into its own parameters, and needs no copy before.
        given = new if isinstance(old, torch.nn.Module) else self._private_copy(new)
        try:
            with torch.enable_grad():
                accessor.set_state(given)
            if isinstance(old, torch.optim.Optimizer) and not self._allow_cast:
                put_back_dtypes(old, given)
        except Exception as error:
            is_mismatch = str(error).startswith(_TORCH_MISMATCHES)
            kind = (
                StateMismatchError
                if is_mismatch or isinstance(error, StateMismatchError)
                else CheckpointError
            )
            what = f"{format_path(path)}, {class_name_with_article(old)}, could not load its state"
            names = dict(old.named_parameters()) if isinstance(old, torch.nn.Module) else ()
            raise kind(
                f"{what}: {format_error(error).rstrip()}{wrapper_hint(names, new)}"
            ) from error
        return old


def _has_equal_repeats(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Return True if elements of `new` that share one place in `old` are equal."""
    once = without_repeats(old)
    if once.shape == old.shape:
        return True
    repeated = new[tuple(slice(n) for n in once.shape)].expand(new.shape)
    # Bits are compared, because NaN is not equal to itself.
    return torch.equal(element_bytes(repeated), element_bytes(new))
