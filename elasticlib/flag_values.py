"""Values that a flag and the part behind it share, each written here alone.

Imported by both, and importing nothing, so that --help is answered before attrs is imported.
"""

from __future__ import annotations

DRAIN_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: try again later. Schedulers can be told to requeue on it."""
CHECKPOINT_GRACE = 30.0
"""Seconds that workers have to save and end when the job's size changes, or their node leaves."""
STORE_GRACE = 300.0
"""Seconds for which the store may be unreachable."""
NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")
"""The values of torch's `AffinityMode`."""
TORCHRUN_ONLY = {
    "logs_specs": "choose where output goes with --log-dir, --redirects, --tee and "
    "--local-ranks-filter",
    "event_log_handler": "read the events in events.jsonl with `elasticlib report` or "
    "elasticlib.read_history",
}
"""Flags of torchrun, and fields of its LaunchConfig, that elasticlib does not implement: what to
use instead."""
