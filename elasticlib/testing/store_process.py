"""Clients of a store in processes of their own, for races and for tests that kill a client.

`ClientSpec` describes how a process creates its client. The process does one thing, and exits
when its standard input is closed, so it does not outlive the test.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, cast

import attrs

from ..clock import monotonic
from ..errors import LeaseLostError, StoreConnectionError
from ..stores.interface import ABSENT, Entry, Store

# The child gets the import path of its parent, which contains the modules of the test.
_CHILD_SCRIPT = f"""
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from {__name__} import main
main(*sys.argv[2:])
"""


@attrs.frozen
class ClientSpec:
    """A description of how another process creates a client.

    Attributes:
        target: The class or function, as `module:name`.
        arguments: Its positional arguments, which JSON can encode.
        options: Its keyword arguments, which JSON can encode.
    """

    target: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = attrs.field(factory=dict)

    def build(self) -> Store:
        """Create the client in this process."""
        module, _, name = self.target.partition(":")
        factory = getattr(importlib.import_module(module), name)
        return cast(Store, factory(*self.arguments, **self.options))

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a process with a client that executes a command of `main`."""
        arguments = (json.dumps(sys.path), json.dumps(attrs.asdict(self)))
        return subprocess.Popen(
            [sys.executable, "-c", _CHILD_SCRIPT, *arguments, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


def increment(store: Store, key: str, times: int) -> None:
    """Add one to the number at the key `times` times, while other clients do so too."""
    for _ in range(times):
        entry = store.get(key)
        while True:
            number = int(entry.value) if entry else 0
            version = entry.version if entry else ABSENT
            outcome = store.compare_set(key, b"%d" % (number + 1), expected=version)
            if outcome.succeeded:
                break
            entry = outcome.entry


def refresh_lease(owner: Store, watcher: Store, key: str, ttl: float) -> Entry | None:
    """Write a lease, and refresh it for four times its ttl.

    Returns:
        The lease, or None if it expired because this machine was too busy to refresh it in time.
    """
    refreshed_at = monotonic()
    lease = owner.set(key, b"mine", ttl=ttl)
    for _ in range(16):
        has_expired = watcher.wait(key, after=lease.version, timeout=ttl / 4)
        started_at = monotonic()
        try:
            owner.refresh(key, lease.version)
        except LeaseLostError:
            has_expired = True
        if has_expired:
            assert monotonic() - refreshed_at > 0.7 * ttl, "a lease that was refreshed has changed"
            return None
        refreshed_at = started_at
    return lease


def read_line(process: subprocess.Popen[str]) -> str:
    """Return the next line that the process prints, or "" if it has exited."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def exercise_in_child(store: Store) -> str:
    """Use the copy of a client in a forked child.

    Returns:
        "worked" if each kind of call has worked, "raised" if each has raised
        StoreConnectionError, or a message.
    """
    outcomes = set()
    calls: list[Callable[[], object]] = [
        lambda: store.get("child"),
        lambda: store.list("lease/"),
        lambda: store.wait("never-written", after=0, timeout=0.05),
        lambda: store.refresh("lease/child", store.set("lease/child", b"", ttl=1000.0).version),
        lambda: store.set("child", b""),
        lambda: store.delete("lease/child"),
    ]
    for call in calls:
        try:
            call()
            outcomes.add("worked")
        except StoreConnectionError:
            outcomes.add("raised")
    store.close()
    return outcomes.pop() if len(outcomes) == 1 else "some calls worked, and others did not"


def run_in_child(function: Callable[[], str], timeout_s: float) -> str:
    """Call a function in a forked child, which exits without any cleanup.

    Returns:
        The result of the function, the traceback of its error, or "hung" after `timeout_s` seconds.
    """
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forks of a process with threads
        pid = os.fork()
    if not pid:
        try:
            result = function()
        except BaseException as error:
            result = "".join(traceback.format_exception(error))
        with contextlib.suppress(OSError):
            os.write(write_end, result.encode()[-4000:])
        os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as answer:
        if not select.select([answer], [], [], timeout_s)[0]:
            os.kill(pid, signal.SIGKILL)
        output = answer.read().decode()
    _, status = os.waitpid(pid, 0)
    return output or ("hung" if status == signal.SIGKILL else f"exited with status {status}")


def read_number(store: Store, key: str) -> int:
    """Return the number that `increment` has written, or 0."""
    entry = store.get(key)
    return int(entry.value) if entry else 0


def race(spec: ClientSpec, num_processes: int, key: str, times: int, timeout_s: float) -> None:
    """Let several processes increment the number at the key `times` times at the same time."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(spec.start("increment", key, str(times)))
            for _ in range(num_processes)
        ]
        for process in processes:
            assert read_line(process) == "ready"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            out, _ = process.communicate(timeout=timeout_s)
            assert (out, process.returncode) == ("done\n", 0)


def main(spec: str, command: str, key: str, number: str) -> None:
    """Run `increment KEY TIMES`, or `lease KEY TTL` until the standard input is closed."""
    with ClientSpec(**json.loads(spec)).build() as store:
        store.get(key)
        if command == "increment":
            print("ready", flush=True)
            sys.stdin.readline()
            increment(store, key, int(number))
        else:
            entry = store.set(key, b"lease", ttl=float(number))
            store.refresh(key, entry.version)
        print("done", flush=True)
        sys.stdin.read()
