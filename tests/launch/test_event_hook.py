"""A function of the user that the agent calls with each event: `on_event` and `--on-event`."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import WITHOUT_TORCH, Job
from modules import write_module

from elasticlib import (
    Event,
    LaunchOptions,
    ObserveOptions,
    RendezvousOptions,
    WorkerOptions,
    elastic_launch,
)
from elasticlib.errors import ConfigError
from elasticlib.launch.arguments import parse_options
from elasticlib.observe.event import decode, encode

pytestmark = pytest.mark.faults

# Appends each event to a file, and then changes it and fails for each start of a worker.
MODULE = """
import os

def forward(event):
    with open(os.environ["FORWARD_TO"], "ab") as file:
        file.write(event.to_json().encode() + b"\\n")
    event.data.clear()
    if event.kind == "worker.started":
        raise RuntimeError("no such chart")
"""


def run_id() -> str:
    return os.environ["TORCHELASTIC_RUN_ID"]


def test_function_gets_every_event_of_a_job_and_its_errors_do_not_stop_the_job(job: Job) -> None:
    path = write_module(job.folder / "site", "charts", MODULE)
    received = job.folder / "received.jsonl"
    flags = ("--standalone", "--max-restarts", "1", "--on-event", "charts:forward")
    agent = job.start(
        *("a", *job.agent_command(*flags)),
        PYTHONPATH=os.pathsep.join([str(path), WITHOUT_TORCH]),
        FORWARD_TO=str(received),
    )
    os.kill(job.wait_for_world(1)[0]["pid"], signal.SIGKILL)
    job.wait_for_world(1, after=1)
    job.finish()
    assert agent.exit_code() == 0
    (recorded,) = job.events()
    assert [decode(line) for line in received.read_bytes().splitlines()] == recorded
    assert {event.kind for event in recorded} >= {"run.started", "worker.exited", "run.finished"}
    label = "the on_event function charts:forward"
    failed = f"{label} failed for an event worker.started: RuntimeError: no such chart; it is "
    assert agent.text.count(failed) == 1
    assert f"{label} failed for 2 events in total" in agent.text
    assert 'raise RuntimeError("no such chart")' in agent.text


def hooked(on_event: Callable[[Event], object], run_id: str = "none") -> LaunchOptions:
    return LaunchOptions(
        rendezvous=RendezvousOptions(run_id=run_id),
        workers=WorkerOptions(start_method="spawn"),
        observe=ObserveOptions(on_event=on_event),
    )


def test_function_that_never_returns_delays_the_end_of_a_job_for_a_bounded_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    entered, released = threading.Event(), threading.Event()

    def wait(event: Event) -> None:
        del event
        entered.set()
        released.wait(300)

    config = hooked(wait)
    try:
        with caplog.at_level(logging.WARNING, "elasticlib"):
            assert list(elastic_launch(config, run_id)()) == [0]
        assert entered.is_set()
        assert re.search(r"on_event function .*wait did not handle its events", caplog.text)
    finally:
        released.set()


def test_event_is_a_value_with_documented_fields() -> None:
    events: list[Event] = []
    config = hooked(events.append, run_id="values")
    elastic_launch(config, run_id)()
    first, *_, last = events
    assert (first.kind, first.run, first.generation, first.rank) == (
        "run.started",
        "values",
        0,
        None,
    )
    assert (last.kind, last.data["state"], last.data["exit_code"]) == (
        "run.finished",
        "succeeded",
        0,
    )
    assert all(decode(encode(event)).kind == event.kind for event in events)
    times = [event.monotonic for event in events]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "charts",
            r"on_event must be a function or its name, package.module:function, got 'charts'",
        ),
        (7, "on_event must be a function or its name, package.module:function, got 7"),
    ],
)
def test_invalid_function_is_rejected_with_the_config(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ObserveOptions(on_event=name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "no_such_module:f",
            "--on-event must be a function that can be imported (ModuleNotFoundError",
        ),
        ("os:nothing", "--on-event must be a function that can be imported (AttributeError"),
        ("os:sep", "--on-event os:sep must be a function, got '/'"),
    ],
)
def test_function_that_cannot_be_imported_is_an_error_before_anything_starts(
    name: str, message: str, job: Job
) -> None:
    agent = job.start(
        "a", *job.agent_command("--standalone", "--on-event", name), PYTHONPATH=WITHOUT_TORCH
    )
    assert agent.exit_code() == 2
    assert f"elasticrun: error: {message}" in agent.text
    assert not [*job.temporary.glob("*/*/events.jsonl")]
    assert not [*job.folder.glob("report.*")]


def test_command_line_passes_the_name_to_the_config(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    options, _ = parse_options(["--on-event", "charts:forward", str(script)])
    assert options.observe.on_event == "charts:forward"
