"""Which checkpoints are kept: the newest few, each so many steps one, and the last good one always.

Nothing is deleted while no checkpoint that stays is known to be good, and never what could not be
read: it may be whole.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import attrs

from ..errors import ConfigError


class Health(enum.Enum):
    """GOOD: every byte was written or checked by who asks. BAD: read, and found damaged. UNREAD:
    it could not be read. UNKNOWN: none of these."""

    GOOD = "good"
    UNKNOWN = "unknown"
    UNREAD = "unread"
    BAD = "bad"


@attrs.frozen
class Retention:
    """last: how many of the newest are kept. every: so is each whose step it divides (0: none)."""

    last: int = 3
    every: int = 0

    def __attrs_post_init__(self) -> None:
        for name, least in (("last", 1), ("every", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"need keep_{name} >= {least}, a whole number, got {value!r}")


@attrs.frozen
class Selection:
    """What stays and what goes, each from old to new, and why nothing goes, if so."""

    kept: tuple[int, ...]
    deleted: tuple[int, ...]
    reason: str = ""


def select(
    found: Iterable[tuple[int, Health]], retention: Retention, just: int | None = None
) -> Selection:
    """Which of these checkpoints to keep. Those UNREAD stay, and are not counted: what is whole
    does not go in their place.

    Args:
        found: the steps that there are, and how each is.
        just: the step that was written just now: it stays, whatever its number. (Who went back
            to an older step writes smaller ones than there are.)
    """
    health = dict(found)
    steps = sorted(health)
    unread = [step for step in steps if health[step] is Health.UNREAD]
    usable = [step for step in steps if health[step] in (Health.GOOD, Health.UNKNOWN)]
    good = [step for step in steps if health[step] is Health.GOOD]
    if not good:
        return Selection(tuple(steps), (), "none is known to be good")
    kept = {*usable[-retention.last :], good[-1], *unread}
    if retention.every:
        kept |= {step for step in usable if step % retention.every == 0}
    if just in health:
        kept.add(just)
    return Selection(tuple(sorted(kept)), tuple(step for step in steps if step not in kept))
