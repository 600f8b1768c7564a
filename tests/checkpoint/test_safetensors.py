"""A pack is a safetensors file that any tool can open, and an invalid header is rejected."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
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
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks
from sharding import sharded_layers
from test_pack import as_saved, is_identical, packed, read_bits, unpack
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from elasticlib import CheckpointManager, load_checkpoint
from elasticlib.checkpoint.pack import plan_layout
from elasticlib.checkpoint.state_tree import StatePath, path_name
from elasticlib.checkpoint.storage import checksum, encode_checksum
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
    loaded = safetensors.torch.load(pack)
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
    start = 8 + int.from_bytes(pack[:8], "little")
    assert start % 4096 == 0
    entries = json.loads(pack[8:start])
    entries.pop("__metadata__")
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        if name != "~crc":
            assert begin % min(64, (end - begin) & (begin - end) or 64) == 0
    names = list(entries)
    assert (names[0], names[-1]) == ("~state", "~crc")
    for _, one in list_tensors(unpack(pack)):
        if torch.is_tensor(one) and one.numel():
            assert one.data_ptr() % one.dtype.itemsize == 0


def data_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*/*.safetensors"))


def test_a_checkpoint_is_opened_by_the_readers_of_safetensors(tmp_path: Path) -> None:
    model, optimizer = sample_states.create_trained()
    tied = torch.nn.Parameter(torch.ones(2, 2))
    state = {"model": model, "optimizer": optimizer, "tied": [tied, tied.detach()], "step": 7}
    with CheckpointManager(tmp_path) as manager:
        manager.save(7, state)
    (path,) = data_files(tmp_path)
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
        assert json.loads(file.get_tensor("~state").tobytes())["meta"] == {"step": 7}
        crc = file.get_tensor("~crc").tobytes()
    assert crc == encode_checksum(checksum(memoryview(path.read_bytes()[:-8])))
    assert load_checkpoint(path)["step"] == 7, "a file of a checkpoint is a single file, too"


def load_by_torch(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Load tensors from the only checkpoint in a directory by DCP's reader of safetensors."""
    (path,) = {path.parent for path in data_files(folder)}
    dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(path)))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torch_loads_a_committed_checkpoint(tmp_path: Path) -> None:
    model, optimizer = sample_states.create_trained()
    with CheckpointManager(tmp_path) as manager:
        manager.save(7, {"model": model, "optimizer": optimizer, "text": "a"})
    wanted = {f"model/{name}": one for name, one in model.state_dict().items()}
    loaded = {name: torch.zeros_like(one) for name, one in wanted.items()}
    load_by_torch(tmp_path, loaded)
    for name, one in wanted.items():
        assert torch.equal(loaded[name], one), name


