"""What a step that was cut may have changed, and how that is undone.

Parameters, and what optimizers keep for them, are not copied: only an optimizer writes them, and
whether one has begun is known. Until then a cut step has changed gradients, which are dropped, and
what is copied as each attempt begins: buffers that were written since, generators' states, learning
rates, and all else in the state (schedulers, samplers, plain values, tensors in containers).
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from ..checkpoint.manager import HostBuffer
from ..checkpoint.pack import lay_out, unpack
from ..checkpoint.state import Way, changed, fit, values_of
from ..logical.workers import LogicalWorkers


@attrs.frozen
class _Buffer:
    """A buffer as it was, and how often it had been written then."""

    tensor: Tensor
    version: int
    copied: Tensor


class Undo:
    """Takes a state back to where an attempt began, if it can.

    Args:
        state: names to what `CheckpointManager.restore` takes. Modules and optimizers that do not
            stand at the top are copied like all else.
        whole: whether all of it is copied at each attempt, to host memory: then it always can.
    """

    def __init__(self, state: dict[str, Any], *, whole: bool = False) -> None:
        self._modules = [one for one in state.values() if isinstance(one, nn.Module)]
        self._optimizers = [one for one in state.values() if isinstance(one, torch.optim.Optimizer)]
        watched = () if whole else (nn.Module, torch.optim.Optimizer)
        # Of logical workers nothing is ever changed.
        kinds = (*watched, LogicalWorkers)
        self._others = {name: one for name, one in state.items() if not isinstance(one, kinds)}
        self._trained = _all_of(state, (nn.Module, torch.optim.Optimizer))
        self._scalers = _all_of(state, torch.amp.GradScaler)
        self._host = HostBuffer() if whole else None
        self._pack = memoryview(b"")
        self._written = False
        self._versions: list[int] = []
        self._buffers: dict[tuple[nn.Module, str], _Buffer] = {}
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._values: Any = None
        self._random: list[Callable[[], object]] = []
        self._hooks = ExitStack()
        for optimizer in self._optimizers:
            self._hooks.callback(optimizer.register_step_pre_hook(self._writes).remove)
        self.look()

    def look(self) -> None:
        """Find what the modules are made of, which takes longer than all that an attempt does."""
        modules = [] if self._host else self._modules
        self._parameters = [one for module in modules for one in module.parameters()]
        self._holders = [one for root in modules for one in root.modules() if one._buffers]

    def _writes(self, *_: object) -> None:
        self._written = True

    @torch.no_grad()
    def begin(self) -> None:
        """An attempt begins."""
        self._written = False
        self._random = list(_generators())
        if self._host is not None:
            self._pack = self._host.take(lay_out(values_of(self._others), {}))
            return
        self._versions = [parameter._version for parameter in self._parameters]
        self._buffers = {key: self._kept(key, one) for key, one in self._present_buffers()}
        self._groups = [
            (group, {name: _plain(value) for name, value in group.items() if name != "params"})
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        ]
        self._values = copy.deepcopy(values_of(self._others))

    def _present_buffers(self) -> Iterator[tuple[tuple[nn.Module, str], Tensor]]:
        for module in self._holders:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield (module, name), buffer

    def _kept(self, key: tuple[nn.Module, str], buffer: Tensor) -> _Buffer:
        before = self._buffers.get(key)
        if before and before.tensor is buffer and before.version == buffer._version:
            return before
        return _Buffer(buffer, buffer._version, buffer.clone())

    @property
    def can(self) -> bool:
        """Whether the attempt that began last has written nothing that was not copied."""
        same = self._versions == [parameter._version for parameter in self._parameters]
        return self._host is not None or (same and not self._written)

    @torch.no_grad()
    def back(self) -> bool:
        """Undo the attempt, if it can be: whether the state is as it was before."""
        for one in self._trained:
            one.zero_grad(set_to_none=True)
        for scaler in self._scalers:
            scaler._per_optimizer_states.clear()  # what it has unscaled is gone
        if not self.can:
            return False
        for put in self._random:
            put()
        if self._host is not None:
            fit(self._others, unpack(self._pack))()
            return True
        for (module, name), was in self._buffers.items():
            was.tensor.copy_(was.copied)
            module._buffers[name] = was.tensor
        for group, values in self._groups:
            for name, value in values.items():
                now = group.get(name)
                if isinstance(now, Tensor) and isinstance(value, Tensor):
                    now.copy_(value)
                else:
                    group[name] = value
        fit(self._others, self._values)()
        return True

    def close(self) -> None:
        """Watch no longer."""
        self._hooks.close()
        if self._host is not None:
            self._host.close()


def _all_of(state: object, kind: Any) -> list[Any]:
    """What is of this kind, wherever it stands."""
    found: list[Any] = []

    def look(_way: Way, value: Any) -> Any:
        if isinstance(value, kind):
            found.append(value)
        return value

    changed(state, look)
    return found


def _plain(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _generators() -> Iterator[Callable[[], object]]:
    """What puts each generator of random numbers back to where it is now."""
    state = torch.get_rng_state()
    yield lambda: torch.set_rng_state(state)
    drawn = random.getstate()
    yield lambda: random.setstate(drawn)
    # numpy imports it when it is first asked for it, and torch never asks.
    arrays = sys.modules.get("numpy.random")
    if arrays is not None:
        of_arrays = arrays.get_state()
        yield lambda: arrays.set_state(of_arrays)
    if torch.cuda._initialized:
        on_gpu = torch.cuda.get_rng_state()
        yield lambda: torch.cuda.set_rng_state(on_gpu)
