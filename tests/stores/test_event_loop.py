"""The event loop, which waiting threads run: conditions, descriptors, timers and signals."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from elasticlib.clock import monotonic
from elasticlib.event_loop import CLOSE_TIMEOUT_S, EventLoop
from elasticlib.testing.waiting import wait_until

TIMEOUT_S = 60.0


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


@pytest.fixture
def pipe(loop: EventLoop) -> Iterator[tuple[int, list[bytes]]]:
    """Create a pipe that the loop reads. Yield its write end and the chunks that were read."""
    reading, writing = os.pipe()
    chunks: list[bytes] = []
    loop.add_reader(reading, lambda: chunks.append(os.read(reading, 100)))
    yield writing, chunks
    loop.remove_reader(reading)
    os.close(reading)
    os.close(writing)


def test_readable_descriptors_and_due_timers_are_handled_while_a_thread_waits(
    loop: EventLoop, pipe: tuple[int, list[bytes]]
) -> None:
    writing, chunks = pipe
    order: list[int] = []
    for number in (2, 1, 3):
        loop.call_at(monotonic() + number / 100, lambda number=number: order.append(number))
    os.write(writing, b"x")
    assert loop.run_until(lambda: len(order) == 3, TIMEOUT_S)
    assert (order, chunks) == ([1, 2, 3], [b"x"])
    assert not loop.run_until(lambda: False, 0.01)


def test_events_are_handled_although_the_condition_holds(
    loop: EventLoop, pipe: tuple[int, list[bytes]]
) -> None:
    writing, chunks = pipe
    os.write(writing, b"x")
    assert loop.run_until(lambda: True, TIMEOUT_S)
    assert chunks == [b"x"]


def test_a_callback_that_fails_prevents_no_other_one(
    loop: EventLoop, pipe: tuple[int, list[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    writing, chunks = pipe
    loop.call_at(monotonic(), lambda: 1 // 0)
    os.write(writing, b"x")
    loop.call_at(monotonic(), lambda: chunks.append(b"y"))
    assert loop.run_until(lambda: len(chunks) == 2, TIMEOUT_S)
    assert "a callback of the event loop failed: integer division" in caplog.text


def test_several_threads_can_wait_and_each_returns_when_its_condition_holds(
    loop: EventLoop, pipe: tuple[int, list[bytes]]
) -> None:
    writing, chunks = pipe
    with ThreadPoolExecutor(4) as pool:
        waiting = [
            pool.submit(loop.run_until, lambda n=n: len(chunks) > n, TIMEOUT_S) for n in range(4)
        ]
        for number in range(4):
            os.write(writing, b"x")
            wait_until("the byte to be read", lambda number=number: len(chunks) == number + 1)
            assert waiting[number].result(TIMEOUT_S)
            assert not any(future.done() for future in waiting[number + 1 :])


def test_another_thread_wakes_the_one_that_waits(loop: EventLoop) -> None:
    inbox: list[int] = []

    def wake() -> None:
        for number in range(1000):
            inbox.append(number)
            loop.wake()

    received: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        posting = pool.submit(wake)
        while len(received) < 1000:
            assert loop.run_until(lambda: inbox, TIMEOUT_S)
            received.append(inbox.pop(0))
        posting.result(TIMEOUT_S)
    assert received == list(range(1000))


def test_a_signal_handler_wakes_the_thread_that_waits(loop: EventLoop) -> None:
    signals: list[int] = []

    def handle(number: int, _: object) -> None:
        signals.append(number)
        loop.wake()

    previous = signal.signal(signal.SIGUSR1, handle)
    try:
        loop.call_at(monotonic(), lambda: os.kill(os.getpid(), signal.SIGUSR1))
        assert loop.run_until(lambda: signals, TIMEOUT_S)
    finally:
        signal.signal(signal.SIGUSR1, previous)


class Interrupted(BaseException):
    pass


def test_a_thread_that_was_interrupted_by_an_exception_can_wait_again(loop: EventLoop) -> None:
    def interrupt(*_: object) -> None:
        raise Interrupted

    previous = signal.signal(signal.SIGUSR1, interrupt)
    try:
        loop.call_at(monotonic(), lambda: os.kill(os.getpid(), signal.SIGUSR1))
        with pytest.raises(Interrupted):
            loop.run_until(lambda: False, TIMEOUT_S)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(loop.run_until, lambda: False, 0.01).result(TIMEOUT_S)
    assert not loop.run_until(lambda: False, 0.01)


def loop_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "event-loop"]


def test_a_loop_has_a_thread_only_until_its_owner_runs_it(
    loop: EventLoop, pipe: tuple[int, list[bytes]]
) -> None:
    writing, chunks = pipe
    loop.start_thread()
    os.write(writing, b"x")
    wait_until("the thread to read", lambda: chunks)
    assert len(loop_threads()) == 1
    loop.adopt()
    loop.start_thread()
    assert not loop_threads()
    os.write(writing, b"y")
    assert loop.run_until(lambda: len(chunks) == 2, TIMEOUT_S)
    loop.release()
    os.write(writing, b"z")
    wait_until("the thread to read again", lambda: len(chunks) == 3)


def test_a_loop_that_another_thread_runs_is_closed_once_that_thread_releases_it(
    loop: EventLoop,
) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    is_over = threading.Event()

    def run() -> None:
        loop.adopt()
        while not is_over.is_set():
            loop.run_until(is_over.is_set, TIMEOUT_S)
        loop.release()

    running = threading.Thread(target=run)
    running.start()
    wait_until("the loop to run", lambda: sorted(os.listdir("/proc/self/fd")) != before)
    started_at = monotonic()
    loop.close()
    assert monotonic() - started_at < CLOSE_TIMEOUT_S, "it waits for no thread that runs the loop"
    is_over.set()
    loop.wake()
    running.join(TIMEOUT_S)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_loop_that_is_closed_has_no_open_descriptor_and_can_be_used_again(
    loop: EventLoop,
) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    loop.start_thread()
    assert not loop.run_until(lambda: False, 0.01)
    loop.close()
    loop.close()
    loop.wake()
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert not loop_threads()
    called: list[int] = []
    loop.call_at(monotonic(), lambda: called.append(1))
    assert loop.run_until(lambda: called, TIMEOUT_S)
