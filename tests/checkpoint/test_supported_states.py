"""Save, snapshot and restore support the same values, without pickle."""

from __future__ import annotations

import enum
import random
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy
import pytest
import sample_states
import torch
from managers import open_memory
from sample_states import describe

from elasticlib import CheckpointManager
from elasticlib.checkpoint.restore import restore_from
from elasticlib.errors import CheckpointError, CheckpointUnreadableError, StateMismatchError


class Level(enum.IntEnum):
    LOW = 1


Pair = namedtuple("Pair", "a b")


def create_generator() -> numpy.random.Generator:
    generator = numpy.random.default_rng(5)
    generator.random(3)
    return generator


def create_numpy_values() -> dict[str, Any]:
    older = sample_states.create_numpy_values()
    return {
        "arrays": [*older[:6], numpy.arange(10)[::3], numpy.array(True)],
        "numbers": [
            *(*older[6:], numpy.float32("inf"), numpy.int8(-3), numpy.complex128(1 + 2j)),
            *(numpy.datetime64("2026-11-22"), numpy.str_("é"), numpy.bytes_(b"b")),
            numpy.float16(0.5),
        ],
    }


def create_supported_values() -> dict[str, Any]:
    """Return a state with all supported values."""
    return {
        **create_numpy_values(),
        "random": [
            random.Random(3).getstate(),
            numpy.random.RandomState(3).get_state(),
            create_generator().bit_generator.state,
            numpy.random.MT19937(3).state,
            numpy.random.Philox(3).state,
            numpy.random.SFC64(3).state,
            torch.Generator().manual_seed(3).get_state(),
        ],
        "dicts": [{"a": 1}, {1.5: [torch.ones(1)], None: []}],
        "tuples": [(0.5, torch.ones(2)), (1, [2])],
        "torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1)],
        "keys": {"x": 2, None: 3, 1.5: 4, frozenset({1}): 5, b"b": 6},
        "sets": [{1, "a"}, frozenset({1.5, "b"}), set()],
        "plain": [
            bytearray(b"ab"),
            b"",
            1 << 8191,
            -(1 << 8191),
            1e308,
            "\udc80",
        ],
        "floats": [float("inf"), -float("inf"), -0.0, complex(-0.0, float("inf"))],
        "more": [OrderedDict(b=1, a=2), Counter("aab"), (), [[]]],
    }


