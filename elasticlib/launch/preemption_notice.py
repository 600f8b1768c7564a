"""Preemption notices: what they are, and the interface of their sources.

Clouds announce that they take a machine back, two minutes or only half a minute before.
`metadata_services.py` has the sources of AWS, GCP and Azure, and `preemption.py` watches a source.
"""

from __future__ import annotations

import abc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from ..errors import ConfigError, OptionError
from ..options import AgentOptions
from .backends import import_function

FUNCTION_POLL_INTERVAL_S = 1.0  # between two calls of a user's function
FILE_POLL_INTERVAL_S = 0.2
MAX_FILE_BYTES = 4096  # of a notice in a file
NO_REASON = "no reason given"


def _to_reason(value: object) -> str:
    """Return a reason for any value: the notice of a user's function must not be lost for it."""
    try:
        return str(value) if value else NO_REASON
    except Exception:
        return NO_REASON


def _to_seconds_left(value: Any) -> Any:
    """Return 0 for a number below 0, because a deadline that has passed means now."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return 0.0 if is_number and value < 0 else value


@attrs.frozen
class PreemptionNotice:
    """The announcement that this node's machine will be taken away.

    Raises:
        ConfigError: the deadline is not a finite number of seconds.
    """

    #: For people, such as "spot interruption (terminate)". Another value than a text is converted.
    reason: str = attrs.field(converter=_to_reason)
    #: Seconds from now until the machine may be gone, 0 if that time has passed. None: unknown.
    deadline_s: float | None = attrs.field(default=None, converter=_to_seconds_left)

    def __attrs_post_init__(self) -> None:
        seconds = self.deadline_s
        if seconds is None:
            return
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not is_number or not 0 <= seconds <= sys.float_info.max:
            raise ConfigError(
                f"deadline_s of a preemption notice must be a number of seconds, got {seconds!r}"
            )


class NoticeSource(abc.ABC):
    """A source of preemption notices.

    The thread of a watcher calls `poll`. `on_left` is called from the thread that closes the
    watcher, possibly during a call of `poll`.
    """

    name = ""  # for logs, such as "AWS"
    poll_interval = 1.0  # seconds between two polls

    @abc.abstractmethod
    def poll(self) -> PreemptionNotice | None:
        """Return the notice, or None if there is none yet. An exception counts as a failure."""

    def on_left(self) -> None:  # noqa: B027 - optional
        """Report that this node has left the job. Called only if `poll` has returned a notice."""


class FileSource(NoticeSource):
    """A source whose notice is a file, for schedulers, hooks of Kubernetes and tests.

    The file's content is the reason, or JSON with `reason` and `deadline_s`, or nothing.

    Args:
        path: the path that will appear.
    """

    name = "file"
    poll_interval = FILE_POLL_INTERVAL_S

    def __init__(self, path: str) -> None:
        self._path = Path(os.path.expanduser(path))

    def poll(self) -> PreemptionNotice | None:
        try:
            with self._path.open("rb") as file:
                text = file.read(MAX_FILE_BYTES).decode(errors="replace").strip()
        except FileNotFoundError:
            return None
        return read_notice(text) or PreemptionNotice(f"{self._path} exists")


def read_notice(text: str) -> PreemptionNotice | None:
    """Return the notice that the text of a file means, or None for an empty text.

    A text that is no JSON object is the reason. An invalid `deadline_s` is reported in the reason,
    because a machine that is taken away must be left in any case.
    """
    if not text:
        return None
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):  # brackets can be nested too deep
        fields = None
    if not isinstance(fields, dict):
        return PreemptionNotice(" ".join(text.split()))
    reason = fields.get("reason")
    try:
        return PreemptionNotice(reason, fields.get("deadline_s"))
    except ConfigError as error:
        return PreemptionNotice(f"{_to_reason(reason)} ({error})")


class FunctionSource(NoticeSource):
    """A function of the user, called once a second.

    Args:
        name: `package.module:function`. The function takes no argument and returns a
            `PreemptionNotice`, or a text as its reason; or None while there is no notice.

    Raises:
        ConfigError: the name cannot be imported, or does not name a function.
    """

    poll_interval = FUNCTION_POLL_INTERVAL_S

    def __init__(self, name: str) -> None:
        self.name = name
        self._function: Callable[[], Any] = import_function(name, AgentOptions, "preemption_notice")
        if not callable(self._function):
            rule = f"must name a function, and {name} is none"
            raise OptionError(AgentOptions, "preemption_notice", rule, self._function)

    def poll(self) -> PreemptionNotice | None:
        notice = self._function()
        if notice is None or isinstance(notice, PreemptionNotice):
            return notice
        if isinstance(notice, str):
            return read_notice(notice)
        raise TypeError(
            f"{self.name} must return a PreemptionNotice, a text or None, got {notice!r}"
        )
