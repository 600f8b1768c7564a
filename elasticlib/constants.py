"""Exit codes, and the names among which options choose.

This module imports nothing, so that the command line can be parsed without attrs.
"""

from __future__ import annotations

DRAINED_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h; schedulers can be set to requeue on it
UNFIT_NODE_EXIT_CODE = 69  # EX_UNAVAILABLE of sysexits.h; a scheduler may avoid the node
STOPPED_EXIT_CODE = 76  # an operator ended the job, so it is not started again
# So many SIGINTs give up the final write of snapshots, the wait for uploads, and the handover of
# the store.
GIVE_UP_COUNT = 3

TCP_BACKENDS = ("tcp", "c10d", "static")  # the backends that use a TCP store
# "etcd-v2" is torch's name for a backend that speaks version 2 of etcd's API. Here it is an alias.
ETCD_BACKENDS = ("etcd", "etcd-v2")
BUILTIN_BACKENDS = ("tcp", "c10d", "file", "static", *ETCD_BACKENDS)
# Python workers are forked from a process that has already imported torch, or started as new
# interpreters. `fork` means `forkserver`: the agent has threads, so it must not be forked itself.
START_METHODS = ("forkserver", "spawn", "fork")
SPAWN = "spawn"
NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")  # torch's AffinityMode
# The metadata services that announce preemptions.
NOTICE_SERVICES = ("auto", "aws", "aws:rebalance", "gcp", "azure", "azure:approve")
