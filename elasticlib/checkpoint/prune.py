"""Which checkpoints are kept: the newest few, each so many steps one, the best, and the last good
one always.

Nothing is deleted while no checkpoint that stays is known to be good, and never what could not be
read: it may be whole.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import attrs

from ..errors import ConfigError


class Health(enum.Enum):
    """GOOD: every byte was written or checked by who asks. BAD: read, and found damaged. UNREAD:
    it could not be read. UNKNOWN: none of these."""

    GOOD = "good"
    UNKNOWN = "unknown"
    UNREAD = "unread"
    BAD = "bad"


Metrics = Mapping[int, Mapping[str, float]]
"""By step, what was measured of it."""


@attrs.frozen
class Retention:
    """last: how many of the newest are kept. every: so is each whose step it divides (0: none).
    best: a metric, whether its "min" or "max" is best, and how many of the best are kept, too."""

    last: int = 3
    every: int = 0
    best: tuple[str, str, int] | None = None

    def __attrs_post_init__(self) -> None:
        for name, least in (("last", 1), ("every", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"need keep_{name} >= {least}, a whole number, got {value!r}")
        if self.best is not None:
            _check_best(self.best)


def _check_best(best: object) -> None:
    match best:
        case (str(), "min" | "max", int(count)) if type(count) is int and count >= 1:
            return
    raise ConfigError(
        f'need keep_best such as ("loss", "min", 3): a metric, "min" or "max", and how many '
        f"(>= 1), got {best!r}"
    )


def best_of(steps: Iterable[int], metrics: Metrics, metric: str, order: str) -> list[int]:
    """Those of which this was measured, the best first; of two that are as good, the newer one.

    Args:
        order: "min" if less is better, "max" if more is.
    """
    sign = 1 if order == "min" else -1
    known = (step for step in steps if metric in metrics.get(step, {}))
    return sorted(known, key=lambda step: (sign * metrics[step][metric], -step))


@attrs.frozen
class Selection:
    """What stays and what goes, each from old to new, and why nothing goes, if so."""

    kept: tuple[int, ...]
    deleted: tuple[int, ...]
    reason: str = ""


def select(
    found: Iterable[tuple[int, Health]],
    retention: Retention,
    just: int | None = None,
    metrics: Metrics = MappingProxyType({}),
) -> Selection:
    """Which of these checkpoints to keep. Those UNREAD stay, and are not counted: what is whole
    does not go in their place.

    Args:
        found: the steps that there are, and how each is.
        just: the step that was written just now: it stays, whatever its number. (Who went back
            to an older step writes smaller ones than there are.)
        metrics: what the manifests say; a step without the metric in question is never best.
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
    if retention.best:
        metric, order, count = retention.best
        kept |= {*best_of(usable, metrics, metric, order)[:count]}
    if just in health:
        kept.add(just)
    return Selection(tuple(sorted(kept)), tuple(step for step in steps if step not in kept))