def make_contiguous(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state as it is restored: arrays are contiguous."""
    state["arrays"] = [numpy.array(array, order="K") for array in state["arrays"]]
    return state


def test_supported_values_are_restored_from_disk_and_from_memory(tmp_path: Path) -> None:
    expected = describe(make_contiguous(create_supported_values()))
    with CheckpointManager(tmp_path / "folder") as manager:
        manager.save(1, create_supported_values())
        manager.wait()
        assert describe(manager.load()) == expected
    memory = open_memory(tmp_path / "memory")
    memory.snapshot(1, create_supported_values())
    for restore in (
        create_manager_of(tmp_path / "folder").restore,
        lambda s: restore_from([memory], s),
    ):
        empty: dict[str, Any] = dict.fromkeys(create_supported_values())
        restore(empty)
        assert describe(empty) == expected
        # The state can also be restored into new objects, as after a restart of the script.
        fresh = create_supported_values()
        fresh["arrays"][0][:] = 7
        fresh["dicts"][0]["b"] = 5
        fresh["tuples"][0][1].zero_()
        array, weights = fresh["arrays"][0], fresh["tuples"][0][1]
        restore(fresh)
        assert describe(make_contiguous(fresh)) == expected
        assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert weights is fresh["tuples"][0][1]
    memory.close()


def create_manager_of(folder: Path) -> CheckpointManager:
    return CheckpointManager(folder)


def test_restored_random_states_continue_their_sequences(tmp_path: Path) -> None:
    python, legacy, new = random.Random(1), numpy.random.RandomState(1), create_generator()
    state = {
        "python": python.getstate(),
        "legacy": legacy.get_state(),
        "new": new.bit_generator.state,
        "torch": torch.get_rng_state(),
    }
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
    expected = python.random(), legacy.rand(), new.random(), torch.rand(3).tolist()
    loaded = CheckpointManager(tmp_path).load()
    python.setstate(loaded["python"])
    legacy.set_state(loaded["legacy"])
    new.bit_generator.state = loaded["new"]
    torch.set_rng_state(loaded["torch"])
    assert (python.random(), legacy.rand(), new.random(), torch.rand(3).tolist()) == expected


class WithoutLoad:
    def state_dict(self) -> dict[str, int]:
        return {"a": 1}


class WithLoad(WithoutLoad):
    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (WithoutLoad(), "has a state_dict and no load_state_dict"),
        (numpy.array([object()]), "is a numpy.ndarray of object"),
        (numpy.zeros(1, [("a", "i4")]), "is a numpy.ndarray of [('a', '<i4')]"),
        (numpy.ma.array([1]), "is a numpy.ma.MaskedArray"),
        (defaultdict(int), "is a collections.defaultdict, which a checkpoint does not hold: save"),
        (Level.LOW, "Level, which a checkpoint does not hold"),
        (Pair(1, 2), "Pair, which a checkpoint does not hold"),
        (deque([1]), "is a collections.deque, which a checkpoint does not hold"),
        (range(3), "is a range, which a checkpoint does not hold"),
        (numpy.random.PCG64(), "is a numpy.random._pcg64.PCG64"),
        (object(), "is an object"),
    ],
)
def test_an_unsupported_value_is_rejected_by_all_operations_with_its_path(
    tmp_path: Path, part: object, message: str
) -> None:
    state = {"a": [part]}
    memory = open_memory(tmp_path / "memory")
    with CheckpointManager(tmp_path / "folder") as manager:
        for keep in (manager.save, lambda step, s: memory.snapshot(step, s)):
            with pytest.raises(CheckpointError) as error:
                keep(1, state)
            assert message.replace("numpy.ma.", "") in str(error.value).replace("numpy.ma.", "")
            assert "state['a'][0] " in str(error.value)
        manager.save(1, {"a": [1]})
        manager.wait()
        with pytest.raises(StateMismatchError, match=r"state\['a'\]\[0\] is a"):
            manager.restore(state)
    memory.close()


@pytest.mark.parametrize(
    ("live", "saved", "message"),
    [
        (numpy.zeros(2), numpy.zeros(3), "is a NumPy array of (2,) float64, and a NumPy array of"),
        (numpy.zeros(2), torch.zeros(2), "is a NumPy array of (2,) float64, and a Tensor was"),
        ([1, 2], (1, 2), "is a list, and a tuple was saved"),
        (torch.zeros(1).expand(3), torch.arange(3.0), "that is expanded, and what was saved is"),
    ],
)
def test_a_value_of_another_shape_or_type_is_rejected_by_path_and_nothing_is_changed(
    tmp_path: Path, live: Any, saved: object, message: str
) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": 1, "b": saved})
        manager.wait()
        state = {"a": 0, "b": live}
        with pytest.raises(StateMismatchError) as error:
            manager.restore(state)
    assert message in str(error.value)
    assert state["a"] == 0


def test_an_expanded_tensor_is_restored_in_place(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(
            1, {"a": torch.full((2, 3), float("nan")), "b": torch.arange(3.0).expand(2, 3)}
        )
        manager.wait()
        a, b = torch.zeros(1).expand(2, 3), torch.zeros(3).expand(2, 3)
        manager.restore({"a": a, "b": b})
    assert a.isnan().all()
    assert b.tolist() == [[0, 1, 2], [0, 1, 2]]


NO_NUMPY = """
import sys
sys.modules["numpy"] = None
import torch
from elasticlib import CheckpointManager
manager = CheckpointManager({folder!r})
try: manager.load(1)
except Exception as error: print(type(error).__name__, error)
state = {{"w": torch.ones(2).t(), "l": [1, {{2}}, torch.float16]}}
manager.save(2, state)
manager.wait()
print(manager.restore(state).step, manager.load()["l"])
manager.close()
"""


def test_only_states_with_numpy_values_need_numpy(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": numpy.ones(2)})
    program = NO_NUMPY.format(folder=str(tmp_path))
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        check=True,
        timeout=100,
        stdout=subprocess.PIPE,
        text=True,
    )
    first, last = process.stdout.splitlines()
    assert first.startswith("CheckpointUnreadableError the state holds NumPy arrays or numbers, ")
    assert first.endswith("pip install numpy")
    assert last == "2 [1, {2}, torch.float16]"


def test_map_location_chooses_the_device_of_loaded_tensors(tmp_path: Path) -> None:
    t = torch.arange(4.0)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"t": t, "half": t[2:], "gaps": t[::2], "n": numpy.ones(2)})
        manager.wait()
        functions: tuple[Any, ...] = (lambda s, _: s, lambda *_: None)
        for location in (None, "cpu", torch.device("cpu"), {"cuda:0": "cpu"}, *functions):
            loaded = manager.load(map_location=location)
            assert loaded["t"].tolist() == t.tolist()
            assert loaded["gaps"].stride() == (1,)
        calls = []

        def move_to_meta(storage: torch.UntypedStorage, location: str) -> Any:
            calls.append((storage.nbytes(), location))
            return torch.UntypedStorage(storage.nbytes(), device="meta")

        loaded = manager.load(map_location=move_to_meta)
        assert {loaded[name].device.type for name in ("t", "half", "gaps")} == {"meta"}
        for device in ("meta", torch.device("meta"), {"cpu": "meta"}):
            loaded = manager.load(map_location=device)
            assert {loaded[name].device.type for name in ("t", "half", "gaps")} == {"meta"}
            assert loaded["n"].tolist() == [1, 1]
        assert calls == [(16, "cpu"), (8, "cpu"), (8, "cpu")]

        def fail(*_: object) -> Any:
            raise RuntimeError("no such device")

        # The error of the function does not mean that the checkpoint is corrupt.
        with pytest.raises(RuntimeError, match="no such device"):
            manager.load(map_location=fail)
        assert manager.load()["n"].tolist() == [1, 1]


@pytest.mark.parametrize("other", [4, 6])
def test_a_checkpoint_of_another_pack_format_is_not_skipped_for_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: int
) -> None:
    from elasticlib.checkpoint import safetensors_header

    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": 1})
        manager.wait()
        with monkeypatch.context() as changed:
            changed.setattr(safetensors_header, "FORMAT", other)
            manager.save(2, {"a": 2, "b": 1})  # A layout is not used again for another structure.
            manager.wait()
        for read in (manager.load, lambda: manager.restore({"a": 0, "b": 0})):
            with pytest.raises(CheckpointError, match=f"format {other}, this version reads 5"):
                read()
    assert issubclass(CheckpointUnreadableError, CheckpointError)
