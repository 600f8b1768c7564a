"""Workers that are asked for their stacks while they are busy, and those that cannot be."""

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

BEGIN = "from elasticlib.workers import stack_dump; stack_dump.install_dump_handler()"
SECONDS = 10.0


class Worker:
    """A process that has said that it writes its stack_dump, and what it goes on to do."""

    def __init__(self, code: str) -> None:
        self.channel = WorkerChannel.create()
        program = f"import os, signal\n{BEGIN}\n{textwrap.dedent(code)}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, CHANNEL_ENV: self.channel.path},
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def ready(self) -> Worker:
        """Once it has written a line."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline()
        return self

    def dump(self, seconds: float = SECONDS) -> str:
        pid, handle = self.channel.stack_dumper
        found = stack_dump.collect_stacks({0: (self.process.pid, pid, handle)}, seconds)
        self.size = 0
        with contextlib.suppress(OSError):  # closed
            self.size = os.stat(f"/proc/{pid}/fd/{handle}").st_size
        return found.get(0, "")

    def answer(self, right: Callable[[str], object], seconds: float = 0.5) -> str:
        """The first right one: it is asked again where it had no time to give it."""
        return next(text for _ in range(40) if right(text := self.dump(seconds)))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.channel.close()


@pytest.fixture
def begun() -> Iterator[list[Worker]]:
    found: list[Worker] = []
    yield found
    for worker in found:
        worker.close()


BUSY = """
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


def test_process_with_busy_threads_survives_many_questions(begun: list[Worker]) -> None:
    begun.append(worker := Worker(BUSY).ready())
    worker.answer(lambda text: " in train\n" in text, SECONDS)
    for _ in range(30):
        text = worker.dump()
        assert text.startswith("Stack (most recent call first):\n")
        assert re.search(r" in train\n.* in <module>\n$", text), text
        assert worker.size == len(text), "nothing of the earlier answers"
    assert worker.process.poll() is None


@pytest.mark.parametrize("call", ["sum(range(10**12))", "time.sleep(600)"])
def test_worker_in_a_long_call_outside_python_shows_its_main_thread(
    begun: list[Worker], call: str
) -> None:
    code = f"import time\ndef long():\n    print('up', flush=True)\n    {call}\nlong()"
    begun.append(worker := Worker(code).ready())
    assert worker.answer(lambda text: " in long\n" in text and TRUNCATION_MARK not in text)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("os.closerange(3, 4096)", r"process \d+ has closed file 200, which elasticlib opened"),
        (
            "import faulthandler; faulthandler.unregister(stack_dump.DUMP_SIGNAL)",
            r"process \d+ has become another program, or no longer handles signal \d+",
        ),
        ("signal.signal(stack_dump.DUMP_SIGNAL, lambda *_: print('mine'))", "^$"),
    ],
)
def test_worker_that_cannot_answer_is_told_as_such_and_goes_on(
    begun: list[Worker], code: str, says: str
) -> None:
    wait = "import time\nprint('up', flush=True)\ntime.sleep(60)"
    begun.append(worker := Worker(f"{code}\n{wait}").ready())
    worker.answer(re.compile(says).search)
    assert worker.process.poll() is None


def test_signal_that_the_program_handles_is_left_to_it(
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


def test_answer_that_is_not_whole_in_time_is_said_to_be_cut(begun: list[Worker]) -> None:
    begun.append(worker := Worker("print('up', flush=True)\nsum(range(10**12))").ready())
    text = worker.answer(bool, seconds=stack_dump.QUIET_INTERVAL_S / 2)
    assert text.endswith(stack_dump.TRUNCATION_MARK)
