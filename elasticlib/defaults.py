"""Defaults and choices that flags share with options objects.

This module imports nothing, so that `elasticrun --help` does not import attrs.
"""

from __future__ import annotations

DEFAULT_DRAIN_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h; schedulers can be set to requeue on it
UNFIT_NODE_EXIT_CODE = 69  # EX_UNAVAILABLE of sysexits.h; a scheduler may avoid the node
# So many SIGINTs give up the final write of snapshots, the wait for uploads, and the handover of
# the store.
GIVE_UP_COUNT = 3
STOPPED_EXIT_CODE = 76  # an operator ended the job, so it is not started again
DEFAULT_CHECKPOINT_GRACE_S = 30.0  # for workers to save before a resize or a drain
DEFAULT_STORE_GRACE_S = 300.0  # workers keep running this long while the store is unreachable
NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")  # torch's AffinityMode

# Flags of torchrun, and fields of its LaunchConfig, that elasticlib does not implement, each with
# the replacement.
UNSUPPORTED_TORCHRUN_OPTIONS = {
    "logs_specs": "choose where output goes with --log-dir, --redirects, --tee and "
    "--local-ranks-filter",
    "event_log_handler": "read the events in events.jsonl with `elasticlib report` or "
    "elasticlib.read_history",
}
