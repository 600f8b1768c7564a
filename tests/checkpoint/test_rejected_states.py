"""A value that cannot be saved or restored exactly is rejected with its path in the state."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticlib import CheckpointManager, load_checkpoint, save_checkpoint
from elasticlib.errors import CheckpointError, StateMismatchError


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: torch.empty(4, dtype=torch.uint4),
            "state['a'][1] is a tensor of uint4, which torch cannot copy: save its bytes",
        ),
        (
            lambda: torch.empty(4, dtype=torch.int4),
            "state['a'][1] is a tensor of int4, which torch cannot copy: save its bytes",
        ),
        (nested, "state['a'][1] is a nested tensor, which is not saved: save the list of its"),
        (
            lambda: {10**5000: torch.ones(1)},
            "state['a'][1].key(...) is an integer of 16610 bits, and a checkpoint has integers of",
        ),
        (
            lambda: [-(2**8192)],
            "state['a'][1][0] is an integer of 8193 bits, and a checkpoint has integers of at most",
        ),
        (
            lambda: {("x", 1): torch.ones(1)},
            "state['a'][1].key(('x', 1)) has the tuple ('x', 1), and the keys of a dict and the",
        ),
        (
            lambda: {("x", 1)},
            "state['a'][1] has the tuple ('x', 1), and the keys of a dict and the items of a set",
        ),
        (
            lambda: [float_of(0x7FF8_DEAD_0000_BEEF)],
            "state['a'][1][0] is a NaN with the bits 7ff8dead0000beef, and a checkpoint has only",
        ),
        (
            lambda: complex(0.0, float_of(0x7FF0_0000_0000_0001)),
            "state['a'][1] is a NaN with the bits 7ff0000000000001, and a checkpoint has only",
        ),
    ],
)
def test_value_that_cannot_be_saved_is_rejected_with_its_path(
    tmp_path: Path, make: Callable[[], Any], message: str
) -> None:
    state = {"a": [1, make()]}
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(CheckpointError) as rejected:
            manager.save(1, state)
        assert str(rejected.value).startswith(message)
        assert manager.steps() == []
    with pytest.raises(CheckpointError) as rejected:
        save_checkpoint(tmp_path / "a.pt", state)
    assert message in str(rejected.value)


def test_the_remedy_for_a_dtype_that_torch_cannot_copy_works(
    tmp_path: Path,
) -> None:
    data = torch.tensor([1, 2, 3], dtype=torch.uint8)
    tensor = data.view(torch.uint4)
    save_checkpoint(tmp_path / "a.pt", [tensor.view(torch.uint8)])
    (loaded,) = load_checkpoint(tmp_path / "a.pt")
    assert torch.equal(loaded, data)
    assert loaded.view(torch.uint4).dtype == torch.uint4


@pytest.mark.parametrize("key", [2**64 + 1, -(2**70), 2**8191])
def test_integer_key_of_more_than_64_bits_is_restored(tmp_path: Path, key: Any) -> None:
    state = {"a": {key: torch.zeros(1)}}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": {key: torch.ones(1)}}).wait()
        assert manager.restore(state)
    assert state == {"a": {key: torch.ones(1)}}


def float_of(pattern: int) -> float:
    return float(struct.unpack(">d", pattern.to_bytes(8, "big"))[0])


def pattern_of(value: float) -> int:
    return int.from_bytes(struct.pack(">d", value), "big")


@pytest.mark.parametrize(
    "pattern",
    [
        0x7FF8_0000_0000_0000,  # math.nan
        0xFFF8_0000_0000_0000,  # the result of inf - inf on x86
        pattern_of(-0.0),
        pattern_of(-math.inf),
    ],
)
def test_python_float_keeps_every_bit(tmp_path: Path, pattern: int) -> None:
    value = float_of(pattern)
    save_checkpoint(tmp_path / "a.pt", [value, complex(value, -0.0), {value: "key"}, {value}])
    first, second, third, fourth = load_checkpoint(tmp_path / "a.pt")
    (key,), (member,) = third, fourth
    parts = [first, second.real, key, member]
    assert [pattern_of(part) for part in parts] == [pattern] * 4
    assert pattern_of(second.imag) == pattern_of(-0.0)


class Tied(torch.nn.Module):
    """Two layers that may share their weight."""

    def __init__(self, *, tie: bool, value: float = 0.0) -> None:
        super().__init__()
        self.a = torch.nn.Linear(2, 2, bias=False)
        self.b = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.constant_(self.a.weight, value)
        torch.nn.init.constant_(self.b.weight, value + 1)
        if tie:
            self.b.weight = self.a.weight


def on_meta() -> torch.nn.Module:
    with torch.device("meta"):
        return torch.nn.BatchNorm1d(2)


def trained_adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    return optimizer


def one_memory(*, overlap: int) -> list[torch.Tensor]:
    memory = torch.zeros(10)
    return [memory[:5], memory[5 - overlap : 10 - overlap]]


def compiled() -> Any:
    return torch.compile(torch.nn.Linear(2, 2), backend="eager")


@pytest.mark.parametrize(
    ("saved", "live", "message"),
    [
        (
            lambda: torch.nn.BatchNorm1d(2),
            on_meta,
            "state['it'][0]['weight'] is on the meta device, which has no memory to restore into",
        ),
        (
            lambda: trained_adam(torch.nn.BatchNorm1d(2)),
            lambda: torch.optim.Adam(on_meta().parameters()),
            "state['it'][0] has parameters on the meta device, which has no memory to restore",
        ),
        (
            lambda: torch.ones(2),
            lambda: torch.ones(2, device="meta"),
            "state['it'][0] is on the meta device, which has no memory to restore into",
        ),
        (
            lambda: torch.ones(2),
            nested,
            "state['it'][0] is a nested tensor, and a tensor of (2,) float32 was saved",
        ),
        (
            lambda: [torch.ones(2), torch.zeros(2)],
            lambda: [torch.ones(2)] * 2,
            "state['it'][0][0] and state['it'][0][1] share memory, and tensors with other values",
        ),
        (
            lambda: [torch.ones(5), torch.zeros(5)],
            lambda: one_memory(overlap=2),
            "state['it'][0][0] and state['it'][0][1] overlap in memory, and a restore fills only",
        ),
        (
            lambda: Tied(tie=False),
            lambda: Tied(tie=True),
            "state['it'][0]['a.weight'] and state['it'][0]['b.weight'] share memory, and tensors",
        ),
        (
            lambda: torch.nn.Linear(2, 2),
            compiled,
            "(saved without torch.compile? Then put model._orig_mod into the state, or use model",
        ),
        (
            compiled,
            lambda: torch.nn.Linear(2, 2),
            "(saved with torch.compile? Restore into torch.compile(model); there, put model._ori",
        ),
        (
            compiled,
            lambda: torch.nn.Linear(2, 2).state_dict(),
            "(saved with torch.compile? Restore into torch.compile(model); there, put model._ori",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:.*meta parameter.*no-op:UserWarning")
def test_state_that_cannot_take_what_was_saved_is_rejected_with_its_path(
    tmp_path: Path, saved: Callable[[], Any], live: Callable[[], Any], message: str
) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"it": [saved()], "step": 1}).wait()
        state = {"it": [live()], "step": 0}
        with pytest.raises(StateMismatchError) as rejected:
            manager.restore(state)
    assert message in str(rejected.value)
    assert state["step"] == 0


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        (lambda: Tied(tie=True, value=3), lambda: Tied(tie=True)),
        (lambda: Tied(tie=True, value=3), lambda: Tied(tie=False)),
        # The saved tensors are separate but equal, so no value is lost.
        (lambda: [torch.ones(2), torch.ones(2)], lambda: [torch.zeros(2)] * 2),
        (lambda: [torch.ones(5), torch.full((5,), 2.0)], lambda: one_memory(overlap=0)),
        (
            lambda: [torch.full((2,), math.nan), torch.full((2,), math.nan)],
            lambda: [torch.zeros(2)] * 2,
        ),
    ],
)
def test_tensors_that_share_memory_are_restored_if_no_value_is_lost(
    tmp_path: Path, saved: Callable[[], Any], live: Callable[[], Any]
) -> None:
    def values(state: Any) -> list[str]:
        tensors = state.state_dict().values() if isinstance(state, torch.nn.Module) else state
        return [str(tensor.tolist()) for tensor in tensors]

    wanted, state = saved(), {"it": live()}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"it": wanted}).wait()
        assert manager.restore(state)
    assert values(state["it"]) == values(wanted)
