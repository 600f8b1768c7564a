"""A store's client in a process of its own, to race with others or to be killed.

`ClientRecipe` says how to build the client; the process builds it, does one thing, and ends when
its standard input does, so that it outlives no test.
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

# The child finds modules where we do, also those of the test that describes the client.
_BOOT = f"""
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from {__name__} import main
main(*sys.argv[2:])
"""


@attrs.frozen
class ClientRecipe:
    """How another process builds a client: `module:Class`, and what to call it with.

    Arguments and options are what JSON can carry.
    """

    target: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = attrs.field(factory=dict)

    def build(self) -> Store:
        """The client."""
        module, _, name = self.target.partition(":")
        factory = getattr(importlib.import_module(module), name)
        return cast(Store, factory(*self.arguments, **self.options))

    def start(self, *command: str) -> subprocess.Popen[str]:
        """A process with a client, told what to do; it prints a line when it has."""
        described = (json.dumps(sys.path), json.dumps(attrs.asdict(self)))
        return subprocess.Popen(
            [sys.executable, "-c", _BOOT, *described, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


def increment(store: Store, key: str, times: int) -> None:
    """Add one to the number at the key, `times` times, losing no other client's additions."""
    for _ in range(times):
        entry = store.get(key)
        while True:
            number = int(entry.value) if entry else 0
            version = entry.version if entry else ABSENT
            outcome = store.compare_set(key, b"%d" % (number + 1), expected=version)
            if outcome.succeeded:
                break
            entry = outcome.entry


def kept_lease(owner: Store, watcher: Store, key: str, ttl: float) -> Entry | None:
    """A lease that was refreshed for four times its ttl, in which nothing became of it; None if it
    ended as this machine stood still for so long that nobody could refresh it."""
    spoken = monotonic()
    lease = owner.set(key, b"mine", ttl=ttl)
    for _ in range(16):
        ended = watcher.wait(key, after=lease.version, timeout=ttl / 4)
        speaking = monotonic()
        try:
            owner.refresh(key, lease.version)
        except LeaseLostError:
            ended = True
        if ended:
            assert monotonic() - spoken > 0.7 * ttl, "a lease that was refreshed has changed"
            return None
        spoken = speaking
    return lease


def said(process: subprocess.Popen[str]) -> str:
    """The next line that the process prints; "" if it has ended."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def use_as_child(store: Store) -> str:
    """What became of each kind of call to the copy that a forked child has: "worked" or "refused",
    or what went wrong."""
    outcomes = set()
    calls: list[Callable[[], object]] = [
        lambda: store.get("child"),
        lambda: store.list("lease/"),
        lambda: store.wait("nothing is ever written here", after=0, timeout=0.05),
        lambda: store.refresh("lease/child", store.set("lease/child", b"", ttl=1000.0).version),
        lambda: store.set("child", b""),
        lambda: store.delete("lease/child"),
    ]
    for call in calls:
        try:
            call()
            outcomes.add("worked")
        except StoreConnectionError:
            outcomes.add("refused")
    store.close()
    return outcomes.pop() if len(outcomes) == 1 else "some calls worked, and others did not"


def in_a_child(act: Callable[[], str], patience: float) -> str:
    """What `act` returns in a forked child, or the error that it raises there, as text; the child
    ends without ending anything of its parent's. "hung" after `patience` seconds."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks where there are threads
        pid = os.fork()
    if not pid:
        try:
            said = act()
        except BaseException as error:
            said = "".join(traceback.format_exception(error))
        with contextlib.suppress(OSError):
            os.write(writing, said.encode()[-4000:])
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        if not select.select([answer], [], [], patience)[0]:
            os.kill(pid, signal.SIGKILL)
        told = answer.read().decode()
    _, status = os.waitpid(pid, 0)
    return told or ("hung" if status == signal.SIGKILL else f"ended with status {status}")


def number_at(store: Store, key: str) -> int:
    """The number that `increment` counts up; 0 if there is none."""
    entry = store.get(key)
    return int(entry.value) if entry else 0


def race(recipe: ClientRecipe, racers: int, key: str, times: int, patience: float) -> None:
    """Let processes increment the number at the key, `times` times each, all at once."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(recipe.start("increment", key, str(times))) for _ in range(racers)
        ]
        for process in processes:
            assert said(process) == "ready"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            out, _ = process.communicate(timeout=patience)
            assert (out, process.returncode) == ("done\n", 0)


def main(recipe: str, command: str, key: str, number: str) -> None:
    """`increment KEY TIMES`, or `hold KEY TTL`: a lease, until standard input ends."""
    with ClientRecipe(**json.loads(recipe)).build() as store:
        store.get(key)
        if command == "increment":
            print("ready", flush=True)
            sys.stdin.readline()
            increment(store, key, int(number))
        else:
            entry = store.set(key, b"held", ttl=float(number))
            store.refresh(key, entry.version)
        print("done", flush=True)
        sys.stdin.read()
