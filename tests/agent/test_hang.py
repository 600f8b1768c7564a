"""When silence is a hang, and which rank the others wait for."""

from __future__ import annotations

import json
import queue
import re
from collections.abc import Callable

import attrs
import pytest

from elasticlib.agent.hang import (
    HangLimits,
    Pulse,
    decode_pulses,
    describe_hang,
    encode_pulses,
    longest_silence,
    slowest,
)
from elasticlib.agent.hang_watch import HangWatch
from elasticlib.clock import monotonic
from elasticlib.errors import ConfigError
from elasticlib.rendezvous.document import Node
from elasticlib.rendezvous.interface import BootstrapStoreInfo, RendezvousInfo
from elasticlib.rendezvous.ranks import deal_seats
from elasticlib.workers.exit import WorkerExit
from elasticlib.workers.interface import Workers
from elasticlib.workers.messages import NOTHING, Beat
from elasticlib.workers.spec import Command, WorkerGroup, WorkerSpec, deal_ranks

AUTO = HangLimits()


def beat(at: float, *durations: float, steps: int = 5) -> Beat:
    return Beat(step=4, steps=steps, at=at, alive=at, durations=durations, attached=True)


@pytest.mark.parametrize(
    ("limits", "told", "allowed"),
    [
        (AUTO, Beat(), 900.0),
        # One whose second step is compiled anew, or meets its peers, tells nothing of the third.
        (AUTO, beat(0.0, steps=1), 900.0),
        (AUTO, beat(0.0, 0.1, 0.2, 0.1), 900.0),
        (AUTO, beat(0.0, *[0.1] * 9), 900.0),
        (AUTO, beat(0.0, *[0.1] * 10), 300.0),
        (AUTO, beat(0.0, *[20.0] * 10), 400.0),
        # An evaluation that took 200 s may take as long again, and half as long more.
        (AUTO, beat(0.0, *[1.0] * 10, 200.0), 600.0),
        (HangLimits(seconds=5.0), Beat(), 900.0),
        (HangLimits(seconds=5.0), beat(0.0, 9.0, 9.0), 5.0),
        (HangLimits(seconds=2000.0), Beat(), 2000.0),
    ],
)
def test_how_long_a_worker_may_be_silent(limits: HangLimits, told: Beat, allowed: float) -> None:
    assert limits.of(told) == allowed


def test_the_worker_nearest_to_its_limit_counts() -> None:
    quick, slow = [0.1] * 10, [100.0] * 10
    beats = {0: beat(100.0, *quick), 1: beat(90.0, *slow), 2: Beat(attached=True)}
    found = longest_silence(130.0, 50.0, beats, AUTO)
    assert found is not None
    assert (found.local_rank, found.seconds, found.limit) == (0, 30.0, 300.0)
    assert longest_silence(130.0, 50.0, {}, AUTO) is None
    late = longest_silence(951.0, 50.0, {0: Beat(attached=True)}, AUTO)
    assert late is not None
    assert late.share > 1


def test_who_never_asked_for_its_context_or_leaves_it_to_others_is_not_held_to_it() -> None:
    assert longest_silence(1e6, 0.0, {0: Beat()}, AUTO) is None
    beats = {0: beat(9e5, 0.1), 1: Beat(attached=True)}
    found = longest_silence(9e5 + 1, 0.0, beats, AUTO)
    assert found is not None
    assert (found.local_rank, found.seconds) == (0, 1.0)


def test_who_saves_or_asks_is_alive() -> None:
    saving = attrs.evolve(beat(0.0, 0.1), alive=99.0)
    found = longest_silence(100.0, 0.0, {0: saving}, AUTO)
    assert found is not None
    assert found.seconds == 1.0


