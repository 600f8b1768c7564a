"""One call at a time: another thread sees a running call at any moment, and never ends the process.

Each save is written by one call, so that two threads never write the same one.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

import pytest

from elasticlib.threads import CallRejectedError, SingleCall

LOOKS = 100_000


@contextlib.contextmanager
def generator() -> Iterator[None]:
    yield


@pytest.fixture
def busy_call() -> Iterator[SingleCall]:
    """Yield a `SingleCall` that another thread uses: its stack changes all the time."""
    call, began, end = SingleCall(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        while not end.is_set():
            with generator(), generator():
                pass

    thread = threading.Thread(target=call.run, args=(work,))
    interval = sys.getswitchinterval()
    thread.start()
    try:
        assert began.wait(60)
        sys.setswitchinterval(1e-5)
        yield call
    finally:
        sys.setswitchinterval(interval)
        end.set()
        thread.join(60)
    assert not thread.is_alive()


def test_a_call_in_another_thread_is_seen_at_any_moment(busy_call: SingleCall) -> None:
    assert all(busy_call.is_running for _ in range(LOOKS))


def test_no_second_call_runs_beside_a_call_in_another_thread(busy_call: SingleCall) -> None:
    num_rejected = 0
    for _ in range(LOOKS):
        try:
            busy_call.run(lambda: None)
        except CallRejectedError:
            num_rejected += 1
    assert num_rejected == LOOKS
