"""Stacks of workers that are busy, and of workers that cannot write their stacks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

from elasticlib.workers import stack_dump
from elasticlib.workers.stack_dump import TRUNCATION_MARK
from elasticlib.workers.worker_channel import CHANNEL_ENV, WorkerChannel

INSTALL = "from elasticlib.workers import stack_dump; stack_dump.install_dump_handler()"
TIMEOUT_S = 10.0


class Worker:
    """A process that handles the signal for stacks, and then runs some code."""

    def __init__(self, code: str) -> None:
        self.channel = WorkerChannel.create()
        program = f"import os, signal\n{INSTALL}\n{textwrap.dedent(code)}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, CHANNEL_ENV: self.channel.path},
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def wait_until_ready(self) -> Worker:
        """Wait until the code has printed a line."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline()
        return self

    def dump(self, seconds: float = TIMEOUT_S) -> str:
        pid, handle = self.channel.stack_dumper
        stacks = stack_dump.collect_stacks({0: (self.process.pid, pid, handle)}, seconds)
        self.size = 0
        with contextlib.suppress(OSError):  # the worker has closed the file
            self.size = os.stat(f"/proc/{pid}/fd/{handle}").st_size
        return stacks.get(0, "")

    def dump_until(self, matches: Callable[[str], object], seconds: float = 0.5) -> str:
        """Return the first matching stack; a busy worker may need several requests."""
        return next(text for _ in range(40) if matches(text := self.dump(seconds)))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.channel.close()


@pytest.fixture
def start_worker() -> Iterator[Callable[[str], Worker]]:
    """A function that starts a worker and waits until it is ready."""
    with contextlib.ExitStack() as workers:

        def start(code: str) -> Worker:
            worker = workers.enter_context(contextlib.closing(Worker(code)))
            return worker.wait_until_ready()

        yield start


BUSY_THREADS = """
import json, queue, threading
q = queue.Queue(4)
def load(i):
    return json.loads(json.dumps({"a": list(range(50)), "b": {str(k): k for k in range(i % 30)}}))
def prefetch():
    i = 0
    while True:
        i += 1
        q.put(load(i))
threading.Thread(target=prefetch, daemon=True).start()
def train():
    while True:
        sum(len(v) for v in q.get().values())
while q.empty():
    pass
print("up", flush=True)
train()
"""


def test_process_with_busy_threads_survives_many_requests(
    start_worker: Callable[[str], Worker],
) -> None:
    worker = start_worker(BUSY_THREADS)
    worker.dump_until(lambda text: " in train\n" in text, TIMEOUT_S)
    for _ in range(30):
        text = worker.dump()
        assert text.startswith("Stack (most recent call first):\n")
        assert re.search(r" in train\n.* in <module>\n$", text), text
        assert worker.size == len(text)  # the file does not contain earlier stacks
    assert worker.process.poll() is None


@pytest.mark.parametrize("call", ["sum(range(10**12))", "time.sleep(600)"])
def test_worker_in_a_long_call_outside_python_shows_its_main_thread(
    start_worker: Callable[[str], Worker], call: str
) -> None:
    code = f"import time\ndef long():\n    print('up', flush=True)\n    {call}\nlong()"
    worker = start_worker(code)
    assert worker.dump_until(lambda text: " in long\n" in text and TRUNCATION_MARK not in text)


@pytest.mark.parametrize(
    ("code", "pattern"),
    [
        ("os.closerange(3, 4096)", r"process \d+ has closed file 200, which elasticlib opened"),
        (
            "import faulthandler; faulthandler.unregister(stack_dump.DUMP_SIGNAL)",
            r"process \d+ has become another program, or no longer handles signal \d+",
        ),
        ("signal.signal(stack_dump.DUMP_SIGNAL, lambda *_: print('handled'))", "^$"),
    ],
)
def test_worker_that_cannot_write_its_stacks_keeps_running(
    start_worker: Callable[[str], Worker], code: str, pattern: str
) -> None:
    wait = "import time\nprint('up', flush=True)\ntime.sleep(60)"
    worker = start_worker(f"{code}\n{wait}")
    worker.dump_until(re.compile(pattern).search)
    assert worker.process.poll() is None


def test_signal_handler_of_the_program_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stack_dump, "_is_registered", False)
    before = signal.signal(stack_dump.DUMP_SIGNAL, signal.SIG_IGN)
    try:
        with contextlib.closing(WorkerChannel.create()) as channel:
            stack_dump.register_dump_handler(channel)
            assert channel.stack_dumper == (0, 0)
    finally:
        signal.signal(stack_dump.DUMP_SIGNAL, before)


def test_stack_that_is_incomplete_at_the_timeout_is_marked_as_truncated(
    start_worker: Callable[[str], Worker],
) -> None:
    worker = start_worker("print('up', flush=True)\nsum(range(10**12))")
    text = worker.dump_until(bool, seconds=stack_dump.QUIET_INTERVAL_S / 2)
    assert text.endswith(stack_dump.TRUNCATION_MARK)
