"""Plays a mutant: its tests, in a child of this warm process, on a copy of the checkout.

The mutant lies on the disk, as tests start processes. This process has imported what takes long and
is not elasticlib; so each child begins at once, and imports elasticlib as it is then.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest
from mutations import Mutant

TAG = "MUTANTS_TAG"
PROBE = Path(__file__).with_name("probe")


@dataclass(frozen=True)
class Outcome:
    """state: survived, killed or timeout. test, why: the first that failed, and with what."""

    state: str
    test: str = ""
    why: str = ""
    seconds: float = 0.0


class Narrator:
    """A plugin of the child: orders its tests, and writes down which runs and which fails."""

    def __init__(self, order: list[str], path: Path) -> None:
        self._place = {test: place for place, test in enumerate(order)}
        self._path = path

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self._place.get(item.nodeid, len(self._place)))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._say(f"runs\t{nodeid}\t")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = str(crash.message if crash else report.longrepr).splitlines() or [""]
            self._say(f"failed\t{report.nodeid}\t{why[0][:200]}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            why = str(report.longrepr).splitlines() or [""]
            self._say(f"failed\t{report.nodeid}\t{why[-1][:200]}")

    def _say(self, line: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{line}\n")


class Player:
    """Plays on one copy, which is nobody else's."""

    def __init__(self, copy: Path, logs: Path) -> None:
        self._copy = copy
        self._logs = logs
        self._logs.mkdir(parents=True, exist_ok=True)
        self._written = 2_000_000_000

    def play(self, mutant: Mutant, tests: list[str], *, limit: float, test_limit: float) -> Outcome:
        path = self._copy / "elasticlib" / mutant.file
        source = path.read_text()
        self._write(path, mutant.applied(source))
        try:
            return self.run(tests, limit=limit, test_limit=test_limit)
        finally:
            self._write(path, source)

    def run(self, tests: list[str], *, limit: float, test_limit: float) -> Outcome:
        """The first failure of these tests, in this order, on the copy as it is."""
        told, tag, began = self._logs / "told", uuid.uuid4().hex, time.monotonic()
        told.write_text("")
        child = os.fork()
        if not child:
            self._in_child(tests, told, tag, test_limit)
        code = _wait(child, limit)
        _end(tag)
        runs, fails = ("", ""), ("", "")
        for line in told.read_text().splitlines():
            what, test, why = line.split("\t", 2)
            if what == "runs":
                runs = (test, "")
            elif not fails[0]:
                fails = (test, why)
        seconds = time.monotonic() - began
        if code == 0:
            return Outcome("survived", seconds=seconds)
        if fails[0]:
            return Outcome("killed", *fails, seconds)
        if code is None or runs[0]:
            return Outcome("timeout", *runs, seconds)
        log = (self._logs / "log").read_text(errors="replace").splitlines()
        return Outcome("killed", "collection", log[-1][:200] if log else "", seconds)

    def _write(self, path: Path, source: str) -> None:
        # A time of its own, as what is compiled is looked up by time and size.
        path.write_text(source)
        self._written += 1
        os.utime(path, (self._written, self._written))

    def _in_child(self, tests: list[str], told: Path, tag: str, test_limit: float) -> None:
        code = 99
        try:
            os.setsid()
            log = os.open(self._logs / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(self._copy)
            sys.path.insert(0, str(self._copy))
            os.environ |= {TAG: tag, "PYTHONPATH": str(self._copy)}
            options = ["-x", "-q", "-p", "no:cacheprovider", f"--timeout={test_limit:g}"]
            options += ["--hypothesis-seed=0", f"--rootdir={self._copy}", "-n0"]
            options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
            code = pytest.main([*options, *tests], plugins=[Narrator(tests, told)])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def warm_up(copy: Path, tests: list[str], into: Path) -> set[str]:
    """Import into this process what these files of tests import, but for the checkout's own
    modules; returns the tests in them."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(PROBE), str(copy)]),
        "MUTANTS_COLLECTED": str(into),
    }
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "mutants_collected"]
    command += ["-p", "no:cacheprovider", *tests]
    subprocess.run(command, cwd=copy, env=environment, check=True, stdout=subprocess.DEVNULL)
    collected = json.loads(into.read_text())
    for name in collected["modules"]:
        if name.startswith("torch.distributed."):
            continue  # it imports the handlers of whatever is installed, and so elasticlib
        with contextlib.suppress(Exception):  # what cannot be imported so is imported by each child
            importlib.import_module(name)
    if loaded := [name for name in sys.modules if name.split(".")[0] == "elasticlib"]:
        raise SystemExit(f"elasticlib is imported already: {loaded[0]}")
    return set(collected["tests"])


def _wait(child: int, limit: float) -> int | None:
    """Its exit code, or None if it had to be killed."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _end(tag: str) -> None:
    """All that a mutant's tests left running."""
    mark = f"{TAG}={tag}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)
