"""Hides torch's warning that NumPy is not installed, where elasticlib imports torch itself."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import cast


@contextlib.contextmanager
def missing_numpy_ignored() -> Iterator[None]:
    """Ignore this one warning while the context, which imports torch, is active.

    Neither elasticlib nor most scripts need NumPy, and each process would begin its output with the
    warning. A NumPy that is installed and cannot be used still causes a warning.
    """
    message = "Failed to initialize NumPy: No module named 'numpy'"
    warnings.filterwarnings("ignore", message, UserWarning)
    filters = cast("list[object]", warnings.filters)
    added = filters[0]
    try:
        yield
    finally:
        # Only this filter is removed, because the modules that were imported may have added others.
        with contextlib.suppress(ValueError):
            filters.remove(added)