def save_layers(folder: Path, wanted: Path) -> None:
    torch.manual_seed(0)
    model = sharded_layers(init_device_mesh("cpu", (dist.get_world_size(),)))
    with CheckpointManager(folder) as manager:
        manager.save(7, {"model": model, "rest": torch.arange(3)})
    full = {name: one.full_tensor() for name, one in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(full, wanted)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torch_loads_a_committed_checkpoint_of_sharded_tensors(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(save_layers, 2, tmp_path / "folder", tmp_path / "wanted")
    wanted = torch.load(tmp_path / "wanted")
    loaded = {f"model/{name}": torch.zeros_like(one) for name, one in wanted.items()}
    loaded["rest"] = torch.zeros(3, dtype=torch.int64)
    load_by_torch(tmp_path / "folder", loaded)
    assert loaded.pop("rest").tolist() == [0, 1, 2]
    for name, one in wanted.items():
        assert torch.equal(loaded[f"model/{name}"], one), name
    for path in data_files(tmp_path / "folder"):
        rank, entries = int(path.name[5:10]), safetensors.torch.load_file(path)
        with pytest.raises(CheckpointError, match="is a part of a sharded checkpoint"):
            load_checkpoint(path)
        shard = entries["model/0.weight"]
        assert torch.equal(shard, wanted["0.weight"][rank * 4 : rank * 4 + 4])


def save_stages(folder: Path) -> None:
    """Save two stages of a pipeline, whose tensors have equal names."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "data"))["data"]
    value = torch.full((2,), float(dist.get_rank()))
    with CheckpointManager(folder) as manager:
        manager.save(1, {"w": distribute_tensor(value, mesh, [Shard(0)]), "n": torch.ones(1)})
        state = {"w": distribute_tensor(torch.zeros(2), mesh, [Shard(0)]), "n": torch.zeros(1)}
        manager.restore(state)
        assert torch.equal(state["w"].to_local(), value)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_no_tool_takes_a_tensor_of_one_pipeline_stage_for_that_of_another(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(save_stages, 2, tmp_path)
    names = [set(safetensors.torch.load_file(path)) for path in data_files(tmp_path)]
    own = {"~state", "~crc"}
    assert names == [{"w~mesh 0", "n~mesh 0", *own}, {"w~mesh 1", "n~mesh 1", *own}]
    with pytest.raises(dcp.CheckpointException, match="Missing key in checkpoint state_dict: w"):
        load_by_torch(tmp_path, {"w": torch.zeros(2)})


def test_keys_are_escaped_in_names() -> None:
    state = {
        **{"a/b": torch.tensor(1), "a": {"b": torch.tensor(2)}, "a~b": torch.tensor(3)},
        **{"__metadata__": torch.tensor(4), "~state": torch.tensor(5), 7: torch.tensor(6)},
        **{None: torch.tensor(7), "None": torch.tensor(8), "\udc80": torch.tensor(9)},
        "turned": torch.arange(6).view(2, 3).t(),
    }
    loaded = safetensors.torch.load(packed(state))
    assert bytes(loaded.pop("~crc")) != bytes(8)
    del loaded["~state"]
    memory = loaded.pop("turned~storage")
    assert memory.view(torch.int64).tolist() == [0, 1, 2, 3, 4, 5]
    assert {name: int(one) for name, one in loaded.items()} == {
        **{"a~1b": 1, "a/b": 2, "a~0b": 3, "~__metadata__": 4, "~0state": 5, "7": 6},
        **{"~None": 7, "None": 8, "\\udc80": 9},
    }


def test_two_tensors_with_one_name_are_rejected_with_their_paths() -> None:
    with pytest.raises(CheckpointError) as rejected:
        packed({"a": {1: torch.ones(1), "1": torch.zeros(1)}})
    assert "state['a'][1] and state['a']['1'] have the same name" in str(rejected.value)
    assert unpack(packed({1: 1, "1": 2})) == {1: 1, "1": 2}, "plain values have no names"


def test_earlier_contents_of_a_buffer_are_not_written() -> None:
    image = plan_layout([torch.arange(17, dtype=torch.uint8), torch.ones(3), 5])
    packs = []
    for before in (b"\0", b"\xff"):
        buffer = bytearray(before * image.size)
        image.copy_to(buffer)
        packs.append(bytes(buffer))
    assert packs[0] == packs[1]


STATE = '{"meta":{},"values":[],"tree":{"tree":{"tensor":0},"tensors":[0]}}'
METADATA = '"__metadata__":{"elasticlib":"5"}'
ENTRIES = (
    '"~state":{"dtype":"U8","shape":[128],"data_offsets":[0,128]},'
    '"a":{"dtype":"U8","shape":[4],"data_offsets":[128,132]},'
    '"~crc":{"dtype":"U8","shape":[8],"data_offsets":[132,140]}'
)
HEADER = f"{{{METADATA},{ENTRIES}}}"


def create_pack(header: str = HEADER, state: str = STATE, *, length: int | None = None) -> bytes:
    """Return the bytes of a file with this header, this `~state` and a correct checksum."""
    text = header.encode()
    text = text.ljust(-(-(8 + len(text)) // 64) * 64 - 8)
    size = struct.pack("<Q", len(text) if length is None else length)
    data = b"".join((size, text, state.encode().ljust(128), b"abcd"))
    return data + encode_checksum(checksum(memoryview(data)))


def test_a_valid_header_is_read() -> None:
    assert bytes(unpack(create_pack())) == b"abcd"
    assert set(safetensors.torch.load(create_pack())) == {"~state", "a", "~crc"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"a"', '"~state"', "the key '~state' occurs twice"),
        ('"a"', '"__metadata__"', "the key '__metadata__' occurs twice"),
        ('"a":', '"a":{},"a":', "the key 'a' occurs twice"),
        ('{"dtype":"U8","shape":[4]', '{"dtype":"U8","dtype":"U8"', "the key 'dtype' occurs twice"),
        (HEADER, "[]", "is not a JSON object"),
        (HEADER, HEADER[:-1], "cannot be decoded"),
        (HEADER, HEADER + "x", "cannot be decoded"),
        (HEADER, "[" * 100_000, "cannot be decoded"),
        ('"a"', '"\\ud"', "cannot be decoded"),
        ("4]", "1" * 5000 + "]", "cannot be decoded"),
        (METADATA + ",", "", "does not say that elasticlib wrote it"),
        ('"elasticlib":"5"', '"elasticlib":5', "does not say that elasticlib wrote it"),
        (METADATA, '"__metadata__":7', "does not say that elasticlib wrote it"),
        ("[128,132]", "[128,133]", "has 5 bytes"),
        ("[128,132]", "[132,128]", "has -4 bytes"),
        ("[128,132]", "[-4,0]", "has the shape [4] at [-4, 0]"),
        ("[128,132]", "[128,132,140]", "has the shape [4] at [128, 132, 140]"),
        ("[128,132]", '"128"', "has the shape [4] at '128'"),
        ("[128,132]", "[128.0,132]", "has the shape [4] at [128.0, 132]"),
        ("[128,132]", "[129,133]", "'a' begins at 129, and the entry before it ends at 128"),
        ("[4]", "[true,4]", "has the shape [True, 4]"),
        ("[4]", "[1e9]", "has the shape [1000000000.0]"),
        ("[4]", f"[{2**62},{2**62}]", "has 4 bytes"),
        ("[4]", f"[{'1,' * 64}4]", "has the shape [1, 1, 1"),
        ('{"dtype":"U8","shape":[4]', '{"dtype":"U9","shape":[4]', "has the unknown dtype 'U9'"),
        ('{"dtype":"U8","shape":[4]', '{"dtype":[],"shape":[4]', "has the unknown dtype []"),
        ('"data_offsets":[128,132]', '"data_offsets":[128,132],"x":1', "the entry 'a' is {"),
        ('{"dtype":"U8","shape":[4],"data_offsets":[128,132]}', "7", "the entry 'a' is 7"),
        ('"~state"', '"b"', "a pack's first entry is ~state and its last one ~crc"),
        ('"~crc"', '"b"', "a pack's first entry is ~state and its last one ~crc"),
        (f",{ENTRIES}", "", "a pack's first entry is ~state and its last one ~crc"),
        (
            "[128],",
            f"[{2**40}],",
            f"the entry '~state' of [{2**40}] U8 has 128 bytes",
        ),
        ("[132,140]", f"[132,{2**62}]", f"has {2**62 - 132} bytes"),
        (
            '"a":{"dtype":"U8","shape":[4],"data_offsets":[128,132]}',
            '"a":{"dtype":"U8","shape":[4],"data_offsets":[128,132]},'
            '"b":{"dtype":"U8","shape":[0],"data_offsets":[128,128]}',
            "'b' begins at 128, and the entry before it ends at 132",
        ),
        (
            ENTRIES,
            ENTRIES.replace("132", "136").replace("140", "144").replace("[4]", "[8]"),
            "400 b",
        ),
    ],
)
def test_an_invalid_header_with_a_correct_checksum_is_rejected_with_the_reason(
    old: str, new: str, message: str
) -> None:
    header = HEADER.replace(old, new)
    assert header != HEADER
    with pytest.raises(CheckpointCorruptError) as error:
        unpack(create_pack(header))
    assert message in str(error.value)


def test_a_file_whose_values_have_an_impossible_size_is_rejected_without_memory_for_it() -> None:
    sizes = ENTRIES.replace("[128]", f"[{2**40}]").replace("[0,128]", f"[0,{2**40}]")
    sizes = sizes.replace("[128,132]", f"[{2**40},{2**40 + 4}]")
    sizes = sizes.replace("[132,140]", f"[{2**40 + 4},{2**40 + 12}]")
    with pytest.raises(CheckpointCorruptError, match=f"~state has {2**40} bytes, at most"):
        unpack(create_pack(f"{{{METADATA},{sizes}}}"))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("no JSON", "~state cannot be decoded"),
        ("[" * 128, "~state cannot be decoded"),
        ("[]", "~state is not a JSON object"),
        ("", "~state cannot be decoded"),
        (STATE.replace("meta", "mate"), "~state lacks meta, values or tree"),
        (STATE.replace('"values":[]', '"values":7'), "~state lacks meta, values or tree"),
        (STATE.replace('"meta":{}', '"meta":{},"meta":{}'), "the key 'meta' occurs twice"),
        (STATE + "\0", "~state cannot be decoded"),
        (STATE.replace('"values":[]', '"values":[1]'), "there are more values than the tree"),
    ],
)
def test_invalid_values_with_a_correct_checksum_are_rejected_with_the_reason(
    state: str, message: str
) -> None:
    with pytest.raises(CheckpointCorruptError) as error:
        unpack(create_pack(state=state))
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
        {"tree": {"tensor": 9}},
        {"tree": {"tensor": -1}},
        {"tree": {"none": 9}},
        {"tree": {"dict": 9}},
        {"tree": {}},
        {"tree": [{"tensor": 0}, None]},
    ],
)
def test_a_tree_with_indices_outside_the_data_is_rejected(tree: dict[str, Any]) -> None:
    right = {"tree": {"tensor": 0}, "tensors": [0]}
    state = json.dumps({"meta": {}, "values": [], "tree": {**right, **tree}}, separators=(",", ":"))
    with pytest.raises(CheckpointCorruptError):
        unpack(create_pack(state=state))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (create_pack(length=2**63), "at most 100000000"),
        (create_pack(length=100_000_056), "and this one has 100000064"),
        (create_pack(length=63), "and this one has 71"),
        (create_pack() + b"x", "it must have 396 bytes, but has 397"),
        (b"1234567", "a pack has at least 8 bytes, got 7"),
        (struct.pack("<Q", 56) + b'{"a":{}}'.ljust(56), "does not say that elasticlib wrote it"),
        (create_pack()[:-1] + b"x", "is not the checksum"),
        (create_pack()[:-8] + bytes(8), "is not the checksum"),
    ],
)
def test_a_file_of_an_impossible_size_or_without_its_checksum_is_rejected(
    data: bytes, message: str
) -> None:
    with pytest.raises(CheckpointCorruptError) as error:
        unpack(data)
    assert message in str(error.value)


def test_headers_are_read_without_torch() -> None:
    program = (
        "import sys, elasticlib.checkpoint.safetensors_header; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=100).returncode == 0
