"""Timers that workers set for themselves: which run out, and who is signalled for it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import alive, until

from elasticlib.clock import wall
from elasticlib.compat.timers import Timers, TimerServer
from elasticlib.errors import ConfigError
from elasticlib.workers.loop import Loop
from elasticlib.workers.session import Guardian


def line(pid: int, scope: str, at: float, number: int = 9) -> bytes:
    said = {"version": 1, "pid": pid, "scope_id": scope, "expiration_time": at, "signal": number}
    return json.dumps(said).encode() + b"\n"


def after(*lines: bytes, wall: float = 1000.0, now: float = 5.0) -> Timers:
    timers = Timers()
    for each in lines:
        timers.take(each, wall=wall, now=now)
    return timers


def test_a_timer_runs_out_on_the_readers_own_clock() -> None:
    timers = after(line(1, "a", 1003.0))
    assert timers.next() == 8.0
    assert timers.expire(7.9) == ()
    (over,) = timers.expire(8.0)
    assert (over.pid, over.scope, over.signal, timers) == (1, "a", 9, Timers())


def test_a_timer_that_is_let_go_of_or_set_anew_does_not_run_out() -> None:
    assert after(line(1, "a", 1003.0), line(1, "a", -1, 0)).next() is None
    assert after(line(1, "a", 1003.0), line(1, "a", 1009.0)).next() == 14.0
    timers = after(line(1, "a", 1003.0))
    timers.forget({1})
    assert timers.next() is None


def test_of_a_worker_the_first_that_signals_counts_and_the_rest_go_with_it() -> None:
    timers = after(
        *(line(1, "c", 1003.0), line(1, "b", 1002.0, 15), line(1, "a", 1001.0, 0)),
        *(line(1, "later", 1500.0), line(2, "a", 1500.0)),
    )
    (over,) = timers.expire(10.0)
    assert (over.scope, over.signal) == ("b", 15)
    assert [timer.pid for timer in timers.values()] == [2]


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[1]", b"\xff", line(1, "x" * 2000, 1003.0), b"1e999"]
)
def test_what_is_no_request_changes_nothing(text: bytes) -> None:
    assert after(text) == Timers()


class Host:
    """What workers are to a server of their timers."""

    def __init__(self) -> None:
        self.loop, self.guardian = Loop(), Guardian()
        self.loop.start()

    def open(self, server: TimerServer, *leaders: int) -> None:
        server.open(self.loop, self.guardian, lambda: leaders)


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.guardian.close()
    host.loop.close(lambda: None)


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"], start_new_session=True)


def test_only_processes_of_the_workers_sessions_are_signalled_and_nothing_is_left(
    tmp_path: Path, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    mine, other = sleeper(), sleeper()
    path = tmp_path / "timers"
    os.mkfifo(path)  # an agent that was killed has left it
    server = TimerServer(str(path))
    try:
        host.open(server, mine.pid)
        assert server.path == str(path)
        with caplog.at_level(logging.WARNING), path.open("wb", buffering=0) as pipe:
            pipe.write(b"nonsense\n" + line(other.pid, "x", 0.0) + line(mine.pid, "step", 0.0)[:9])
            pipe.write(line(mine.pid, "step", 0.0)[9:])
            until("its end", lambda: not alive(mine.pid))
        assert mine.wait() == -signal.SIGKILL
        assert alive(other.pid)
        # It is told once the signal has been sent.
        until("a word of it", lambda: caplog.records)
        assert [record.message for record in caplog.records] == [
            f"pid {mine.pid} is sent signal 9, as it asked to be when its timer 'step' ran out"
        ]
    finally:
        server.close()
        for process in (mine, other):
            process.kill()
            process.wait()
    assert not list(tmp_path.iterdir())


def test_a_pipe_that_a_cleaner_removed_is_made_anew_for_the_next_workers(
    host: Host,
) -> None:
    mine = sleeper()
    server = TimerServer("")
    try:
        host.open(server, mine.pid)
        host.open(server, mine.pid)
        first = server.path
        shutil.rmtree(Path(first).parent)
        host.open(server, mine.pid)
        assert server.path != first
        with open(server.path, "wb", buffering=0) as pipe:
            pipe.write(b'{"pid": ' + b"[" * 60_000 + b"\n" + line(mine.pid, "step", 0.0))
            until("its end", lambda: not alive(mine.pid))
    finally:
        server.close()
        mine.kill()
        mine.wait()


def test_no_timer_of_one_worker_costs_another_its_own(host: Host) -> None:
    mine, other = sleeper(), sleeper()
    server = TimerServer("")
    try:
        host.open(server, mine.pid, other.pid)
        with open(server.path, "wb", buffering=0) as pipe:
            pipe.write(line(2**70, "none", 0.0) + line(mine.pid, "odd", 0.0, 2**40))
            for far in (float("inf"), wall() + 30 * 86400):
                pipe.write(line(os.getpid(), "far", far))
                wait_until_read(pipe.fileno())
            # It has waited for the far one by now.
            pipe.write(line(os.getpid(), "near", wall() + 60.0))
            wait_until_read(pipe.fileno())
            pipe.write(line(other.pid, "step", 0.0))
            until("its end", lambda: not alive(other.pid))
        assert alive(mine.pid)
    finally:
        server.close()
        for process in (mine, other):
            process.kill()
            process.wait()


def wait_until_read(pipe: int) -> None:
    def left() -> int:
        return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4), "little")

    until("the lines to be read", lambda: left() == 0)


def test_a_pipe_that_another_listens_to_is_left_to_it(
    tmp_path: Path, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "timers")
    first, second = (TimerServer(path) for _ in range(2))
    host.open(first)
    with caplog.at_level(logging.WARNING):
        host.open(second)
    assert Path(second.path).is_fifo()
    assert second.path != path
    assert f"TORCHELASTIC_TIMER_FILE={path} is read by another process" in caplog.text
    second.close()
    assert not Path(second.path).parent.exists()
    assert Path(path).is_fifo()
    first.close()


def test_a_file_that_mktemp_has_made_is_nobodys(tmp_path: Path, host: Host) -> None:
    path = tmp_path / "timers"
    path.touch()
    server = TimerServer(str(path))
    host.open(server)
    assert (server.path, path.is_fifo()) == (str(path), True)
    server.close()


def test_a_pipe_that_cannot_be_is_refused(host: Host) -> None:
    with pytest.raises(ConfigError, match="TORCHELASTIC_TIMER_FILE=/no/where/t: no pipe can be"):
        host.open(TimerServer("/no/where/t"))
