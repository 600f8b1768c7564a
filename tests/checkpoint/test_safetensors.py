"""A pack is a safetensors file: any tool opens it, and a head that anybody may have written is
refused with a sentence."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import sample_states
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from test_pack import bits, packed, same

from elasticlib import CheckpointManager
from elasticlib.checkpoint.pack import fill, lay_out, unpack
from elasticlib.checkpoint.pack_head import HEAD_BYTES, ITEM_BYTES, read_head, read_meta, size_of
from elasticlib.errors import CheckpointCorrupt, CheckpointError

KNOWN = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    """Of any bits, in memory of its own."""
    dtype = draw(st.sampled_from([*KNOWN, torch.complex128]))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    count = torch.Size(shape).numel() * dtype.itemsize
    drawn = torch.tensor(list(draw(st.binary(min_size=count, max_size=count))), dtype=torch.uint8)
    drawn = drawn % 2 if dtype is torch.bool else drawn
    return drawn.view(dtype).view(shape)


arrays = st.builds(
    lambda shape, kind: numpy.arange(numpy.prod(shape, dtype=int)).reshape(shape).astype(kind),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(["f8", "f4", "i2", "u4", "b1", ">i4", "M8[s]", "U3"]),
)
views = st.sampled_from(["itself", "turned", "part", "bytes", "twice", "wide"])


def seen(tensor: torch.Tensor, how: str) -> Any:
    if how == "turned":
        return tensor.permute(list(reversed(range(tensor.dim()))))
    if how == "part":
        return tensor[1:] if tensor.dim() and len(tensor) > 1 else tensor
    if how == "bytes":
        return tensor.view(-1).view(torch.uint8)
    if how == "wide":
        return tensor.unsqueeze(0).expand(3, *tensor.shape)
    return [tensor, tensor.detach()] if how == "twice" else tensor


keys = st.one_of(st.text(st.characters(), max_size=3), st.integers(), st.none())
states = st.recursive(
    st.one_of(tensors(), st.builds(seen, tensors(), views), arrays, st.text(max_size=3)),
    lambda part: st.one_of(
        st.lists(part, max_size=4),
        st.dictionaries(keys, part, max_size=4),
        st.tuples(tensors(), views).map(lambda one: [one[0], seen(*one)]),
    ),
    max_leaves=8,
)


def paths(state: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(state, dict):
        for key, part in state.items():
            yield from paths(part, (*above, str(key)))
    elif isinstance(state, list):
        for at, part in enumerate(state):
            yield from paths(part, (*above, str(at)))
    elif isinstance(state, torch.Tensor | numpy.ndarray):
        yield ".".join(above) or "state", state


def readable(state: Any) -> dict[str, Any]:
    """What is an entry under its path: plain, alone in its memory, of a dtype that is known."""
    found = list(paths(state))
    memory = Counter(one.untyped_storage().data_ptr() for _, one in found if torch.is_tensor(one))
    named = Counter(path for path, _ in found)
    return {
        path: one
        for path, one in found
        if named[path] == 1
        and path.encode("utf-8", "replace") == path.encode("utf-8", "ignore")
        and (
            one.is_contiguous() and one.dtype in KNOWN and not one.is_neg()
            if torch.is_tensor(one)
            else one.flags.c_contiguous and one.dtype.str[:2] not in (">i", "<M", "<U")
        )
        and (not torch.is_tensor(one) or memory[one.untyped_storage().data_ptr()] == 1)
    }


@given(states)
def test_any_tool_finds_each_plain_tensor_under_its_path(state: Any) -> None:
    pack = packed(state)
    found = safetensors.torch.load(bytes(pack))
    for path, one in readable(state).items():
        want = torch.from_numpy(one) if isinstance(one, numpy.ndarray) else one
        assert (found[path].dtype, found[path].shape) == (want.dtype, want.shape), path
        assert torch.equal(bits(found[path]), bits(want)), path
    for (_, one), (_, again) in zip(paths(state), paths(unpack(pack)), strict=True):
        if isinstance(one, numpy.ndarray):
            assert (one.dtype, one.tobytes()) == (again.dtype, again.tobytes())
        else:
            assert same(one, again)


@given(states)
def test_each_entry_begins_at_a_multiple_of_its_elements_size(state: Any) -> None:
    pack = packed(state)
    head = read_head(pack)
    assert head.start % 4096 == 0
    for entry in head.entries:
        assert entry.begin % min(64, entry.end - entry.begin & entry.begin - entry.end or 64) == 0
        assert entry.begin % ITEM_BYTES[entry.dtype] == 0
    for _, one in paths(unpack(pack, copy=False)):
        if torch.is_tensor(one) and one.numel():
            assert one.data_ptr() % one.dtype.itemsize == 0


def test_a_checkpoint_is_opened_by_the_readers_of_safetensors(tmp_path: Path) -> None:
    model, optimizer = sample_states.trained()
    tied = torch.nn.Parameter(torch.ones(2, 2))
    state = {"model": model, "optimizer": optimizer, "tied": [tied, tied.detach()], "step": 7}
    with CheckpointManager(tmp_path) as manager:
        manager.save(7, state)
    (path,) = tmp_path.glob("step-*/state.*.pack")
    found = safetensors.torch.load_file(path)
    for name, one in model.state_dict().items():
        assert torch.equal(found[f"model.{name}"], one)
    assert torch.equal(
        found["optimizer.state.0.exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )
    # Memory that is one tensor's and others', too, is that tensor's.
    assert torch.equal(found["tied.0"], tied)
    assert "tied.1" not in found
    with safetensors.safe_open(path, "np") as file:
        assert set(file.keys()) == set(found)
        assert file.get_slice("model.0.weight")[1:, :2].tolist() == model[0].weight[1:, :2].tolist()
        outline = json.loads(file.metadata()["elasticlib.state"])
    assert outline["meta"] == {"step": 7}
    assert read_meta(path.read_bytes()) == {"step": 7}


def test_a_part_of_a_sharded_state_has_its_shards_under_their_paths(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        state = sample_states.sharded(1)
        with CheckpointManager(tmp_path) as manager:
            manager.save(7, state)
    finally:
        dist.destroy_process_group()
    (path,) = tmp_path.glob("step-*/part-00000.*.pack")
    found = safetensors.torch.load_file(path)
    assert set(found) == {"rows", "more.0", "turned", "same", "plain.storage"}
    assert torch.equal(found["rows"], state["rows"].to_local())
    assert torch.equal(found["more.0"], state["more"][0].to_local())


def test_paths_that_are_one_when_written_with_dots_are_told_apart() -> None:
    state = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}, "__metadata__": torch.tensor(3)}
    state["a.b~2"] = torch.tensor(4)
    state["turned"] = torch.arange(6).view(2, 3).t()
    state["turned.storage"] = torch.tensor(5)
    found = safetensors.torch.load(bytes(packed(state)))
    memory = found.pop("turned.storage~2")
    assert memory.view(torch.int64).tolist() == [0, 1, 2, 3, 4, 5]
    assert {name: int(one) for name, one in found.items()} == {
        **{"a.b": 1, "a.b~2": 2, "__metadata__~2": 3, "a.b~2~2": 4, "turned.storage": 5},
    }


def test_what_a_buffer_held_before_is_not_written() -> None:
    memory = torch.arange(3, dtype=torch.uint8)
    odd = torch.arange(17, dtype=torch.uint8)
    state = [odd, odd[:16].view(torch.int64), memory]
    layout = lay_out(state)
    packs = []
    for before in (0, 255):
        buffer = torch.full((layout.size,), before, dtype=torch.uint8)
        fill(layout, buffer)
        packs.append(bytes(buffer.numpy()))
    assert packs[0] == packs[1]
    assert safetensors.torch.load(packs[0])["0.storage"].tolist() == [*range(17), *[0] * 7]


def head_of(header: str, data: bytes = b"", *, size: int | None = None) -> bytes:
    """A pack with this header behind our record, which says what is right of it."""
    start = -(-(8 + 500 + len(header)) // 4096) * 4096
    size = start + len(data) if size is None else size
    before = f'{{"__metadata__":{{"elasticlib":"pack 3 size={size:016x} head='
    text = f'{before}00000000 data=--------",{header}'.ljust(start - 8).encode()
    whole = struct.pack("<Q", len(text)) + text
    at = 8 + len(before)
    summed = zlib.crc32(whole[:at] + whole[at + 8 :])
    return whole[:at] + b"%08x" % summed + whole[at + 8 :] + data


OUTLINE = json.dumps(json.dumps({"meta": {}, "tree": {"tensor": 0}, "blocks": [0], "tensors": [0]}))
ENTRY = '{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
NOTES = f'"elasticlib.state":{OUTLINE}}}'


def test_a_head_that_is_as_it_should_be_is_read() -> None:
    pack = head_of(f'{NOTES},"a":{ENTRY}}}', b"abcd")
    assert bytes(unpack(memoryview(bytearray(pack)))) == b"abcd"
    assert list(safetensors.torch.load(pack)) == ["a"]


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (f'{NOTES},"a":{ENTRY},"a":{ENTRY}}}', "'a' stands in it twice"),
        (f'{NOTES},"__metadata__":{{}}}}', "there is neither an entry nor the end"),
        (f'"elasticlib.state":"no JSON"}},"a":{ENTRY}}}', "is no JSON"),
        (f'"elasticlib.state":"{"[" * 100_000}"}},"a":{ENTRY}}}', "is no JSON"),
        (f'"elasticlib.state":"[]"}},"a":{ENTRY}}}', "says nothing beside the state"),
        (f'"elasticlib.state":"{{}}"}},"a":{ENTRY}}}', "says nothing beside the state"),
        (f'"other":"1"}},"a":{ENTRY}}}', "there is no outline"),
        (f'"elasticlib.state":7}},"a":{ENTRY}}}', "is no text"),
        ('"elasticlib.state":"', "Unterminated string"),
        (f'{NOTES},"a":{ENTRY}', "there is neither an entry nor the end"),
        (f'{NOTES},"a":' + "[" * 100_000, "there is neither an entry nor the end"),
        (f'{NOTES},"a": {ENTRY}}}', "there is neither an entry nor the end"),
        (f'{NOTES},"\\ud":{ENTRY}}}', "Invalid"),
        (f'{NOTES},"a":{ENTRY.replace("[0,4]", "[0,5]")}}}', "has 5 bytes"),
        (f'{NOTES},"a":{ENTRY.replace("[0,4]", "[-4,0]")}}}', "there is neither an entry nor"),
        (f'{NOTES},"a":{ENTRY.replace("[0,4]", "[4,8]")}}}', "'a' begins at 4, the one before it"),
        (f'{NOTES},"a":{ENTRY.replace("[0,4]", "[0,4,8]")}}}', "there is neither an entry nor"),
        (f'{NOTES},"a":{ENTRY.replace("[4]", "[1e9]")}}}', "there is neither an entry nor"),
        (f'{NOTES},"a":{ENTRY.replace("[4]", f"[{2**62},{2**62}]")}}}', "has 4 bytes"),
        (f'{NOTES},"a":{ENTRY.replace("[4]", "[4,]")}}}', "invalid literal"),
        (f'{NOTES},"a":{ENTRY.replace("U8", "U9")}}}', "has the dtype U9, which no"),
        (f'{NOTES},"a":{ENTRY},"b":{ENTRY}}}', "'b' begins at 0, the one before it ends at 4"),
        (f'{NOTES},"a":7}}', "there is neither an entry nor the end"),
        (f"{NOTES}}}", "are 0 bytes, its data 4"),
        (
            f'{NOTES},"a":{ENTRY},"b":{ENTRY.replace("[0,4]", "[4,8]")}}}',
            "are 8 bytes, its data 4",
        ),
    ],
)
def test_a_head_that_somebody_made_up_is_refused_with_a_sentence(header: str, said: str) -> None:
    for read in (lambda pack: unpack(memoryview(bytearray(pack))), read_meta):
        with pytest.raises(CheckpointCorrupt) as refused:
            read(head_of(header, b"abcd"))
        assert said in str(refused.value)


@pytest.mark.parametrize(
    "outline",
    [
        {"tensors": [1]},
        {"tensors": [-1]},
        {"tensors": ["a"]},
        {"tensors": 7},
        {"tensors": [["int64", [1], 0]]},
        {"tensors": [["uint8", [4], 0, [1], 1, False, False]]},
        {"tensors": [["uint8", [2**62], 0, [2**62], 0, False, False]]},
        {"blocks": []},
        {"blocks": [["cpu", 5]]},
        {"blocks": [[7]]},
        {"blocks": [["cpu", 2**40, ["uint8", [2, 2], [1, 2**39]]]]},
        {"tree": {"tensor": 9}},
        {"tree": {"none": 9}},
    ],
)
def test_an_outline_that_leads_outside_is_refused(outline: dict[str, Any]) -> None:
    right = {"meta": {}, "tree": {"tensor": 0}, "blocks": [0], "tensors": [0]}
    notes = f'"elasticlib.state":{json.dumps(json.dumps({**right, **outline}))}}}'
    with pytest.raises(CheckpointError):
        unpack(memoryview(bytearray(head_of(f'{notes},"a":{ENTRY}}}', b"abcd"))))


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (struct.pack("<Q", 2**63) + head_of(NOTES)[8:], "were changed: a head of"),
        (struct.pack("<Q", 4095) + head_of(NOTES)[8:], "a head of 4103 bytes"),
        (head_of(NOTES, size=2**63), f"{2**63} in all"),
        (head_of(NOTES, size=4), "4 in all"),
        (struct.pack("<Q", 200) + b'{"a":{}}' + b" " * 200, "begins with the record of one"),
        (b"PK\3\4" * 100, "begins with the record of one"),
    ],
)
def test_first_bytes_of_a_size_that_cannot_be_are_refused(first: bytes, said: str) -> None:
    with pytest.raises(CheckpointCorrupt) as refused:
        size_of(first[:HEAD_BYTES])
    assert said in str(refused.value)


def test_heads_are_read_without_torch() -> None:
    program = "import sys, elasticlib.checkpoint.pack_head; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=100).returncode == 0
