"""Ranks of tests: their values come back, their failures are told, and nothing of them is left."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import find_children, is_alive
from ranks import Ranks

from elasticlib.testing.waiting import wait_until


def add(value: float) -> list[float]:
    total = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(total)
    return [dist.get_world_size(), total.item()]


def look_around() -> tuple[str, str | None, bool]:
    print("said", file=sys.stderr)
    return os.getcwd(), os.environ.get("SAID"), dist.is_initialized()


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("not here")


def be_killed_on_one() -> int:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return 7


def leave_a_child(folder: Path) -> None:
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (folder / "pid").write_text(str(left.pid))


def wait_for_ever() -> None:
    time.sleep(600)


def test_ranks_have_a_group_and_their_values_come_back(ranks: Ranks) -> None:
    assert ranks.run(add, 3, 0.5) == [[3, 4.5]] * 3
    assert ranks.run(add, 1, 2.0) == [[1, 2.0]]


def test_a_rank_has_the_surroundings_of_its_test(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAID", "yes")
    assert ranks.run(look_around, 2, backend="") == [(str(tmp_path), "yes", False)] * 2
    assert capfd.readouterr().err == "said\nsaid\n"


def test_a_failing_rank_is_told_with_its_traceback_and_a_killed_one_with_its_signal(
    ranks: Ranks,
) -> None:
    with pytest.raises(AssertionError, match=r"rank 1: (.|\n)*ValueError: not here"):
        ranks.run(fail_on_one, 2)
    killed, other = ranks.results(be_killed_on_one, 2)
    assert (killed.status, killed.value) == (-signal.SIGKILL, None)
    assert "SIGKILL" in killed.error
    assert (other.status, other.value, other.error) == (0, 7, "")


def test_what_a_rank_leaves_is_ended_and_who_does_not_end_shows_where_it_is(
    ranks: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks.run(leave_a_child, 1, tmp_path)
    assert not is_alive(int((tmp_path / "pid").read_text()))
    [stuck] = ranks.results(wait_for_ever, 1, seconds=0.5)
    assert stuck.error
    assert "in wait_for_ever" in capfd.readouterr().err


def another() -> Ranks:
    faulthandler.cancel_dump_traceback_later()  # whose thread no fork would have
    return Ranks()


def use_another_and_close_it() -> tuple[bool, int]:
    warm = another()
    return warm.run(os.getppid, 1, backend="") == [warm.pid], warm.close()


def be_killed_while_asking_another() -> int:
    warm = another()
    asking = os.fork()
    if not asking:
        warm.run(wait_for_ever, 1)
    wait_until("a rank", lambda: find_children(warm.pid))
    os.kill(asking, signal.SIGKILL)
    return warm.close()


def test_the_warm_process_ends_by_itself_with_who_asks(ranks: Ranks) -> None:
    assert ranks.run(use_another_and_close_it, 1) == [(True, 0)]
    assert ranks.run(be_killed_while_asking_another, 1) == [0]
