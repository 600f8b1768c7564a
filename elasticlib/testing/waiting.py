"""Bounded waiting in tests: wait until a condition holds, or fail with its description."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from ..clock import monotonic

DEFAULT_TIMEOUT_S = 100.0  # Several processes import torch, perhaps on a slow and busy machine.
POLL_INTERVAL_S = 0.005

Result = TypeVar("Result")


def wait_until(
    description: str,
    condition: Callable[[], Result | None],
    timeout_s: float = DEFAULT_TIMEOUT_S,
    *,
    details: Callable[[], str] | None = None,
) -> Result:
    """Call `condition` until it returns a true value, and return that value.

    The call blocks its thread and sleeps 5 ms between two calls of `condition`.

    Args:
        description: What is awaited; the error message names it.
        condition: Returns a true value as soon as the wait is over.
        timeout_s: Time limit in seconds. `condition` is called at least once.
        details: Returns text to append to the error message, for example the logs of a job.

    Raises:
        AssertionError: `condition` returned no true value within `timeout_s`.
    """
    deadline = monotonic() + timeout_s
    while not (result := condition()):
        if monotonic() > deadline:
            message = f"not within {timeout_s:g} s: {description}"
            raise AssertionError(f"{message}\n{details()}" if details else message)
        threading.Event().wait(POLL_INTERVAL_S)
    return result
