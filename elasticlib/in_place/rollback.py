"""Rollback of an interrupted training step.

The whole state is copied when a step attempt starts, and written back if the attempt is
interrupted. Nothing is inferred from `Tensor._version` or from which functions were called:
assignments through `.data` and fused optimizers write without raising the version, and a write may
come from any line of the script.
"""

from __future__ import annotations

import copy
import enum
import random
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Set
from contextlib import nullcontext
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..checkpoint.restore_plan import TensorCopies
from ..checkpoint.state_tree import (
    StatePath,
    format_path,
    is_array,
    is_container,
    is_dtensor,
    is_plain_value,
    map_leaves,
    parts_of,
    state_accessor,
    to_plain_values,
    with_parts,
)
from ..checkpoint.tensor_layout import without_repeats
from ..errors import ConfigError
from ..logical.logical_workers import LogicalWorkers
from ..untrusted import class_name_with_article

SHARDED_STATE = (
    "the state has sharded tensors, and the part of a lost worker cannot be taken from the others:"
    " give steps a function that creates the model and the optimizer for the current group, and"
    " returns the state"
)

# Objects of these types never change.
_CONSTANTS = (type, enum.Enum, types.FunctionType, types.BuiltinFunctionType)
_IMMUTABLE = frozenset({type(None), bool, int, float, str, bytes, complex})

# A module that overrides one of them has values besides its parameters and buffers.
_STATE_METHODS = ("get_extra_state", "state_dict", "_save_to_state_dict")


class StateRollback:
    """Rolls a training state back to the start of a step attempt.

    During an attempt it keeps a copy of all tensors of the state, on their devices.

    A signal handler's exception, such as KeyboardInterrupt, may interrupt any method at any line.
    The method can then be called again.
    """

    def __init__(self) -> None:
        self._content = _Content()  # of the state, at the last `begin`
        self._restore_generators: list[Callable[[], object]] = []  # one for each generator

    def begin(self, *values: object) -> None:
        """Copy what the step attempt that starts now may change: the values, and random numbers.

        Args:
            values: containers, tensors, and objects, as in a state for `CheckpointManager`. A
                caller that gives none cannot undo anything but the use of random numbers.

        Raises:
            ConfigError: there is a sharded tensor.
        """
        content = _Content(self._content.tensors)
        for value in values:
            content.add(value)
        content.copy_tensors()
        self._restore_generators = list(_capture_generators())
        self._content = content

    def roll_back(self) -> str:
        """Undo what was changed since `begin`. Gradients are not touched, see `drop_gradients`.

        Returns:
            The reason why a part of the state cannot be undone; an empty string if the state is
            exactly that at `begin`.
        """
        self._content.write_back()
        for restore_generator in self._restore_generators:
            restore_generator()
        return "; ".join(self._content.obstacles)


@torch.no_grad()
def drop_gradients(state: object) -> None:
    """Set all gradients of modules and optimizers in the state to None."""

    def drop(_path: StatePath, value: Any) -> Any:
        if isinstance(value, nn.Module | torch.optim.Optimizer):
            value.zero_grad(set_to_none=True)
        elif isinstance(value, torch.amp.GradScaler):
            # Otherwise the scaler would refuse to unscale the gradients of the next attempt.
            value._per_optimizer_states.clear()
        return value

    map_leaves(state, drop)


