"""What training scripts keep is accepted by save, snapshot and restore alike, without pickle; and
whoever reads it runs nothing."""

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
from managers import memory_of
from sample_states import in_words

from elasticlib import CheckpointManager
from elasticlib.checkpoint.restore import restore_from
from elasticlib.errors import CheckpointError, CheckpointUnreadableError, StateMismatchError


class Level(enum.IntEnum):
    LOW = 1


Pair = namedtuple("Pair", "a b")


def generator() -> numpy.random.Generator:
    made = numpy.random.default_rng(5)
    made.random(3)
    return made


def of_numpy() -> dict[str, Any]:
    older = sample_states.of_numpy()
    return {
        "arrays": [*older[:6], numpy.arange(10)[::3], numpy.array(True)],
        "numbers": [
            *(*older[6:], numpy.float32("inf"), numpy.int8(-3), numpy.complex128(1 + 2j)),
            *(numpy.datetime64("2026-11-22"), numpy.str_("é"), numpy.bytes_(b"b")),
            numpy.float16(0.5),
        ],
    }


def kept() -> dict[str, Any]:
    """A state of all that is accepted."""
    return {
        **of_numpy(),
        "random": [
            random.Random(3).getstate(),
            numpy.random.RandomState(3).get_state(),
            generator().bit_generator.state,
            numpy.random.MT19937(3).state,
            numpy.random.Philox(3).state,
            numpy.random.SFC64(3).state,
            torch.Generator().manual_seed(3).get_state(),
        ],
        "defaults": [
            defaultdict(int, a=1),
            defaultdict(list, {(1, "x"): [torch.ones(1)], None: []}),
            defaultdict(None, a=2),
        ],
        "tuples": [(0.5, torch.ones(2)), (1, [2])],
        "torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1)],
        "keys": {(1, "x"): 2, None: 3, 1.5: 4, frozenset({1}): 5, b"b": 6},
        "sets": [{1, "a"}, frozenset({(1, 2), "b"}), set()],
        "plain": [
            bytearray(b"ab"),
            b"",
            1 << 20_000,
            -(1 << 9000),
            1e308,
            "\udc80",
        ],
        "floats": [float("inf"), -float("inf"), -0.0, complex(-0.0, float("inf"))],
        "more": [OrderedDict(b=1, a=2), Counter("aab"), (), [[]]],
    }


def contiguous(state: dict[str, Any]) -> dict[str, Any]:
    """As it comes back: an array with gaps comes back without them."""
    state["arrays"] = [numpy.array(array, order="K") for array in state["arrays"]]
    return state


def test_what_is_saved_comes_back_from_a_folder_and_from_memory(tmp_path: Path) -> None:
    want = in_words(contiguous(kept()))
    with CheckpointManager(tmp_path / "folder") as manager:
        manager.save(1, kept())
        manager.wait()
        assert in_words(manager.load()) == want
    memory = memory_of(tmp_path / "memory")
    memory.snapshot(1, kept())
    for restore in (manager_of(tmp_path / "folder").restore, lambda s: restore_from([memory], s)):
        empty: dict[str, Any] = dict.fromkeys(kept())
        restore(empty)
        assert in_words(empty) == want
        # Into what a script has made anew, as it does before it restores.
        fresh = kept()
        fresh["arrays"][0][:] = 7
        fresh["defaults"][0]["b"] = 5
        fresh["tuples"][0][1].zero_()
        array, weights = fresh["arrays"][0], fresh["tuples"][0][1]
        restore(fresh)
        assert in_words(contiguous(fresh)) == want
        assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert weights is fresh["tuples"][0][1]
    memory.close()


def manager_of(folder: Path) -> CheckpointManager:
    return CheckpointManager(folder)


def test_random_states_that_come_back_go_on_as_they_would_have(tmp_path: Path) -> None:
    python, legacy, new = random.Random(1), numpy.random.RandomState(1), generator()
    state = {
        "python": python.getstate(),
        "legacy": legacy.get_state(),
        "new": new.bit_generator.state,
        "torch": torch.get_rng_state(),
    }
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
    want = python.random(), legacy.rand(), new.random(), torch.rand(3).tolist()
    found = CheckpointManager(tmp_path).load()
    python.setstate(found["python"])
    legacy.set_state(found["legacy"])
    new.bit_generator.state = found["new"]
    torch.set_rng_state(found["torch"])
    assert (python.random(), legacy.rand(), new.random(), torch.rand(3).tolist()) == want


class OnlyGives:
    def state_dict(self) -> dict[str, int]:
        return {"a": 1}


