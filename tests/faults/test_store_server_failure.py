"""The thread of the store's server fails, because other code has closed its descriptor."""

from __future__ import annotations

import os
import re

import pytest
from jobs import WITHOUT_TORCH, Job
from modules import write_module

pytestmark = pytest.mark.faults

# Replaces the descriptor in which the server waits by one in which nobody can wait.
MODULE = r"""
import os, re, socket

def is_listening(number):
    try:
        with socket.socket(fileno=os.dup(number)) as copy:
            return copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError:
        return False

def break_store(event):
    if event.kind != "worker.started":
        return
    for name in os.listdir("/proc/self/fdinfo"):
        try:
            with open(f"/proc/self/fdinfo/{name}") as file:
                watched = re.findall(r"^tfd: *(\d+)", file.read(), re.MULTILINE)
        except FileNotFoundError:
            continue
        if any(is_listening(int(number)) for number in watched):
            os.dup2(os.open(os.devnull, os.O_RDONLY), int(name))
"""


def test_agent_that_can_no_longer_serve_the_store_fails_at_once_with_the_reason(job: Job) -> None:
    path = write_module(job.folder / "site", "faulty", MODULE)
    endpoint = f"127.0.0.1:{job.reserve_port()}"
    agent = job.start_agent(
        *("a", "--nnodes", "1:2", "--rdzv-endpoint", endpoint, "--on-event", "faulty:break_store"),
        *("--rdzv-conf", "last_call_timeout=0.3"),
        PYTHONPATH=os.pathsep.join([str(path), WITHOUT_TORCH]),
    )
    assert agent.exit_code() == 1
    reason = f"the store's server at {endpoint} failed, and its clients are disconnected: OSError"
    assert re.search(f"FAILED.*{re.escape(reason)}", agent.text), agent.text
