"""Run one benchmark in its own process, with a time limit, and end the processes that it leaves."""

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
from page import HERE, Benchmark, Section
from results import Results, results_from_json

sys.path.append(str(HERE.parent))
from processes import find_processes

# An interrupted benchmark kills its jobs and removes their files, and the guardian processes of
# killed jobs do the same. Both may take this long.
EXIT_TIMEOUT_S = 20.0
# Benchmarks run on the disk of this checkout. The system's temporary directory may be on another.
BUILD_DIR = HERE.parent.parent / "build"
TAG = "ELASTICLIB_BENCH_TAG"  # marks all processes of one run in their environment


def run_benchmark(
    benchmark: Benchmark, quick: bool = False, *, exit_timeout_s: float = EXIT_TIMEOUT_S
) -> Section:
    """Run a benchmark and return its section of the page.

    A benchmark that fails is a section with an error. No exception of the benchmark is raised.

    Args:
        benchmark: The benchmark to run.
        quick: Use the size that only shows that the benchmark runs.
        exit_timeout_s: Time for the processes that the benchmark leaves to end by themselves.
    """
    started_at, load, results = time.monotonic(), os.getloadavg()[0], Results()
    # Jobs create sockets in this directory, and the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as name:
        error, num_killed = _run_process(benchmark, quick, Path(name), exit_timeout_s)
        if not error:
            results = results_from_json(json.loads((Path(name) / "results").read_text()))
            error = "" if results.rows else "the benchmark measured nothing"
    if num_killed and not error:
        note = f"The benchmark left {num_killed} processes, which were killed."
        results = attrs.evolve(results, notes=(*results.notes, note))
    return Section(
        benchmark.command(quick),
        datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        round(time.monotonic() - started_at, 1),
        round(load, 2),
        describe_machine(),
        results,
        error,
    )


def _run_process(
    benchmark: Benchmark, quick: bool, directory: Path, exit_timeout_s: float
) -> tuple[str, int]:
    """Run the program of a benchmark, which writes `results` into the directory.

    Returns:
        The error, which is empty if the program succeeded, and the number of killed processes.
    """
    program = benchmark.directory / f"{benchmark.name}.py"
    flags = (benchmark.quick if quick else benchmark.flags).split()
    tag, temporary, results = uuid.uuid4().hex, directory / "t", directory / "results"
    temporary.mkdir()
    BUILD_DIR.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=BUILD_DIR) as working_dir:
        process = subprocess.Popen(
            [sys.executable, str(program), *flags, "--json", str(results)],
            cwd=working_dir,
            env={**os.environ, "TMPDIR": str(temporary), TAG: tag},
            start_new_session=True,
        )
        try:
            code = process.wait(benchmark.timeout_s)
            missing = "" if results.exists() else "the benchmark wrote no results"
            error = f"exit code {code}" if code else missing
        except subprocess.TimeoutExpired:
            error = f"not finished within {benchmark.timeout_s:g} s"
        finally:
            if process.poll() is None:  # the benchmark ends its own jobs
                process.send_signal(signal.SIGINT)
            num_killed = kill_tagged(tag, exit_timeout_s)
            process.wait()
    return error, num_killed


def kill_tagged(tag: str, timeout_s: float) -> int:
    """Wait until no process has the tag, and kill those that are left after the timeout.

    Returns:
        The number of killed processes.
    """
    deadline = time.monotonic() + timeout_s
    killed: set[int] = set()
    while pids := find_processes(TAG, tag):
        if time.monotonic() > deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed |= pids
        time.sleep(0.05)
    return len(killed)


def describe_machine() -> Mapping[str, str]:
    """Return the hardware and versions that results depend on, without the name of the machine."""
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    models = [value.strip() for key, _, value in lines if key.startswith("model name")]
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": f"{(models or [platform.machine()])[0]}, {cores} cores",
        "memory": f"{memory:.0f} GiB",
        "kernel": f"Linux {platform.release()}",
        "Python": platform.python_version(),
        "torch": metadata.version("torch"),
        "elasticlib": metadata.version("elasticlib"),
    }
