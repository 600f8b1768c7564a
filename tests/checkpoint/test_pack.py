"""A state that is saved and loaded has the same values, types, bits, and tensors of one memory."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import attrs
import numpy
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from sample_states import describe

from elasticlib import CheckpointManager, load_checkpoint, save_checkpoint
from elasticlib.checkpoint.pack import plan_layout
from elasticlib.checkpoint.state_tree import MAX_DEPTH
from elasticlib.checkpoint.tensor_layout import StridedLayout
from elasticlib.errors import CheckpointCorruptError, CheckpointError


def packed(state: object) -> bytes:
    """Return the bytes of the file of a state."""
    with tempfile.TemporaryDirectory(prefix="elasticlib-pack-", dir="/dev/shm") as folder:
        save_checkpoint(Path(folder, "a"), state)
        return Path(folder, "a").read_bytes()


def unpack(data: bytes) -> Any:
    """Return the state in a file with these bytes."""
    with tempfile.TemporaryDirectory(prefix="elasticlib-pack-", dir="/dev/shm") as folder:
        Path(folder, "a").write_bytes(data)
        return load_checkpoint(Path(folder, "a"))


DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
]

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**100), 2**100),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(st.characters()),
    st.binary(),
    st.sampled_from([torch.float8_e4m3fn, torch.device("cuda:1"), torch.Size([2, 3])]),
)
keys = st.one_of(st.integers(), st.text(), st.floats(allow_nan=False))
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.sets(st.integers()),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.dictionaries(keys, st.integers(), max_size=4).map(Counter),
    ),
    max_leaves=12,
)


def read_types(value: object) -> object:
    """Return the types in a state, because `==` does not distinguish them."""
    if isinstance(value, dict):
        return type(value), [(read_types(k), read_types(v)) for k, v in value.items()]
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value), [read_types(item) for item in value]
    return type(value)


@given(states)
def test_an_unpacked_state_has_equal_values_of_the_same_types(state: object) -> None:
    unpacked = unpack(packed(state))
    assert unpacked == state
    assert read_types(unpacked) == read_types(state)


def read_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the elements in the order of their indices."""
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype)
    return fresh.copy_(tensor).view(-1).view(torch.uint8)


