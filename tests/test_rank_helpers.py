"""The ranks of tests return their values, report their failures, and leave no processes."""

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


def describe_surroundings() -> tuple[str, str | None, bool]:
    print("printed", file=sys.stderr)
    return os.getcwd(), os.environ.get("VARIABLE"), dist.is_initialized()


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("not here")


def kill_rank_0() -> int:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return 7


def start_child(folder: Path) -> None:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (folder / "pid").write_text(str(child.pid))


def sleep() -> None:
    time.sleep(600)


def test_ranks_form_a_group_and_return_their_values(ranks: Ranks) -> None:
    assert ranks.run(add, 3, 0.5) == [[3, 4.5]] * 3
    assert ranks.run(add, 1, 2.0) == [[1, 2.0]]


def test_a_rank_has_the_directory_environment_and_streams_of_its_test(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VARIABLE", "yes")
    assert ranks.run(describe_surroundings, 2, backend="") == [(str(tmp_path), "yes", False)] * 2
    assert capfd.readouterr().err == "printed\nprinted\n"


def test_a_failed_rank_is_reported_with_its_traceback_and_a_killed_one_with_its_signal(
    ranks: Ranks,
) -> None:
    with pytest.raises(AssertionError, match=r"rank 1: (.|\n)*ValueError: not here"):
        ranks.run(fail_on_rank_1, 2)
    killed, other = ranks.results(kill_rank_0, 2)
    assert (killed.status, killed.value) == (-signal.SIGKILL, None)
    assert "SIGKILL" in killed.error
    assert (other.status, other.value, other.error) == (0, 7, "")


def test_processes_left_by_a_rank_are_killed_and_a_hung_rank_prints_its_stack(
    ranks: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks.run(start_child, 1, tmp_path)
    assert not is_alive(int((tmp_path / "pid").read_text()))
    [hung] = ranks.results(sleep, 1, seconds=0.5)
    assert hung.error
    assert "in sleep" in capfd.readouterr().err


def start_server() -> Ranks:
    faulthandler.cancel_dump_traceback_later()  # a fork would not have its thread
    return Ranks()


def use_and_close_server() -> tuple[bool, int]:
    server = start_server()
    return server.run(os.getppid, 1, backend="") == [server.pid], server.close()


def kill_client_of_server() -> int:
    server = start_server()
    client = os.fork()
    if not client:
        server.run(sleep, 1)
    wait_until("a rank", lambda: find_children(server.pid))
    os.kill(client, signal.SIGKILL)
    return server.close()


def test_the_server_of_the_ranks_exits_with_its_client(ranks: Ranks) -> None:
    assert ranks.run(use_and_close_server, 1) == [(True, 0)]
    assert ranks.run(kill_client_of_server, 1) == [0]