def test_who_is_furthest_behind_is_the_slowest_and_of_several_the_first_to_fall_silent() -> None:
    pulses = [Pulse(0, "a", 7, 9.0), Pulse(1, "a", 6, 3.0), Pulse(2, "b", 6, 4.0)]
    assert slowest(pulses) == pulses[2]
    assert slowest([]) is None
    assert describe_hang(pulses, 2.0) == (
        "hung: rank 2 on b is at step 6, silent for 4.0 s; the others are at step 6 to 7; "
        "allowed are 2.0 s (--hang-timeout)"
    )
    assert "has made no step" in describe_hang([Pulse(0, "a", -1, 9.0)], 2.0)


class Beating(Workers):
    """Workers that have told this of themselves."""

    def __init__(self, beats: dict[int, Beat]) -> None:
        self._beats = beats

    def beats(self) -> dict[int, Beat]:
        return self._beats

    def start(self, group: WorkerGroup, ended: Callable[[int], None]) -> None: ...

    def collect(self, local_rank: int) -> WorkerExit:
        raise NotImplementedError

    def running(self) -> dict[int, str]:
        return {}

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


class Watched:
    """Two workers, of which the first tells of a step as this is made and never again."""

    def __init__(self, limit: float) -> None:
        self.paused = 0.0
        self.heard: queue.Queue[str] = queue.Queue()
        now = self.clock()
        self.watch = HangWatch(
            Beating({0: beat(now), 1: Beat(attached=True, alive=now)}),
            HangLimits(seconds=limit),
            "a",
            clock=self.clock,
            hung=lambda _, reason: self.heard.put(reason),
        )
        seat = deal_seats((Node("n", "n", "127.0.0.1", 2),))[0]
        info = RendezvousInfo("run", 1, seat, BootstrapStoreInfo("127.0.0.1", 1))
        spec = WorkerSpec(Command("true"), 2)
        group = WorkerGroup(spec, deal_ranks(seat), "run", 1, 0, 1, "127.0.0.1", 1)
        self.watch.begin(info, group, attempt=1)

    def clock(self) -> float:
        return monotonic() + self.paused


def test_who_leaves_it_to_others_to_tell_of_steps_is_not_blamed_for_a_hang() -> None:
    watched = Watched(limit=1.0)
    assert watched.heard.get(timeout=60).startswith("hung: rank 0 on a is at step 4, silent for")
    watched.watch.end()


def test_what_stood_still_as_a_whole_has_not_been_silent_meanwhile() -> None:
    watched = Watched(limit=1.0)
    watched.paused = 1000.0
    reason = watched.heard.get(timeout=60)
    (seconds,) = re.findall(r"silent for (\d+)\.\d s", reason)
    assert 1 <= int(seconds) < 900
    watched.watch.end()


def test_nor_one_of_another_node_but_one_that_may_stand_in_its_first_step_is() -> None:
    other = Pulse(1, "b", NOTHING, 90.0)
    for steps, rank in ((1, 1), (2, 0)):
        pulses = [Pulse(0, "a", 700, 9.0, steps), *decode_pulses(encode_pulses([other]))]
        last = slowest(pulses)
        assert last is not None
        assert last.rank == rank
        assert f"hung: rank {rank} " in describe_hang(pulses, 2.0)


def test_what_a_node_says_that_does_not_count_its_steps_is_read() -> None:
    said = [{"rank": 0, "host": "a", "step": step, "seconds": 1.0} for step in (7, NOTHING)]
    assert [pulse.steps for pulse in decode_pulses(json.dumps(said).encode())] == [1, 0]


@pytest.mark.parametrize("data", [b"", b"x", b"{}", b"[1]", b'[{"rank": "x"}]', b'[{"rank": 1}]'])
def test_what_cannot_be_read_says_nothing(data: bytes) -> None:
    assert decode_pulses(data) == []
    pulses = [Pulse(0, "a", 7, 9.0)]
    assert decode_pulses(encode_pulses(pulses)) == pulses


@pytest.mark.parametrize("bad", [{"seconds": 0.0}, {"floor": 0.0}, {"times": -1.0}, {"first": 0.0}])
def test_a_limit_that_is_none_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="positive"):
        HangLimits(**bad)
