"""Runs one benchmark in a process of its own, within its time, and ends whatever it leaves."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import attrs
from catalogue import Benchmark
from figures import Found, from_plain
from launched import children
from page import Section

ENDS_BY_ITSELF = 20.0
"""Seconds for a program that is interrupted, which kills its jobs and removes their files."""
GUARDIANS = 10.0
"""Seconds for what removes the files of jobs that were killed."""
BUILD = Path(__file__).resolve().parent.parent.parent / "build"
"""On the disk of this checkout, which the system's temporary folder need not be on."""
SUBREAPER = 36


def adopt_orphans() -> None:
    """Processes whose parent ends become this one's, and are found so, whatever their session."""
    if ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def missing(benchmark: Benchmark) -> list[str]:
    """Modules that it needs, and that are not installed here."""
    return [name for name in benchmark.needs if importlib.util.find_spec(name) is None]


def run(benchmark: Benchmark, quick: bool = False, *, patience: float = GUARDIANS) -> Section:
    """Run it, and say what came of it; it raises nothing that the benchmark does.

    patience: seconds in which what it leaves may end by itself. All processes below this one are
    taken for the benchmark's.
    """
    began, load = time.monotonic(), os.getloadavg()[0]
    # Sockets of jobs lie there, whose paths must be short.
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        error = carried_out(benchmark, quick, folder)
        found = Found(()) if error else from_plain(json.loads((folder / "found").read_text()))
        if not error and not found.rows:
            error = "it has measured nothing"
    finally:
        left = end_all_children(patience)
        shutil.rmtree(folder, ignore_errors=True)
    if left and not error:
        note = f"It left {left} processes behind, which were ended."
        found = attrs.evolve(found, notes=(*found.notes, note))
    return Section(
        benchmark.command(quick),
        datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        round(time.monotonic() - began, 1),
        round(load, 2),
        machine(),
        found,
        error,
    )


def carried_out(benchmark: Benchmark, quick: bool, folder: Path) -> str:
    """Why it has not found what it should; nothing if it has, which then is in the folder."""
    command = [sys.executable, str(benchmark.path), *benchmark.given(quick)]
    temporary = folder / "t"
    temporary.mkdir()
    BUILD.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=BUILD) as here,
        subprocess.Popen(
            [*command, "--json", str(folder / "found")],
            cwd=here,
            env={**os.environ, "TMPDIR": str(temporary)},
            start_new_session=True,
        ) as process,
    ):
        try:
            code = process.wait(benchmark.limit)
        except subprocess.TimeoutExpired:
            return f"not done within {benchmark.limit:g} s"
        finally:
            interrupt(process)
    if code:
        return f"exit code {code}"
    return "" if (folder / "found").exists() else "it has told nothing"


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """So that it ends its jobs itself; SIGKILL if it does not."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDS_BY_ITSELF)
            return
        process.kill()
        process.wait()


def end_all_children(patience: float) -> int:
    """How many processes below this one had to be killed, after so many seconds."""
    deadline = time.monotonic() + patience
    killed: set[int] = set()
    while below := living():
        if time.monotonic() > deadline:
            for pid in below:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed |= below
        time.sleep(0.05)
    return len(killed)


def living() -> set[int]:
    """All below this process that have not ended; those that have are reaped."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    below = [os.getpid()]
    for pid in below:
        below += children(pid)
    return set(below[1:])


def machine() -> Mapping[str, str]:
    """What numbers depend on, and nothing that tells whose machine it is."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": f"{processor()}, {cores} cores",
        "memory": f"{memory:.0f} GiB",
        "kernel": f"Linux {platform.release()}",
        "Python": platform.python_version(),
        "torch": metadata.version("torch"),
        "elasticlib": metadata.version("elasticlib"),
    }


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
