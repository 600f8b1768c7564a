"""What a worker that fails says of it before it has ended, as its agent finds it.

Its error.json, or, where it leaves by an exit code alone, a file beside that; the agent takes it
away. Taking a process down takes its time, in which its peers notice and may end first.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import attrs

from ..foreign import opened
from .error_file import LONGEST_RECORD, ends_process
from .hooks import EXIT

NEVER = float("inf")
LONGEST_CODE = 8


@attrs.frozen
class LastWord:
    """data: of its error.json. at: when it first said that it fails, by the file's clock. code: by
    which it is about to exit, 0 where it has not said."""

    data: bytes = b""
    at: float = NEVER
    code: int = 0

    @property
    def ends_process(self) -> bool:
        """Whether its process ends of what it said."""
        return self.code != 0 or ends_process(self.data)


def read_last_word(error_file: Path) -> LastWord:
    """Of the worker with this error file; nothing where it has said nothing."""
    data, wrote_at = _read(error_file, LONGEST_RECORD)
    code, left_at = _read(_exit_of(error_file), LONGEST_CODE)
    return LastWord(data, min(wrote_at, left_at), int(code) if code.isdigit() else 0)


def forget_exit(error_file: Path) -> None:
    """It has ended, and how is known by now."""
    with contextlib.suppress(OSError):  # it left none, or something that is none
        _exit_of(error_file).unlink()


def _exit_of(error_file: Path) -> Path:
    return error_file.with_name(error_file.name + EXIT)


def _read(path: Path, most: int) -> tuple[bytes, float]:
    try:
        with opened(path) as handle:
            return os.read(handle, most), os.fstat(handle).st_mtime
    except OSError:
        return b"", NEVER
