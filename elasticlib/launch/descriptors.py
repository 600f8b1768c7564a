"""How many files this process may have open: whoever serves a store has one for each client."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger("elasticlib.launch")


def allow_descriptors(count: int | None) -> None:
    """So many at least, and no more, as workers inherit it; None: as many as may be had."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == hard if count is None else soft == resource.RLIM_INFINITY or soft >= count
    if enough:
        return
    most = hard if count is None else count
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if count is not None and most < count:
        log.warning("the store needs %d descriptors for all nodes, and may have %d", count, most)