class _TensorCopy:
    """A tensor and a copy of its elements, in memory that is used again at each step."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.place = tensor.detach()  # refers to the memory, even if `tensor.data` is replaced
        kinds = (Tensor, nn.Parameter)
        self.is_plain = type(tensor) in kinds and tensor.layout is torch.strided
        # Elements that share one place in memory are copied once.
        self.elements = without_repeats(self.place) if self.is_plain else self.place
        self.copy = torch.empty_like(self.elements) if self.is_plain else self.elements.clone()
        self.group = (tensor.device, tensor.dtype, self.is_plain)  # copied in one call
        self.flags = (tensor.is_leaf, tensor.requires_grad)

    def is_for(self, tensor: Tensor) -> bool:
        """Return True if `tensor` is the same tensor, in the same memory."""
        return self.tensor is tensor and self.is_plain and self._is_in_place()

    def _is_in_place(self) -> bool:
        place = self.place
        return self.tensor.dtype is place.dtype and self.tensor.is_set_to(place)

    def write_back(self) -> None:
        """Give the tensor its memory, its elements and its flags of the last copy again."""
        tensor = self.tensor
        is_leaf, requires_grad = self.flags
        if is_leaf and not tensor.is_leaf:
            tensor.detach_()
        if self.is_plain and not self._is_in_place():
            tensor.data = self.place
        # torch writes to a tensor that was created in inference mode only in that mode.
        with torch.inference_mode() if tensor.is_inference() else nullcontext():
            self.elements.copy_(self.copy)
        if is_leaf and tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)


@attrs.define(eq=False)
class _Content:
    """The content of a state: what its containers contain, and copies of everything else."""

    _reusable: dict[int, _TensorCopy] = attrs.field(factory=dict)  # from the step before
    tensors: dict[int, _TensorCopy] = attrs.field(factory=dict)  # by the id of the tensor
    obstacles: list[str] = attrs.field(factory=list)  # sentences: what cannot be undone, and why
    # Functions that restore an object from a copy of its state dict, and then those that restore
    # containers and attributes. In this order, because an object may replace its containers.
    _objects: list[Callable[[], object]] = attrs.field(factory=list)
    _containers: list[Callable[[], object]] = attrs.field(factory=list)
    _seen: dict[int, object] = attrs.field(factory=dict)  # containers and objects, by id

    def add(self, value: Any, path: StatePath = ()) -> None:
        """Add the content of a value. What was added before is not added again."""
        kind = type(value)
        if kind in _IMMUTABLE:
            return
        if isinstance(value, Tensor):
            self._add_tensor(value, path)
            return
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if is_container(value) or kind is defaultdict:  # as the state of an optimizer
            self._add_container(value, path)
        elif isinstance(value, nn.Module):
            self._add_module(value, path)
        elif isinstance(value, torch.optim.Optimizer):
            self._add_optimizer(value, path)
        elif isinstance(value, LogicalWorkers):
            return  # Their values never change.
        elif (accessor := state_accessor(value)) is not None:
            self._add_object(to_plain_values(value), accessor.set_state)
        elif is_array(value):
            if value.flags.writeable:
                self._containers.append(partial(value.__setitem__, ..., value.copy()))
        elif isinstance(value, set):
            self._containers.append(partial(_refill, value, value.copy()))
        elif isinstance(value, bytearray):
            self._containers.append(partial(value.__setitem__, slice(None), bytes(value)))
        elif not is_plain_value(value) and not isinstance(value, _CONSTANTS):
            self.obstacles.append(
                f"{format_path(path)} is {class_name_with_article(value)}, which has no"
                " load_state_dict"
            )

    def copy_tensors(self) -> None:
        """Copy the elements of all tensors that were added."""
        groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for entry in self.tensors.values():
            copies, elements = groups.setdefault(entry.group, ([], []))
            copies.append(entry.copy)
            elements.append(entry.elements)
        with torch.no_grad():
            for copies, elements in groups.values():
                torch._foreach_copy_(copies, elements)
        self._reusable = {}  # Free the copies of tensors that are not in the state any more.

    def write_back(self) -> None:
        """Restore everything that was added. This can be called repeatedly."""
        for restore in (*self._objects, *self._containers):
            restore()
        with torch.no_grad():
            for entry in self.tensors.values():
                entry.write_back()

    def _add_tensor(self, tensor: Tensor, path: StatePath) -> None:
        number = id(tensor)
        if number in self.tensors:
            return
        entry = self._reusable.get(number)
        if entry is not None and entry.is_for(tensor):
            entry.flags = (tensor.is_leaf, tensor.requires_grad)
        elif is_lazy(tensor):
            self.obstacles.append(
                f"{format_path(path)} has lazy parameters, which the first forward initializes"
            )
            return
        elif is_dtensor(tensor):
            raise ConfigError(SHARDED_STATE)
        else:
            entry = _TensorCopy(tensor)
        self.tensors[number] = entry

    def _add_container(self, value: Any, path: StatePath) -> None:
        if not isinstance(value, tuple):
            self._containers.append(partial(_refill, value, copy.copy(value)))
        parts = value if isinstance(value, dict) else parts_of(value)
        for key, part in parts.items():
            if type(part) not in _IMMUTABLE:
                self.add(part, (*path, key))

    def _add_object(self, values: Any, set_state: Callable[[Any], object]) -> None:
        copied = _copy_values(values)

        def restore() -> None:
            with torch.enable_grad():
                set_state(_copy_values(copied))  # The object may keep and change what it gets.

        self._objects.append(restore)

    def _add_module(self, root: nn.Module, path: StatePath) -> None:
        has_other_values, modules, visited = False, [root], {id(root)}
        while modules:
            module = modules.pop()
            has_other_values = has_other_values or _has_other_values(module)
            self._containers.append(partial(setattr, module, "training", module.training))
            for parts in (module._parameters, module._buffers, module._modules):
                if parts:
                    for part in parts.values():
                        if isinstance(part, Tensor):
                            self._add_tensor(part, path)
                        elif part is not None and id(part) not in visited:
                            visited.add(id(part))
                            modules.append(part)
                self._containers.append(partial(_refill, parts, dict(parts)))
        if has_other_values:
            tensors = (root.named_parameters, root.named_buffers)
            self._add_other_values(
                root, {name for find in tensors for name, _ in find(remove_duplicate=False)}
            )

    def _add_optimizer(self, optimizer: torch.optim.Optimizer, path: StatePath) -> None:
        for name in ("state", "param_groups"):
            self._containers.append(partial(setattr, optimizer, name, getattr(optimizer, name)))
            self.add(getattr(optimizer, name), path)
        if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
            self._add_other_values(optimizer, {"state", "param_groups"})

    def _add_other_values(self, owner: Any, known: Set[str]) -> None:
        """Add the values in a state dict that are not known by their names."""
        values = to_plain_values(owner)
        other = {name: value for name, value in values.items() if name not in known}

        def set_state(values: dict[str, Any]) -> None:
            owner.load_state_dict({**owner.state_dict(), **values})

        if other:
            self._add_object(other, set_state)


def _refill(container: Any, content: Any) -> None:
    """Give a dict, list or set this content again, if it has another one."""
    if isinstance(container, list):
        container[:] = content
    elif isinstance(container, set):
        container.clear()
        container.update(content)
    elif not _has_same_parts(container, content):
        container.clear()
        for key, part in content.items():  # `update` would add to the counts of a Counter
            container[key] = part


def _has_same_parts(one: Any, other: Any) -> bool:
    if len(one) != len(other):
        return False
    pairs = zip(one.items(), other.items(), strict=True)
    return all(key is name and part is value for (key, part), (name, value) in pairs)


def _has_other_values(module: nn.Module) -> bool:
    kind = type(module)
    return bool(module._state_dict_hooks) or any(
        getattr(kind, name) is not getattr(nn.Module, name) for name in _STATE_METHODS
    )


def _copy_values(values: Any) -> Any:
    """Return a copy of plain values. Tensors that are one tensor become one again."""
    copies = TensorCopies()

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return copies.copy_of(value)
        if is_container(value):
            parts = parts_of(value).items()
            return with_parts(value, {key: copied(part) for key, part in parts})
        return copy.deepcopy(value)

    return copied(values)


def _capture_generators() -> Iterator[Callable[[], object]]:
    """Yield, for each random number generator, a function that restores its present state."""
    torch_state = torch.get_rng_state()
    yield lambda: torch.set_rng_state(torch_state)
    python_state = random.getstate()
    yield lambda: random.setstate(python_state)
    # NumPy imports numpy.random when it is first used, and torch never uses it.
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_state = numpy_random.get_state()
        yield lambda: numpy_random.set_state(numpy_state)
    if torch.cuda._initialized:
        cuda_state = torch.cuda.get_rng_state()
        yield lambda: torch.cuda.set_rng_state(cuda_state)
