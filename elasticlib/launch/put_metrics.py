"""The numbers that torch's agent puts into the group `torchelastic`, by the same names, for
programs that have configured a handler of torch's metrics and launch from Python.
"""

from __future__ import annotations

import logging
import sys

from ..observe.event import Event
from ..observe.journal import View

log = logging.getLogger("elasticlib.launch")

TORCHS = "torch.distributed.elastic.metrics"
GROUP = "torchelastic"


def _is_taken() -> bool:
    """Whether the program has configured a handler, for which it has imported torch's module."""
    if TORCHS not in sys.modules:
        return False
    from torch.distributed.elastic.metrics import NullMetricHandler, getStream

    return not isinstance(getStream(GROUP).handler, NullMetricHandler)


class PutMetrics(View):
    """role: whose workers they are."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._restarts = 0
        self._left = self._most = 0

    @property
    def prompt(self) -> bool:
        """A program's own handler may wait; where there is none, nothing does."""
        return not _is_taken()

    def hear(self, event: Event) -> None:
        if event.kind == "generation.began":
            self._restarts = event.count("restarts") or 0
            self._most = event.count("max_restarts") or 0
            self._left = max(0, self._most - self._restarts)
            self._put("remaining_restarts", self._left)
        elif event.kind == "run.ended":
            self._over(event.text("state"))

    def _over(self, state: str) -> None:
        failed, again = state == "failed", self._restarts > 0
        good = 100.0 - 100.0 * (self._left + 1) / (self._most + 1)
        self._put("flakiness", 100 if failed else int(good))
        self._put("run_total", 1)
        self._put(state, 1)
        for name, value in (
            ("run_success_with_retries", not failed and again),
            ("run_success_no_retries", not failed and not again),
            ("run_failed_with_retries", failed and again),
            ("run_failed_no_retries", failed and not again),
        ):
            self._put(name, int(value))

    def _put(self, name: str, value: int) -> None:
        if not _is_taken():
            return
        from torch.distributed.elastic.metrics import put_metric

        try:
            put_metric(f"workers.{self._role}.{name}", value, GROUP)
        except Exception:
            # A program's own handler: what it does wrong is no end of its job.
            log.exception("the metric %s is not taken", name)
