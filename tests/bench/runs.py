"""Runs one benchmark in a process of its own, within its time, and ends whatever it leaves."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import attrs
from figures import Found, from_plain
from page import HERE, Benchmark, Section

sys.path.append(str(HERE.parent))
from processes import find_processes

PATIENCE = 20.0
"""Seconds for a program that is interrupted, which kills its jobs and removes their files, and for
the supervisor processes of jobs that were killed."""
BUILD = HERE.parent.parent / "build"
"""On the disk of this checkout, which the system's temporary folder need not be on."""
TAG = "ELASTICLIB_BENCH_TAG"


def run(benchmark: Benchmark, quick: bool = False, *, patience: float = PATIENCE) -> Section:
    """Run it, and say what came of it; it raises nothing that the benchmark does.

    patience: seconds in which the processes that it leaves may end by themselves.
    """
    began, load, found = time.monotonic(), os.getloadavg()[0], Found()
    # Sockets of jobs lie there, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as name:
        error, left = carried_out(benchmark, quick, Path(name), patience)
        if not error:
            found = from_plain(json.loads((Path(name) / "found").read_text()))
            error = "" if found.rows else "it has measured nothing"
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


def carried_out(
    benchmark: Benchmark, quick: bool, folder: Path, patience: float
) -> tuple[str, int]:
    """Why it has not found what it should, nothing if it has, which then is in the folder; and how
    many processes it left, which are ended."""
    program = benchmark.folder / f"{benchmark.name}.py"
    flags = (benchmark.quick if quick else benchmark.flags).split()
    tag, temporary, found = uuid.uuid4().hex, folder / "t", folder / "found"
    temporary.mkdir()
    BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=BUILD) as here:
        process = subprocess.Popen(
            [sys.executable, str(program), *flags, "--json", str(found)],
            cwd=here,
            env={**os.environ, "TMPDIR": str(temporary), TAG: tag},
            start_new_session=True,
        )
        try:
            code = process.wait(benchmark.limit)
            error = f"exit code {code}" if code else "" if found.exists() else "it has told nothing"
        except subprocess.TimeoutExpired:
            error = f"not done within {benchmark.limit:g} s"
        finally:
            if process.poll() is None:  # it ends its jobs itself
                process.send_signal(signal.SIGINT)
            left = end_all(tag, patience)
            process.wait()
    return error, left


def end_all(tag: str, patience: float) -> int:
    """How many processes with this tag had to be killed, after so many seconds."""
    deadline = time.monotonic() + patience
    killed: set[int] = set()
    while below := find_processes(TAG, tag):
        if time.monotonic() > deadline:
            for pid in below:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed |= below
        time.sleep(0.05)
    return len(killed)


def machine() -> Mapping[str, str]:
    """What numbers depend on, and nothing that tells whose machine it is."""
    told = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    names = [value.strip() for key, _, value in told if key.startswith("model name")]
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": f"{(names or [platform.machine()])[0]}, {cores} cores",
        "memory": f"{memory:.0f} GiB",
        "kernel": f"Linux {platform.release()}",
        "Python": platform.python_version(),
        "torch": metadata.version("torch"),
        "elasticlib": metadata.version("elasticlib"),
    }