class Both(OnlyGives):
    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (OnlyGives(), "has a state_dict and no load_state_dict"),
        (numpy.array([object()]), "is a numpy.ndarray of object"),
        (numpy.zeros(1, [("a", "i4")]), "is a numpy.ndarray of [('a', '<i4')]"),
        (numpy.ma.array([1]), "is a numpy.ma.MaskedArray"),
        (defaultdict(lambda: 1), "and a checkpoint holds those of None, int"),
        (
            defaultdict(tuple),
            "is a defaultdict of <class 'tuple'>, and a checkpoint holds those of",
        ),
        (Level.LOW, "Level, which a checkpoint does not hold"),
        (Pair(1, 2), "Pair, which a checkpoint does not hold"),
        (deque([1]), "is a collections.deque, which a checkpoint does not hold"),
        (range(3), "is a range, which a checkpoint does not hold"),
        (numpy.random.PCG64(), "is a numpy.random._pcg64.PCG64"),
        (object(), "is an object"),
    ],
)
def test_what_one_of_them_refuses_all_refuse_with_its_place(
    tmp_path: Path, part: object, said: str
) -> None:
    state = {"a": [part]}
    memory = memory_of(tmp_path / "memory")
    with CheckpointManager(tmp_path / "folder") as manager:
        for keep in (manager.save, lambda step, s: memory.snapshot(step, s)):
            with pytest.raises(CheckpointError) as refused:
                keep(1, state)
            assert said.replace("numpy.ma.", "") in str(refused.value).replace("numpy.ma.", "")
            assert "state['a'][0] " in str(refused.value)
        manager.save(1, {"a": [1]})
        manager.wait()
        with pytest.raises(StateMismatchError, match=r"state\['a'\]\[0\] is a"):
            manager.restore(state)
    memory.close()


@pytest.mark.parametrize(
    ("old", "saved", "said"),
    [
        (numpy.zeros(2), numpy.zeros(3), "is a NumPy array of (2,) float64, and a NumPy array of"),
        (numpy.zeros(2), torch.zeros(2), "is a NumPy array of (2,) float64, and a Tensor was"),
        ([1, 2], (1, 2), "is a list, and a tuple was saved"),
        (torch.zeros(1).expand(3), torch.arange(3.0), "that is expanded, and what was saved is"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_changed(
    tmp_path: Path, old: Any, saved: object, said: str
) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": 1, "b": saved})
        manager.wait()
        state = {"a": 0, "b": old}
        with pytest.raises(StateMismatchError) as refused:
            manager.restore(state)
    assert said in str(refused.value)
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


def test_without_numpy_all_works_but_what_is_numpys(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": numpy.ones(2)})
    program = NO_NUMPY.format(folder=str(tmp_path))
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        check=True,
        timeout=100,
        stdout=subprocess.PIPE,
        text=True,
    )
    first, last = ended.stdout.splitlines()
    assert first.startswith("CheckpointUnreadableError the state holds NumPy arrays or numbers, ")
    assert first.endswith("pip install numpy")
    assert last == "2 [1, {2}, torch.float16]"


def test_tensors_go_where_map_location_says(tmp_path: Path) -> None:
    t = torch.arange(4.0)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"t": t, "half": t[2:], "gaps": t[::2], "n": numpy.ones(2)})
        manager.wait()
        functions: tuple[Any, ...] = (lambda s, _: s, lambda *_: None)
        for here in (None, "cpu", torch.device("cpu"), {"cuda:0": "cpu"}, *functions):
            found = manager.load(map_location=here)
            assert found["t"].tolist() == t.tolist()
            assert found["gaps"].stride() == (1,)
        asked = []

        def away(storage: torch.UntypedStorage, location: str) -> Any:
            asked.append((storage.nbytes(), location))
            return torch.UntypedStorage(storage.nbytes(), device="meta")

        found = manager.load(map_location=away)
        assert {found[name].device.type for name in ("t", "half", "gaps")} == {"meta"}
        for there in ("meta", torch.device("meta"), {"cpu": "meta"}):
            found = manager.load(map_location=there)
            assert {found[name].device.type for name in ("t", "half", "gaps")} == {"meta"}
            assert found["n"].tolist() == [1, 1]
        assert asked == [(16, "cpu"), (8, "cpu"), (8, "cpu")]

        def fail(*_: object) -> Any:
            raise RuntimeError("no such device")

        # Nothing was wrong with what was saved.
        with pytest.raises(RuntimeError, match="no such device"):
            manager.load(map_location=fail)
        assert manager.load()["n"].tolist() == [1, 1]


@pytest.mark.parametrize("other", [3, 5])
def test_another_pack_format_is_no_reason_to_take_an_sample_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: int
) -> None:
    from elasticlib.checkpoint import safetensors_header

    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": 1})
        manager.wait()
        with monkeypatch.context() as changed:
            changed.setattr(safetensors_header, "FORMAT", other)
            manager.save(2, {"a": 2})
            manager.wait()
        for read in (manager.load, lambda: manager.restore({"a": 0})):
            with pytest.raises(CheckpointError, match=f"format {other}, this version reads 4"):
                read()
    assert issubclass(CheckpointUnreadableError, CheckpointError)
