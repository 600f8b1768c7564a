"""Rollback of an interrupted training step.

Parameters and optimizer state are not copied. Only an optimizer writes them, and `Undo` knows
whether one has begun. Until then a step has changed gradients, which are dropped, and the values
that are copied when an attempt begins: buffers, the states of random number generators, learning
rates, and everything else in the state (schedulers, samplers, plain values, tensors in containers).
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from ..checkpoint.restore_plan import plan_restore
from ..checkpoint.state_tree import StatePath, map_leaves, to_plain_values
from ..logical.workers import LogicalWorkers


@attrs.frozen(eq=False)
class _Before:
    """The state before an attempt, as far as it is copied."""

    generators: list[Callable[[], object]]
    versions: list[int]  # `Tensor._version` of each parameter
    buffers: list[tuple[nn.Module, str, Tensor, Tensor]]  # its module, name, tensor and a copy
    groups: list[tuple[dict[str, Any], dict[str, Any]]]  # each parameter group and its settings
    values: Any


class Undo:
    """Returns a state to its values before an attempt, unless an optimizer has begun to write.

    An exception, such as KeyboardInterrupt, may interrupt any method at any line: the method can
    then be called again.

    Args:
        state: names to what `CheckpointManager.restore` takes. Modules and optimizers that are not
            values of this dictionary itself are copied like everything else.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self._modules = [one for one in state.values() if isinstance(one, nn.Module)]
        self._optimizers = [one for one in state.values() if isinstance(one, torch.optim.Optimizer)]
        # LogicalWorkers has no values that change.
        kinds = (nn.Module, torch.optim.Optimizer, LogicalWorkers)
        self._others = {name: one for name, one in state.items() if not isinstance(one, kinds)}
        self._trained = _all_of(state, (nn.Module, torch.optim.Optimizer))
        self._scalers = _all_of(state, torch.amp.GradScaler)
        self._written = False  # whether an optimizer has begun since the last `begin`
        self._before: _Before | None = None
        self.look()

    def look(self) -> None:
        """Find the parts of the modules again. This takes longer than everything in an attempt."""
        self._parameters = [one for module in self._modules for one in module.parameters()]
        self._holders = [one for root in self._modules for one in root.modules() if one._buffers]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notice within this block when an optimizer begins a step."""
        with ExitStack() as hooks:
            for optimizer in self._optimizers:
                hooks.callback(optimizer.register_step_pre_hook(self._writes).remove)
            yield

    def _writes(self, *_: object) -> None:
        self._written = True

    @torch.no_grad()
    def begin(self) -> None:
        """Copy what the attempt that begins now may change."""
        self._written = False
        self._before = _Before(
            list(_generators()),
            [parameter._version for parameter in self._parameters],
            # All buffers are copied. To compare them with an earlier copy costs as much, and their
            # versions do not tell: `torch.nn.functional.batch_norm` does not raise them.
            [
                (module, name, buffer, buffer.clone())
                for module in self._holders
                for name, buffer in module._buffers.items()
                if buffer is not None
            ],
            [
                (group, {name: _plain(value) for name, value in group.items() if name != "params"})
                for optimizer in self._optimizers
                for group in optimizer.param_groups
            ],
            copy.deepcopy(to_plain_values(self._others)),
        )

    @torch.no_grad()
    def back(self) -> bool:
        """Undo what was changed since `begin`, and drop all gradients.

        Returns:
            Whether the state is as it was at `begin`. False if parameters or the optimizers' state
            may have been written.
        """
        for one in self._trained:
            one.zero_grad(set_to_none=True)
        for scaler in self._scalers:
            scaler._per_optimizer_states.clear()  # the gradients that it unscaled are dropped
        before = self._before
        if before is None or self._written:
            return False
        if before.versions != [parameter._version for parameter in self._parameters]:
            return False
        for restore in before.generators:
            restore()
        for module, name, buffer, content in before.buffers:
            buffer.copy_(content)
            module._buffers[name] = buffer
        for group, values in before.groups:
            for name, value in values.items():
                now = group.get(name)
                if isinstance(now, Tensor) and isinstance(value, Tensor):
                    now.copy_(value)
                else:
                    group[name] = value
        plan_restore(self._others, before.values)()
        return True


def _all_of(state: object, kind: Any) -> list[Any]:
    """Return all values of this kind, at any depth of the state."""
    found: list[Any] = []

    def look(_path: StatePath, value: Any) -> Any:
        if isinstance(value, kind):
            found.append(value)
        return value

    map_leaves(state, look)
    return found


def _plain(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _generators() -> Iterator[Callable[[], object]]:
    """Yield functions that return the random number generators to their present states."""
    state = torch.get_rng_state()
    yield lambda: torch.set_rng_state(state)
    drawn = random.getstate()
    yield lambda: random.setstate(drawn)
    # numpy imports numpy.random on its first use, and torch never uses it.
    arrays = sys.modules.get("numpy.random")
    if arrays is not None:
        of_arrays = arrays.get_state()
        yield lambda: arrays.set_state(of_arrays)
    if torch.cuda._initialized:
        on_gpu = torch.cuda.get_rng_state()
        yield lambda: torch.cuda.set_rng_state(on_gpu)
