"""What a forked child must not keep of its parent: connections, and locks held by its threads.

A child has its parent's sockets, and none of the threads that used them. While it holds one open,
the other side cannot see the parent's end; so each is closed in the child as soon as there is a
child, and without a word, for the connection goes on being the parent's.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol, TypeVar


class Closable(Protocol):
    def close(self) -> None: ...


class Forked(Protocol):
    def begin_anew(self) -> None:
        """Be as just made: the one thread of a child calls this before all else."""


_closing: weakref.WeakSet[Closable] = weakref.WeakSet()
_renewing: weakref.WeakSet[Forked] = weakref.WeakSet()

Thing = TypeVar("Thing", bound=Closable)


def close_in_children(thing: Thing) -> Thing:
    """The thing itself, which a child closes: a socket, or what else holds a descriptor."""
    _closing.add(thing)
    return thing


def renew_in_children(owner: Forked) -> None:
    """Have the child's copy of the owner begin anew."""
    _renewing.add(owner)


def _begin_as_child() -> None:
    for thing in list(_closing):
        with contextlib.suppress(OSError):
            thing.close()
    for owner in list(_renewing):
        owner.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_as_child)
