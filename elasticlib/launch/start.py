"""How the command `elasticrun` begins: before all else is imported, which takes a while, it holds
the signals that would end it and that may mean a drain.
"""

from __future__ import annotations

from .held_signals import EARLY, HELD


def elasticrun() -> int:
    """The exit code of the command."""
    HELD.hold(EARLY)
    from .elasticrun import command

    return command()
