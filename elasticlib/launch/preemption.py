"""Watches for a preemption notice, so that the node leaves before its machine is taken away.

The launcher turns a notice into a drain with a deadline: the workers save, the node leaves the job,
and the other nodes continue without using a restart.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from ..errors import format_error
from ..sanitize import escape_to_one_line, shorten
from ..threads import daemon_thread, only_logged, start_thread
from .metadata_services import AwsSource, AzureSource, GcpSource, find_service
from .preemption_notice import FileSource, FunctionSource, NoticeSource, PreemptionNotice

log = logging.getLogger("elasticlib.launch")

# Between two polls of a source that fails again and again. A notice may come only 30 s before.
MAX_POLL_INTERVAL_S = 10.0
MAX_REASON_CHARS = 200
FILE_PREFIX = "file:"


class PreemptionWatcher:
    """Polls a source in a thread until it has a notice with a deadline.

    A first notice without a deadline counts as well. One with a deadline may follow, as an
    interruption follows a rebalance recommendation of AWS.

    A source that fails is reported once and then polled more slowly, until it answers again.

    Args:
        source: where notices come from.
        on_notice: receives the first notice, and the first one with a deadline, in the thread.
    """

    def __init__(
        self, source: NoticeSource, on_notice: Callable[[PreemptionNotice], object]
    ) -> None:
        self._source = source
        self._on_notice = on_notice
        self._is_closed = threading.Event()
        self._has_notice = False
        self._thread = daemon_thread(self._run, "preemption-notice", only_logged)

    def start(self) -> None:
        """Start the thread.

        Raises:
            OSError: the thread cannot be started.
        """
        start_thread(self._thread)

    def close(self) -> None:
        """End the watch, after the node has left the job.

        If there was a notice, `on_left` of the source is called here. The thread is not waited for.
        """
        self._is_closed.set()
        if self._has_notice:
            try:
                self._source.on_left()
            except Exception as error:
                log.warning(
                    "cannot tell %s that this node has left the job: %s",
                    *(self._source.name, format_error(error)),
                )

    def _run(self) -> None:
        interval, has_failed = self._source.poll_interval, False
        while not self._is_closed.is_set():
            try:
                has_deadline = self._poll()
            except BaseException as error:  # a user's function may call `sys.exit`
                if not has_failed:
                    log.warning(
                        "cannot ask for preemption notices (%s): %s; trying again more slowly",
                        *(self._source.name, format_error(error)),
                    )
                interval, has_failed = min(2 * interval, MAX_POLL_INTERVAL_S), True
            else:
                if has_failed:
                    log.info("%s answers again for preemption notices", self._source.name)
                interval, has_failed = self._source.poll_interval, False
                if has_deadline:
                    return
            self._is_closed.wait(interval)

    def _poll(self) -> bool:
        """Ask the source, and pass a new notice on. Return True if it has a deadline."""
        notice = self._source.poll()
        if notice is None:
            return False
        has_deadline = notice.deadline_s is not None
        if has_deadline or not self._has_notice:
            self._on_notice(notice)
            self._has_notice = True
        return has_deadline


def describe(source: NoticeSource, notice: PreemptionNotice) -> str:
    """Return the text that names a notice in logs, events and exit reasons."""
    limit = "" if notice.deadline_s is None else f", {notice.deadline_s:.0f} s left"
    reason = shorten(escape_to_one_line(notice.reason), MAX_REASON_CHARS)
    return f"a preemption notice ({source.name}: {reason}{limit})"


def open_source(text: str) -> NoticeSource | None:
    """Return the source that a valid value of --preemption-notice names.

    Returns:
        The source. None if the value is "auto" and no service answers.

    Raises:
        ConfigError: the value names a function that cannot be imported.
    """
    if text.startswith(FILE_PREFIX):
        return FileSource(text.removeprefix(FILE_PREFIX))
    name, _, option = text.partition(":")
    match name:
        case "auto":
            return find_service()
        case "aws":
            return AwsSource(use_rebalance_hints=option == "rebalance")
        case "gcp":
            return GcpSource()
        case "azure":
            return AzureSource(approve_early=option == "approve")
    return FunctionSource(text)


@contextlib.contextmanager
def watch_for_preemption(
    name: str | None, on_notice: Callable[[str, float | None], object]
) -> Iterator[None]:
    """Watch for a preemption notice within the `with` block.

    Args:
        name: a value of --preemption-notice, or None to watch nothing.
        on_notice: receives the text that names the notice, and the seconds until the machine may be
            gone, or None. It is called in a thread.

    Raises:
        ConfigError: the value names no source, or a function that cannot be imported.
        OSError: the thread cannot be started.
    """
    source = open_source(name) if name else None
    if source is None:
        if name:
            log.info(
                "no metadata service of AWS, GCP or Azure answers: there are no preemption notices"
            )
        yield
        return
    log.info("watching for preemption notices (%s)", source.name)
    watcher = PreemptionWatcher(
        source, lambda notice: on_notice(describe(source, notice), notice.deadline_s)
    )
    watcher.start()
    try:
        yield
    finally:
        watcher.close()
