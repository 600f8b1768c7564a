"""Runs one benchmark in a process of its own, within its time, and ends whatever it leaves."""

from __future__ import annotations

import contextlib
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
import uuid
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import attrs
from figures import Found, from_plain
from page import HERE, Benchmark, Section

sys.path.append(str(HERE.parent))
from processes import marked

ENDS_BY_ITSELF = 20.0
"""Seconds for a program that is interrupted, which kills its jobs and removes their files."""
GUARDIANS = 10.0
"""Seconds for what removes the files of jobs that were killed."""
BUILD = HERE.parent.parent / "build"
"""On the disk of this checkout, which the system's temporary folder need not be on."""
TAG = "ELASTICLIB_BENCH_TAG"


def missing(benchmark: Benchmark) -> list[str]:
    """Modules that it needs, and that are not installed here."""
    return [name for name in benchmark.needs if importlib.util.find_spec(name) is None]


def run(benchmark: Benchmark, quick: bool = False, *, patience: float = GUARDIANS) -> Section:
    """Run it, and say what came of it; it raises nothing that the benchmark does.

    patience: seconds in which the processes that it leaves may end by themselves.
    """
    began, load, tag = time.monotonic(), os.getloadavg()[0], uuid.uuid4().hex
    # Sockets of jobs lie there, whose paths must be short.
    folder, found = Path(tempfile.mkdtemp(prefix="bench-")), Found()
    try:
        error = carried_out(benchmark, quick, folder, tag)
        if not error:
            found = from_plain(json.loads((folder / "found").read_text()))
            error = "" if found.rows else "it has measured nothing"
    finally:
        left = end_all(tag, patience)
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


def carried_out(benchmark: Benchmark, quick: bool, folder: Path, tag: str) -> str:
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
            env={**os.environ, "TMPDIR": str(temporary), TAG: tag},
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


def end_all(tag: str, patience: float) -> int:
    """How many processes with this tag had to be killed, after so many seconds."""
    deadline = time.monotonic() + patience
    killed: set[int] = set()
    while below := marked(TAG, tag):
        if time.monotonic() > deadline:
            for pid in below:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed |= below
        time.sleep(0.05)
    return len(killed)


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
