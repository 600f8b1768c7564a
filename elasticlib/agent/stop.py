"""One group's way up the stopping ladder, whatever it is stopped for.

The ladder says by the time alone what is due; this does it, and says when it is over.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import attrs

from ..clock import Clock
from ..errors import present
from ..workers.interface import Workers
from ..workers.messages import Notice
from ..workers.spec import Ladder, Rung
from .agreed import Need
from .policy import GroupStopped

log = logging.getLogger("elasticlib.agent")


class GroupStop:
    """Stops the group that runs, one group after another.

    told: called when it was given a notice, or another, with that, and with None when it is stopped
    without: the other nodes' workers may have been given one, and ask ours when.
    """

    def __init__(
        self,
        workers: Workers,
        ladder: Ladder,
        clock: Clock,
        told: Callable[[Notice | None], None] = lambda _: None,
    ) -> None:
        self._told = told
        self._workers = workers
        self._plain = self._ladder = ladder
        self._clock = clock
        self._since: float | None = None
        self._rung = Rung.NOTICE
        self._hurried = False
        self._agreed = False
        self.heard = False

    @property
    def noticing(self) -> bool:
        """Whether those who are being stopped have been told, and may save and end."""
        return self._since is not None and self._rung is Rung.NOTICE

    @property
    def undecided(self) -> bool:
        """Whether they are to agree at which call, and have not yet."""
        return self.noticing and self._workers.agrees and not self._agreed

    def forget(self) -> None:
        """Another group is started, which has not been told anything."""
        self.heard = self._agreed = False

    def tell(self, notice: Notice) -> bool:
        """Whether the workers listen, and now save and end by themselves."""
        if not self.heard and self._workers.notify(notice):
            self.heard = True
            log.info("%s: the workers have %g s to save and end", notice.reason, notice.seconds)
            self._told(notice)
        return self.heard

    def begin(self, notice: Notice | None) -> None:
        """Start to climb, with a notice where there is one and somebody listens to it."""
        told = notice is not None and self.tell(notice)
        seconds = notice.seconds if told and notice is not None else 0.0
        self._ladder = self._plain.noticed(seconds)
        self._since, self._rung, self._hurried = self._clock(), Rung.NOTICE, False
        if not told:
            self._rung = Rung.TERM
            self._workers.terminate()
            self._told(None)

    def sooner(self, notice: Notice | None) -> None:
        """Those who have been told: by this notice, if it leaves less time; None: no more."""
        if not self.noticing:
            return
        if notice is None:
            self.hurry()
            return
        since = present(self._since, "the beginning of the stop")
        left = self._ladder.left(self._clock() - since)
        self._since = since - max(0.0, left - notice.seconds)
        notice = attrs.evolve(notice, seconds=min(left, notice.seconds))
        # Before the workers are asked, who may be agreed upon as soon as they are.
        self._told(notice)
        self._workers.notify(notice)

    def agreed(self, need: Need) -> None:
        """Those who were told have agreed at which call to stop, or cannot."""
        if need.call is not None:
            self._agreed = True
            self._workers.stop_at(need.call, Notice(need.reason, need.seconds))
        elif self.noticing:
            log.warning("the workers cannot all stop at one step")
            self.hurry()

    def hurry(self) -> None:
        """Do without what is left of this rung: a notice becomes SIGTERM, that SIGKILL."""
        if self._since is not None and self._rung < Rung.KILL:
            self._hurried = True
            self._since -= self._ladder.left(self._clock() - self._since)

    def left(self) -> float:
        """Seconds until the next rung; infinite if nothing is being stopped."""
        if self._since is None:
            return math.inf
        return self._ladder.left(self._clock() - self._since)

    def climb(self) -> GroupStopped | None:
        """Do what is due; the end of the climb, if this is it."""
        if self._since is None:
            return None
        if not self._workers.running():
            self._since = None
            return GroupStopped()
        rung, before = self._ladder.rung(self._clock() - self._since), self._rung
        self._rung = rung
        names = ", ".join(self._workers.running().values())
        if before < Rung.TERM <= rung:
            log.warning("told to save and still there, sending SIGTERM: %s", names)
            self._workers.terminate()
        if before < Rung.KILL <= rung:
            waited = "in a hurry" if self._hurried else f"after {self._ladder.grace:g} s"
            log.warning("still there %s, killing: %s", waited, names)
            self._workers.kill()
        if rung is not Rung.GIVE_UP:
            return None
        self._since = None
        return GroupStopped(left=names)
