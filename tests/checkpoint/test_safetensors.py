"""A pack is a safetensors file that any tool can open, and an invalid header is rejected."""

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
from test_pack import as_saved, is_identical, packed, read_bits

from elasticlib import CheckpointManager
from elasticlib.checkpoint.pack import plan_layout, unpack
from elasticlib.checkpoint.safetensors_header import (
    ITEM_BYTES,
    PREFIX_BYTES,
    read_header,
    read_meta,
    read_size,
)
from elasticlib.checkpoint.state_tree import StatePath, path_name
from elasticlib.errors import CheckpointCorruptError, CheckpointError

KNOWN = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


@st.composite
def draw_tensor(draw: Any) -> torch.Tensor:
    """Draw a tensor with random bits in its own memory."""
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


def create_view(tensor: torch.Tensor, how: str) -> Any:
    if how == "turned":
        return tensor.permute(list(reversed(range(tensor.dim()))))
    if how == "part":
        return tensor[1:] if tensor.dim() and len(tensor) > 1 else tensor
    if how == "bytes":
        return tensor.view(-1).view(torch.uint8)
    if how == "wide":
        return tensor.unsqueeze(0).expand(3, *tensor.shape)
    return [tensor, tensor.detach()] if how == "twice" else tensor


# A string of digits and an integer of the same digits are rejected.
texts = st.text(st.characters(), max_size=3).filter(lambda text: not text.lstrip("-").isdigit())
keys = st.one_of(texts, st.integers(), st.none())
states = st.recursive(
    st.one_of(
        draw_tensor(), st.builds(create_view, draw_tensor(), views), arrays, st.text(max_size=3)
    ),
    lambda part: st.one_of(
        st.lists(part, max_size=4),
        st.dictionaries(keys, part, max_size=4),
        st.tuples(draw_tensor(), views).map(lambda one: [one[0], create_view(*one)]),
    ),
    max_leaves=8,
)


