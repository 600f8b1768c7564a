"""Measures which modules a forked worker imports before its first step, and how long each takes.

The exit summary suggests them for --preload. An import is timed from the search for the module
until the interpreter drops the lock of that import, so how modules are found and loaded is not
changed. Imports within an import belong to the outer one and cost a comparison each.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from ..clock import monotonic

MIN_SECONDS = 0.1  # shorter imports are not reported
MAX_MEASURED_S = 600.0  # after the fork; a program that reports no step is not measured for longer
# The fork server has imported most of torch and elasticlib, and imports more before later workers.
NOT_SUGGESTED = ("torch", *sys.stdlib_module_names)
GPU_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


def open_gpu() -> str:
    """Return the path of a GPU that this process has open, or an empty text."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{name}")
            if path.startswith(GPU_FILES):
                return path
    return ""


class ImportTimer:
    """A finder in `sys.meta_path` that finds nothing, and notes when the main thread imports."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._created_at = monotonic()
        # The import that is measured now: its lock, module, start, and the threads before it.
        self._lock: weakref.ref[Any] | None = None
        self._module, self._started_at, self._num_threads = "", 0.0, 0
        self._seconds: dict[str, float] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> None:
        """Note the begin of an import. An error here never reaches the program."""
        del path, target
        if self._lock is None and threading.get_ident() == self._thread:
            with contextlib.suppress(Exception):
                self._begin(name)

    def _begin(self, name: str) -> None:
        now = monotonic()
        if now > self._created_at + MAX_MEASURED_S:
            self.stop()
        elif name.split(".")[0] != "elasticlib":  # what it imports of others is measured
            locks = sys.modules["_frozen_importlib"]._module_locks
            lock = locks[name]()  # there is none if a program only searches for the module
            self._module, self._started_at = name, now
            self._num_threads = threading.active_count()
            self._lock = weakref.ref(lock, self._finish)

    def _finish(self, _: object) -> None:
        self._lock = None
        with contextlib.suppress(Exception):
            name, seconds = self._module, monotonic() - self._started_at
            is_slow = seconds >= MIN_SECONDS and name.split(".")[0] not in NOT_SUGGESTED
            can_fork = threading.active_count() <= self._num_threads
            if is_slow and name in sys.modules and can_fork and not open_gpu():
                # The import of a module also imports the packages that contain it.
                for parent in [n for n in self._seconds if name.startswith(f"{n}.")]:
                    seconds += self._seconds.pop(parent)
                self._seconds[name] = seconds

    def stop(self) -> Mapping[str, float]:
        """End the measurement; return the seconds of each module that can be preloaded."""
        # The list is replaced, because another thread may be iterating over it.
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
        return {
            name: seconds
            for name, seconds in self._seconds.items()
            if all(part.isidentifier() for part in name.split("."))
        }


_timer: ImportTimer | None = None  # of this process


def start_import_timer() -> None:
    """Measure the imports of this process from now on."""
    global _timer
    _timer = ImportTimer()
    sys.meta_path.insert(0, _timer)


def take_slow_imports() -> Mapping[str, float]:
    """End the measurement; return the seconds of slow imports by module, and nothing later."""
    global _timer
    timer, _timer = _timer, None
    return {} if timer is None else timer.stop()
