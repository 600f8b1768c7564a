"""States with one value of every supported type, and their exact comparison."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from typing import Any

import numpy
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from elasticlib.checkpoint.tensor_layout import StridedLayout


def create_trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model and an AdamW whose values do not depend on the rounding of the machine."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            weight.copy_(torch.arange(weight.numel()).view_as(weight) / 8 + number)
            optimizer.state[weight] = {
                "step": torch.tensor(3.0),
                "exp_avg": weight / 2,
                "exp_avg_sq": weight.square(),
            }
    return model, optimizer


def create_tensors() -> dict[str, Any]:
    memory = torch.arange(24, dtype=torch.int32)
    tied = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    image = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    number = torch.tensor([1 + 2j, -3 + 0.5j, 4 - 1j])
    apart = torch.tensor([1 + 1j, 2 - 2j])
    return {
        "tied": [tied, tied, tied.detach()],
        "views": [memory, memory[3:9], memory.view(torch.float32)[::2], memory.view(4, 6).t()],
        "strides": [image, torch.arange(6.0).view(2, 3).t(), torch.arange(9.0)[::3]],
        "expanded": [torch.arange(3.0).expand(2, 3), torch.ones(4, 2)[::2, 1:].expand(2, 3)],
        "bits": [number, number.conj(), number.conj().imag, apart.conj()],
        "kinds": [
            torch.tensor([0.5, -0.0, float("nan")]).to(kind)
            for kind in (torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn)
        ],
        "ints": [torch.tensor([1, 0, 3]).to(k) for k in (torch.bool, torch.int8, torch.uint16)],
        "odd": [torch.tensor(7, dtype=torch.int16), torch.empty(0, 3), torch.tensor([1j]).cfloat()],
        "wide": torch.tensor([1 + 1e-300j], dtype=torch.complex128),
        "parameters": [
            torch.nn.Parameter(torch.ones(2), requires_grad=False),
            torch.full((1,), 7.0, requires_grad=True),
        ],
    }


def create_numpy_values() -> list[Any]:
    return [
        numpy.arange(6.0).reshape(2, 3),
        numpy.asfortranarray(numpy.arange(6, dtype=">i2").reshape(2, 3)),
        numpy.array("2026-11-22", "M8[s]"),
        numpy.array(["text", "é"]),
        numpy.empty((0, 3), numpy.complex64),
        numpy.array([True, False]),
        *(numpy.float64(-0.0), numpy.bool_(True), numpy.str_(""), numpy.uint64(2**64 - 1)),
    ]


def create_all_values() -> dict[str, Any]:
    """Return all values. Objects with a state are represented by their state dict."""
    model, optimizer = create_trained()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "tensors": create_tensors(),
        "numpy": create_numpy_values(),
        "random": [random.Random(3).getstate(), numpy.random.RandomState(3).get_state()],
        "torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1)],
        "containers": [
            {1.5: [torch.ones(1)], None: []},
            OrderedDict(b=1, a=2),
            Counter("aab"),
            {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, "": torch.ones(1), "\udc80": 1},
            ({1, "a"}, frozenset({1.5, "b"})),
        ],
        "plain": [None, True, 1 << 8191, -(2**100), -0.0, float("inf"), "\udc80 €", complex(0, -1)],
        "more": [b"", b"bytes", bytearray(b"ab"), (), [[]]],
    }


def describe(state: Any, seen: dict[object, int] | None = None) -> Any:
    """Describe a state in a form that `==` compares.

    It contains types, the bits of each element, the strides of dense tensors, and which tensors are
    the same memory.
    """
    seen = {} if seen is None else seen
    if isinstance(state, torch.Tensor):
        layout, lazy = StridedLayout.of(state), (state.is_conj(), state.is_neg())
        number = seen.setdefault((state.data_ptr(), layout, lazy), len(seen))
        about = [type(state), layout.densified(), state.requires_grad]
        # Tensors without elements share no memory.
        about += [number if state.numel() else None]
        fresh = torch.empty(state.shape, dtype=state.dtype)
        return *about, fresh.copy_(state.detach()).view(-1).view(torch.uint8).tolist()
    if isinstance(state, numpy.ndarray):
        order = state.flags.f_contiguous, state.flags.c_contiguous
        return "array", state.dtype.str, state.shape, state.tobytes(), order
    if isinstance(state, numpy.generic):
        return type(state), state.dtype.str, state.tobytes()
    if isinstance(state, dict):
        items = [(describe(key, seen), describe(item, seen)) for key, item in state.items()]
        return type(state), items, getattr(state, "default_factory", None), read_attributes(state)
    if isinstance(state, list | tuple):
        return type(state), [describe(item, seen) for item in state]
    return type(state), repr(state) if isinstance(state, float | complex) else state


def read_attributes(state: object) -> object:
    """Return the attributes of an object, such as the versions in the state dict of a module."""
    return getattr(state, "__dict__", None) or None


def create_sharded(world_size: int) -> dict[str, Any]:
    """Return a state sharded over ranks by rows, by columns, and with a transposed matrix."""
    mesh = init_device_mesh("cpu", (world_size,))
    small = torch.arange(15.0).view(3, 5)
    return {
        "rows": distribute_tensor(small, mesh, [Shard(0)]),
        "more": [distribute_tensor(small.bfloat16(), mesh, [Shard(1)]), "text"],
        "turned": distribute_tensor(torch.arange(15.0).view(5, 3).t(), mesh, [Shard(0)]),
        "same": distribute_tensor(torch.arange(4), mesh, [Replicate()]),
        "plain": torch.arange(4.0).view(2, 2).t(),
    }