def list_tensors(state: Any, above: StatePath = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(state, dict):
        for key, part in state.items():
            yield from list_tensors(part, (*above, key))
    elif isinstance(state, list):
        for at, part in enumerate(state):
            yield from list_tensors(part, (*above, at))
    elif isinstance(state, torch.Tensor | numpy.ndarray):
        yield path_name(above), state


def list_readable_tensors(state: Any) -> dict[str, Any]:
    """Return the tensors and arrays that are entries under their names, by name."""
    loaded = list(list_tensors(state))
    memory = Counter(one.data_ptr() for _, one in loaded if torch.is_tensor(one))
    return {
        path: one
        for path, one in loaded
        if path.encode("utf-8", "replace") == path.encode("utf-8", "ignore")
        and (
            as_saved(one).is_contiguous() and one.dtype in KNOWN
            if torch.is_tensor(one)
            else one.flags.c_contiguous and one.dtype.str[:2] not in (">i", "<M", "<U")
        )
        and (not torch.is_tensor(one) or memory[one.data_ptr()] == 1)
    }


@given(states)
def test_any_tool_finds_each_plain_tensor_under_its_path(state: Any) -> None:
    pack = packed(state)
    loaded = safetensors.torch.load(bytes(pack))
    for path, one in list_readable_tensors(state).items():
        expected = torch.from_numpy(one) if isinstance(one, numpy.ndarray) else one
        assert (loaded[path].dtype, loaded[path].shape) == (expected.dtype, expected.shape), path
        assert torch.equal(read_bits(loaded[path]), read_bits(expected)), path
    for (_, one), (_, again) in zip(list_tensors(state), list_tensors(unpack(pack)), strict=True):
        if isinstance(one, numpy.ndarray):
            assert (one.dtype, one.tobytes()) == (again.dtype, again.tobytes())
        else:
            assert is_identical(again, as_saved(one))


@given(states)
def test_each_entry_is_aligned_to_the_size_of_its_elements(state: Any) -> None:
    pack = packed(state)
    head = read_header(pack)
    assert head.start % 4096 == 0
    for entry in head.entries:
        assert entry.begin % min(64, entry.end - entry.begin & entry.begin - entry.end or 64) == 0
        assert entry.begin % ITEM_BYTES[entry.dtype] == 0
    for _, one in list_tensors(unpack(pack, copy=False)):
        if torch.is_tensor(one) and one.numel():
            assert one.data_ptr() % one.dtype.itemsize == 0


def test_a_checkpoint_is_opened_by_the_readers_of_safetensors(tmp_path: Path) -> None:
    model, optimizer = sample_states.create_trained()
    tied = torch.nn.Parameter(torch.ones(2, 2))
    state = {"model": model, "optimizer": optimizer, "tied": [tied, tied.detach()], "step": 7}
    with CheckpointManager(tmp_path) as manager:
        manager.save(7, state)
    (path,) = tmp_path.glob("step-*/state.safetensors")
    loaded = safetensors.torch.load_file(path)
    for name, one in model.state_dict().items():
        assert torch.equal(loaded[f"model/{name}"], one)
    assert torch.equal(
        loaded["optimizer/state/0/exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )
    assert torch.equal(loaded["tied/0"], tied)
    assert "tied/1" not in loaded
    with safetensors.safe_open(path, "np") as file:
        assert set(file.keys()) == set(loaded)
        assert file.get_slice("model/0.weight")[1:, :2].tolist() == model[0].weight[1:, :2].tolist()
        values = json.loads(file.metadata()["elasticlib.values"])
    assert values["meta"] == {"step": 7}
    assert read_meta(path.read_bytes()) == {"step": 7}


def test_a_part_of_a_sharded_state_has_its_shards_under_their_paths(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        state = sample_states.create_sharded(1)
        with CheckpointManager(tmp_path) as manager:
            manager.save(7, state)
    finally:
        dist.destroy_process_group()
    (path,) = tmp_path.glob("step-*/part-00000.safetensors")
    loaded = safetensors.torch.load_file(path)
    assert set(loaded) == {"rows", "more/0", "turned", "same", "plain~storage"}
    assert torch.equal(loaded["rows"], state["rows"].to_local())
    assert torch.equal(loaded["more/0"], state["more"][0].to_local())


def test_keys_are_escaped_in_names() -> None:
    state = {
        **{"a/b": torch.tensor(1), "a": {"b": torch.tensor(2)}, "a~b": torch.tensor(3)},
        **{"__metadata__": torch.tensor(4), "~storage": torch.tensor(5), 7: torch.tensor(6)},
        **{None: torch.tensor(7), "None": torch.tensor(8), "\udc80": torch.tensor(9)},
        "turned": torch.arange(6).view(2, 3).t(),
    }
    loaded = safetensors.torch.load(bytes(packed(state)))
    memory = loaded.pop("turned~storage")
    assert memory.view(torch.int64).tolist() == [0, 1, 2, 3, 4, 5]
    assert {name: int(one) for name, one in loaded.items()} == {
        **{"a~1b": 1, "a/b": 2, "a~0b": 3, "~__metadata__": 4, "~0storage": 5, "7": 6},
        **{"~None": 7, "None": 8, "\\udc80": 9},
    }


def test_two_tensors_with_one_name_are_rejected_with_their_paths() -> None:
    with pytest.raises(CheckpointError) as rejected:
        packed({"a": {1: torch.ones(1), "1": torch.zeros(1)}})
    assert str(rejected.value).startswith("state['a'][1] and state['a']['1'] have the same name")
    assert unpack(packed({1: 1, "1": 2})) == {1: 1, "1": 2}, "plain values have no names"


def test_earlier_contents_of_a_buffer_are_not_written() -> None:
    image = plan_layout([torch.arange(17, dtype=torch.uint8), torch.ones(3), 5])
    packs = []
    for before in (b"\0", b"\xff"):
        buffer = bytearray(before * image.size)
        image.copy_to(buffer)
        packs.append(bytes(buffer))
    assert packs[0] == packs[1]


def create_pack(header: str, data: bytes = b"", *, size: int | None = None) -> bytes:
    """Return a pack with this header after the record of elasticlib, and a correct checksum."""
    start = -(-(8 + 500 + len(header)) // 4096) * 4096
    size = start + len(data) if size is None else size
    before = f'{{"__metadata__":{{"elasticlib":"pack 4 size={size:016x} head='
    text = f'{before}00000000 data=--------",{header}'.ljust(start - 8).encode()
    header_bytes = struct.pack("<Q", len(text)) + text
    at = 8 + len(before)
    checksum = zlib.crc32(header_bytes[:at] + header_bytes[at + 8 :])
    return header_bytes[:at] + b"%08x" % checksum + header_bytes[at + 8 :] + data


VALUES = json.dumps(json.dumps({"meta": {}, "values": []}))
TREE = json.dumps(json.dumps({"tree": {"tensor": 0}, "tensors": [0]}))
ENTRY = '{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
VALUED = f'"elasticlib.values":{VALUES},"elasticlib.tree":'
NOTES = f"{VALUED}{TREE}}}"


def test_a_valid_header_is_read() -> None:
    pack = create_pack(f'{NOTES},"a":{ENTRY}}}', b"abcd")
    assert bytes(unpack(memoryview(bytearray(pack)))) == b"abcd"
    assert list(safetensors.torch.load(pack)) == ["a"]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (f'{NOTES},"a":{ENTRY},"a":{ENTRY}}}', "the entry 'a' occurs twice"),
        (f'{NOTES},"__metadata__":{{}}}}', "expected an entry or the end"),
        (f'{VALUED}"no JSON"}},"a":{ENTRY}}}', "are not JSON"),
        (f'{VALUED}"{"[" * 100_000}"}},"a":{ENTRY}}}', "are not JSON"),
        (f'{VALUED}"[]"}},"a":{ENTRY}}}', "are not a JSON object"),
        (f'{NOTES.replace(VALUES, chr(34) * 2)},"a":{ENTRY}}}', "are not JSON"),
        (f'{NOTES.replace("meta", "mate")},"a":{ENTRY}}}', "lack the list of values or the meta"),
        (f'"other":"1"}},"a":{ENTRY}}}', "the values are missing"),
        (f'"elasticlib.values":{VALUES}}},"a":{ENTRY}}}', "the tree are missing"),
        (f'{VALUED}7}},"a":{ENTRY}}}', "are not a string"),
        (f'{VALUED}"', "Unterminated string"),
        (f'{NOTES},"a":{ENTRY}', "expected an entry or the end"),
        (f'{NOTES},"a":' + "[" * 100_000, "expected an entry or the end"),
        (f'{NOTES},"a": {ENTRY}}}', "expected an entry or the end"),
        (f'{NOTES},"\\ud":{ENTRY}}}', "Invalid"),
        (f'{NOTES},"a":{ENTRY.replace("[0,4]", "[0,5]")}}}', "has 5 bytes"),
        (f'{NOTES},"a":{ENTRY.replace("[0,4]", "[-4,0]")}}}', "expected an entry or the end"),
        (
            f'{NOTES},"a":{ENTRY.replace("[0,4]", "[4,8]")}}}',
            "'a' begins at 4, and the entry before it",
        ),
        (f'{NOTES},"a":{ENTRY.replace("[0,4]", "[0,4,8]")}}}', "expected an entry or the end"),
        (f'{NOTES},"a":{ENTRY.replace("[4]", "[1e9]")}}}', "expected an entry or the end"),
        (f'{NOTES},"a":{ENTRY.replace("[4]", f"[{2**62},{2**62}]")}}}', "has 4 bytes"),
        (f'{NOTES},"a":{ENTRY.replace("[4]", "[4,]")}}}', "invalid literal"),
        (f'{NOTES},"a":{ENTRY.replace("U8", "U9")}}}', "has the unknown dtype U9"),
        (
            f'{NOTES},"a":{ENTRY},"b":{ENTRY}}}',
            "'b' begins at 0, and the entry before it ends at 4",
        ),
        (f'{NOTES},"a":7}}', "expected an entry or the end"),
        (f"{NOTES}}}", "have 0 bytes, and its data 4"),
        (
            f'{NOTES},"a":{ENTRY},"b":{ENTRY.replace("[0,4]", "[4,8]")}}}',
            "have 8 bytes, and its data 4",
        ),
    ],
)
def test_an_invalid_header_with_a_correct_checksum_is_rejected_with_the_reason(
    header: str, message: str
) -> None:
    for read in (lambda pack: unpack(memoryview(bytearray(pack))), read_meta):
        with pytest.raises(CheckpointCorruptError) as error:
            read(create_pack(header, b"abcd"))
        assert message in str(error.value)


@pytest.mark.parametrize(
    "tree",
    [
        {"tensors": [1]},
        {"tensors": [-1]},
        {"tensors": ["a"]},
        {"tensors": 7},
        {"tensors": [["uint8", [4], [1], 0]]},
        {"tensors": [["uint8", [4], [1], 0, 7]]},
        {"tensors": [["uint8", [5], [1], 0, "cpu"]]},
        {"tensors": [["uint8", [2, 2], [1, 1], 0, "cpu"]]},
        {"tensors": [["uint8", [2], [3], 0, "cpu"]]},
        {"tensors": [["uint8", [2**62], [1], 0, "cpu"]]},
        {"tensors": [["uint8", [4], [1], 1, "cpu"]]},
        {"tensors": [["untyped", [4], [1], 0, "cpu"]]},
        {"shards": [1]},
        {"shard_paths": [7]},
        {"tree": {"tensor": 9}},
        {"tree": {"tensor": -1}},
        {"tree": {"none": 9}},
        {"tree": [{"tensor": 0}, None]},
    ],
)
def test_a_header_with_indices_outside_the_data_is_rejected(tree: dict[str, Any]) -> None:
    right = {"tree": {"tensor": 0}, "tensors": [0]}
    notes = f"{VALUED}{json.dumps(json.dumps({**right, **tree}))}}}"
    with pytest.raises(CheckpointCorruptError):
        unpack(memoryview(bytearray(create_pack(f'{notes},"a":{ENTRY}}}', b"abcd"))))


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        (struct.pack("<Q", 2**63) + create_pack(NOTES)[8:], "were changed: a header of"),
        (struct.pack("<Q", 4095) + create_pack(NOTES)[8:], "a header of 4103 bytes"),
        (create_pack(NOTES, size=2**63), f"{2**63} in all"),
        (create_pack(NOTES, size=4), "4 in all"),
        (struct.pack("<Q", 200) + b'{"a":{}}' + b" " * 200, "begins with a record"),
        (b"PK\3\4" * 100, "begins with a record"),
    ],
)
def test_a_prefix_with_an_impossible_size_is_rejected(prefix: bytes, message: str) -> None:
    with pytest.raises(CheckpointCorruptError) as error:
        read_size(prefix[:PREFIX_BYTES])
    assert message in str(error.value)


def test_headers_are_read_without_torch() -> None:
    program = (
        "import sys, elasticlib.checkpoint.safetensors_header; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=100).returncode == 0
