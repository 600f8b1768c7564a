"""Clients that a forked child can use: in the child, each of them is another client.

A child has copies of its parent's sockets and locks, and none of the threads that used them. While
it has them, the kernel does not end its parent's connections when the parent is killed: what the
parent leased then ends after its ttl.
"""

from __future__ import annotations

import abc
import os
import threading


class ForkAware(abc.ABC):
    """Base of an object that starts anew when a forked child first uses it.

    The child's copy leaves its parent's connections alone, and waits for no lock that a thread of
    the parent held at the fork.
    """

    _pid = 0  # the process that the state belongs to

    @abc.abstractmethod
    def _begin_in_process(self) -> None:
        """Make the state that belongs to one process: connections, locks and leases."""

    def _check_process(self) -> None:
        """Begin in this process, unless that has been done; each method that uses the state, and
        the constructor, calls this first."""
        if self._pid != os.getpid():
            with _LOCKS.setdefault(os.getpid(), threading.RLock()):
                if self._pid != os.getpid():
                    self._begin_in_process()
                    self._pid = os.getpid()


_LOCKS: dict[int, threading.RLock] = {}
"""One lock per process, because a thread of the parent may have held the parent's at the fork."""
