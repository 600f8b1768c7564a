"""Rollback of an interrupted training step.

Parameters and optimizer state are not copied. Only an optimizer writes them, and `StateRollback`
knows whether one has started. Until then a step has changed gradients, which are dropped, and the
values that are copied when a step attempt starts: buffers, the states of random number generators,
learning rates, and everything else in the state (schedulers, samplers, plain values, tensors in
containers).
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
from ..logical.logical_workers import LogicalWorkers


@attrs.frozen(eq=False)
class _SavedValues:
    """Copies, from the start of a training step, of what changes before its optimizer starts."""

    restore_generators: list[Callable[[], object]]  # one function per random number generator
    parameter_versions: list[int]  # Tensor._version of each parameter
    buffers: list[tuple[nn.Module, str, Tensor, Tensor]]  # owner, name, tensor, copy
    param_groups: list[tuple[dict[str, Any], dict[str, Any]]]  # live group, copy of its settings
    other_values: Any  # the plain values of all other parts of the state


class StateRollback:
    """Rolls a training state back to the start of a step attempt.

    A signal handler's exception, such as KeyboardInterrupt, may interrupt any method at any line.
    The method can then be called again.

    Args:
        state: names to what `CheckpointManager.restore` accepts. Of a module or an
            optimizer that is a value of this dictionary, only the buffers or the settings of the
            parameter groups are copied at each step. One that is nested deeper, such as in a list,
            is copied completely, like other values.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self._modules = [part for part in state.values() if isinstance(part, nn.Module)]
        self._optimizers = [
            part for part in state.values() if isinstance(part, torch.optim.Optimizer)
        ]
        # The values of LogicalWorkers never change.
        kinds = (nn.Module, torch.optim.Optimizer, LogicalWorkers)
        self._state = state
        self._other_names = [name for name, part in state.items() if not isinstance(part, kinds)]
        self._with_gradients = _find_instances(state, (nn.Module, torch.optim.Optimizer))
        self._scalers = _find_instances(state, torch.amp.GradScaler)
        self._parameters: list[Tensor] = []  # of all modules, see refresh_modules
        self._buffer_owners: list[nn.Module] = []  # submodules that have buffers of their own
        self._saved: _SavedValues | None = None  # of the last `begin`
        self._has_optimizer_started = False  # since the last `begin`
        self.refresh_modules()

    def refresh_modules(self) -> None:
        """Find the parameters and submodules of the modules again, if the script has changed them.

        This takes longer than `begin`, so it is not done at each step.
        """
        self._parameters = [p for module in self._modules for p in module.parameters()]
        self._buffer_owners = [m for root in self._modules for m in root.modules() if m._buffers]

    @contextmanager
    def watch_optimizers(self) -> Iterator[None]:
        """Within this block, notice when an optimizer starts a step."""
        with ExitStack() as hooks:
            for optimizer in self._optimizers:
                hooks.callback(optimizer.register_step_pre_hook(self._on_optimizer_step).remove)
            yield

    def _on_optimizer_step(self, *_: object) -> None:
        self._has_optimizer_started = True

    @torch.no_grad()
    def begin(self) -> None:
        """Copy what the step attempt that starts now may change."""
        self._has_optimizer_started = False
        self._saved = _SavedValues(
            restore_generators=list(_capture_generators()),
            parameter_versions=[parameter._version for parameter in self._parameters],
            # All buffers are copied, because comparing them with an earlier copy costs as much. The
            # version of a buffer is not enough: F.batch_norm changes buffers without raising it.
            buffers=[
                (module, name, buffer, buffer.clone())
                for module in self._buffer_owners
                for name, buffer in module._buffers.items()
                if buffer is not None
            ],
            param_groups=[
                (
                    group,
                    {
                        name: _clone_if_tensor(value)
                        for name, value in group.items()
                        if name != "params"
                    },
                )
                for optimizer in self._optimizers
                for group in optimizer.param_groups
            ],
            other_values=copy.deepcopy(to_plain_values(self._other_parts())),
        )

    @torch.no_grad()
    def roll_back(self) -> bool:
        """Drop all gradients, and undo what was changed since `begin`.

        Returns:
            True if the state is exactly that at `begin`. False if parameters or optimizer state may
            have been written, in which case only gradients are dropped.
        """
        for part in self._with_gradients:
            part.zero_grad(set_to_none=True)
        for scaler in self._scalers:
            # Otherwise the scaler would refuse to unscale the gradients of the next attempt.
            scaler._per_optimizer_states.clear()
        saved = self._saved
        if saved is None or self._has_optimizer_started:
            return False
        if saved.parameter_versions != [parameter._version for parameter in self._parameters]:
            return False
        for restore_generator in saved.restore_generators:
            restore_generator()
        for module, name, buffer, content in saved.buffers:
            buffer.copy_(content)
            module._buffers[name] = buffer
        for group, settings in saved.param_groups:
            for name, value in settings.items():
                current = group.get(name)
                if isinstance(current, Tensor) and isinstance(value, Tensor):
                    current.copy_(value)
                else:
                    group[name] = value
        others = self._other_parts()
        plan_restore(others, saved.other_values)()
        self._state.update(others)
        return True

    def _other_parts(self) -> dict[str, Any]:
        """Return the parts of the state that are not a module, optimizer or LogicalWorkers."""
        return {name: self._state[name] for name in self._other_names}


def _find_instances(state: object, kind: type | tuple[type, ...]) -> list[Any]:
    """Return all values of these types in the containers of the state, at any depth."""
    found: list[Any] = []

    def visit(_path: StatePath, value: Any) -> Any:
        if isinstance(value, kind):
            found.append(value)
        return value

    map_leaves(state, visit)
    return found


def _clone_if_tensor(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


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