def is_identical(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have the same bits, shape and strides, and neither is lazy."""
    return (
        (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        and not (one.is_conj() or one.is_neg())
        and torch.equal(read_bits(one), read_bits(other))
    )


def as_saved(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as it is unpacked: resolved, with its strides if they are dense."""
    resolved = tensor.detach().resolve_conj().resolve_neg()
    if StridedLayout.of(resolved).is_dense:
        return resolved
    return torch.empty(resolved.shape, dtype=resolved.dtype).copy_(resolved)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_any_layout_keep_their_bits_and_strides(dtype: torch.dtype) -> None:
    noise = torch.randint(0, 255, (6, 4 * dtype.itemsize), dtype=torch.uint8)
    elements = (noise % 2).bool()[:, :4] if dtype is torch.bool else noise.view(dtype)
    parts = {
        "whole": elements,
        "turned": elements.t(),
        "part": elements[1:5:2, 1],
        "one": elements[0, 0],
        "wide": elements[2].expand(3, 4),
        "both": elements[::2, 1:2].expand(3, 2),
        "none": elements[:0],
    }
    for state in (parts, *({"alone": part} for part in parts.values())):
        unpacked = unpack(packed([state, torch.empty(0, 3, dtype=dtype)]))
        for name, tensor in state.items():
            assert is_identical(unpacked[0][name], as_saved(tensor)), name
        assert unpacked[1].shape == (0, 3)


sizes = st.lists(st.integers(0, 3), max_size=4)


@given(sizes, st.lists(st.integers(0, 5), min_size=4, max_size=4), st.integers(0, 3))
def test_an_unpacked_view_has_its_values_and_dense_strides(
    shape: list[int], steps: list[int], offset: int
) -> None:
    memory = torch.arange(80, dtype=torch.int32)
    view = memory.as_strided(shape, steps[: len(shape)], offset)
    assert is_identical(unpack(packed(view)), as_saved(view))
    state = [view, memory, view.view(torch.float32), memory[3:].view(torch.uint8)]
    for unpacked, tensor in zip(unpack(packed(state)), state, strict=True):
        assert is_identical(unpacked, as_saved(tensor))


def test_conjugate_and_negative_tensors_are_saved_as_their_values() -> None:
    x = torch.tensor([1 + 2j, -3 + 0.5j, 4 - 1j])
    state = {"x": x, "y": x.conj(), "imag": x.conj().imag, "real": x.conj().real}
    unpacked = unpack(packed(state))
    for name, tensor in state.items():
        assert is_identical(unpacked[name], as_saved(tensor)), name
        assert is_identical(unpack(packed([tensor]))[0], as_saved(tensor)), name
    unpacked["x"].fill_(5 + 5j)
    assert torch.equal(unpacked["y"], state["y"]), "they are different values, and share no memory"


def test_only_the_used_part_of_a_storage_is_packed() -> None:
    table = torch.randn(1000, 1000)
    for small in (table[5], table[:, 5], table[10:12, 10:12], table[5, 5].expand(100)):
        assert len(packed(small)) < 3 * 4096


def test_views_of_the_same_memory_share_memory_after_unpacking() -> None:
    table = torch.arange(12.0).view(3, 4)
    state = {"rows": table[1:], "again": table[1:], "turned": table.t(), "turned again": table.t()}
    pack = packed(state)
    assert set(safetensors.torch.load(pack)) == {"rows", "turned~storage", "~state", "~crc"}
    unpacked = unpack(pack)
    for one, other in (("rows", "again"), ("turned", "turned again")):
        assert is_identical(unpacked[one], as_saved(state[one]))
        unpacked[one].fill_(-1)
        assert bool((unpacked[other] == -1).all())


def test_arrays_of_the_same_bytes_keep_their_dtype_shape_and_memory_order() -> None:
    array = numpy.arange(6, dtype="f4").reshape(2, 3)
    views = {"a": array, "t": array.T, "flat": array.reshape(-1), "i": array.view("i4")}
    loaded = unpack(packed({**views, "again": array}))
    assert loaded["again"] is loaded["a"]
    for name, view in views.items():
        assert (loaded[name].dtype, loaded[name].tolist()) == (view.dtype, view.tolist())
        assert loaded[name].flags.f_contiguous == view.flags.f_contiguous


def test_a_tensor_and_its_detached_copy_are_two_tensors_after_unpacking() -> None:
    with_gradient = torch.ones(2, requires_grad=True)
    tied = torch.nn.Parameter(torch.ones(2))
    unpacked = unpack(packed([with_gradient, with_gradient.detach(), tied, tied, with_gradient]))
    assert [tensor.requires_grad for tensor in unpacked] == [True, False, True, True, True]
    assert unpacked[0] is unpacked[4]
    assert unpacked[2] is unpacked[3]
    assert unpacked[0].data_ptr() == unpacked[1].data_ptr()


def test_the_state_dicts_of_a_model_and_its_optimizer_are_unpacked() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    unpacked = unpack(packed({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
    assert unpacked["model"]._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    other.load_state_dict(unpacked["model"])
    torch.optim.AdamW(other.parameters()).load_state_dict(unpacked["optimizer"])
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_tensor_at_two_paths_is_packed_once_and_unpacked_as_one() -> None:
    tied = torch.randn(1000)
    pack = packed({"a": tied, "b": [tied]})
    assert len(pack) < 2 * 4096 + 2 * 4000
    unpacked = unpack(pack)
    assert unpacked["a"] is unpacked["b"][0]


def test_parameters_and_requires_grad_are_preserved() -> None:
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    unpacked = unpack(packed([torch.nn.Parameter(torch.ones(2)), frozen, torch.ones(1)]))
    assert [type(tensor) for tensor in unpacked[:2]] == [torch.nn.Parameter] * 2
    assert [tensor.requires_grad for tensor in unpacked] == [True, False, False]


def test_each_device_of_a_copied_tensor_is_synchronized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image, waited = plan_layout([torch.ones(3), torch.ones(2)]), list[torch.device]()
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    image.copy_to(bytearray(image.size))
    assert waited == []
    second = torch.device("cuda", 1)
    layout = attrs.evolve(image.layout, devices=frozenset({second}))
    attrs.evolve(image, layout=layout).copy_to(bytearray(image.size))
    assert waited == [second]


def save_each(folder: Path, *states: object) -> list[bytes]:
    """Save states with one manager, check what is loaded, and return the headers of the files."""
    headers = []
    with CheckpointManager(folder, keep_last=len(states)) as manager:
        for step, state in enumerate(states, 1):
            manager.save(step, state).wait()
            assert describe(manager.load(step)) == describe(state)
            (path,) = folder.glob(f"step-{step:010d}.*/*.safetensors")
            data = path.read_bytes()
            headers.append(data[: 8 + int.from_bytes(data[:8], "little")])
    return headers


def test_the_next_step_has_the_same_header_while_its_plain_values_have_room(tmp_path: Path) -> None:
    """The header contains the size of the values. So the layout of the first save is reused."""

    def state(step: int, log: str) -> dict[str, Any]:
        return {"w": torch.full((3,), float(step)), "n": step, "more": [log, {step}]}

    first, second, third, fourth = save_each(
        tmp_path, state(1, ""), state(10**20, "x" * 900), state(3, "x" * 9000), state(4, "")
    )
    assert first == second
    assert first != third
    assert third == fourth


W = torch.arange(4.0)


@pytest.mark.parametrize(
    ("state", "other"),
    [
        ({1: W}, {True: W}),
        ({1: 2, "a": W}, {1.0: 2, "a": W}),
        ({0.0: W}, {-0.0: W}),
        ([W, W], [W, W.clone()]),
        ([W], [W.double()]),
        ([W], [W.view(2, 2)]),
        ([W.view(2, 2)], [W.view(2, 2).t()]),
        ([W], [torch.nn.Parameter(W)]),
        ([torch.nn.Parameter(W)], [torch.nn.Parameter(W, requires_grad=False)]),
        ([W], [W.clone().requires_grad_()]),
        ([[W], []], [[], [W]]),
        ([W, 1], [1, W]),
        ((W,), [W]),
        ({"a": W}, OrderedDict(a=W)),
        ([numpy.ones(4, "f4")], [numpy.ones(4, "i4")]),
        ([numpy.ones((2, 3))], [numpy.asfortranarray(numpy.ones((2, 3)))]),
    ],
)
def test_a_layout_is_not_reused_for_a_state_of_another_structure(
    tmp_path: Path, state: object, other: object
) -> None:
    save_each(tmp_path, state, other, state, other)


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


def create_nested_lists(levels: int, width: int) -> list[Any]:
    """Return nested lists. Each of the levels contains the next one `width` times."""
    state: list[Any] = []
    for _ in range(levels):
        state = [state] * width
    return state


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({object: 1}, r"state.key\(.*\) is a type"),
        (CYCLE, r"state\[0\]\[0\]\[0\] contains itself, or is nested deeper than 100 levels"),
        (
            create_nested_lists(MAX_DEPTH + 1, 1),
            rf"contains itself, or is nested deeper than {MAX_DEPTH}",
        ),
        (create_nested_lists(MAX_DEPTH - 1, 2), "has more than .* containers occur in many places"),
        ({"w": torch.eye(2).to_sparse()}, r"state\['w'\] is a tensor without plain elements"),
        ([torch.ones(1, device="meta")], r"state\[0\] is a tensor without plain elements"),
    ],
)
def test_an_unsupported_value_is_rejected_with_its_path(state: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        packed(state)


def test_a_changed_byte_and_a_truncation_are_detected() -> None:
    pack = packed({"a": torch.ones(3), "b": "text"})
    for at in range(0, len(pack), 3):
        changed = bytearray(pack)
        changed[at] ^= 1 << at % 8
        with pytest.raises(CheckpointCorruptError):
            unpack(changed)
    for size in (0, 7, 8, 100, len(pack) - 8, len(pack) - 1):
        with pytest.raises(CheckpointCorruptError):
            unpack(pack[:size])


@given(st.binary(max_size=200))
def test_random_bytes_are_rejected(noise: bytes) -> None:
    with pytest.raises(CheckpointError):
        unpack(noise)


def test_saved_sets_have_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    """Ranks compare the bytes of their states, but the order of a set differs between processes."""
    program = (
        "import sys; from elasticlib import save_checkpoint; "
        "save_checkpoint(sys.argv[1], [set('abcdefgh'), frozenset(f'x{n}' for n in range(9))])"
    )
    for seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / seed)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            timeout=100,
        )
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
