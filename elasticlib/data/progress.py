"""Where a job stands in its epochs, and when one epoch ends and the next begins.

Samples are used when they are counted (`advance`). Drawing moves nothing, as loaders draw long
before training, but for the one case where nobody counts and nobody names the epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from ..errors import ConfigError, StateMismatch
from ..whole import whole
from .deal import Position, advance, next_epoch
from .state import OnMismatch, resume

Over = Callable[[Position], bool]
"""Whether a position leaves nothing for any rank."""


class Progress:
    """The position of one sampler, with what it must remember to move on by itself.

    An epoch gives way to the next when an iterator begins (`begin`), unless `set_epoch` was ever
    called: after its last sample was counted; or, as long as nobody has counted any, after an
    iterator that began where it stands has run out.
    """

    def __init__(self, position: Position) -> None:
        self.position = position
        self._fresh = True
        self._named: int | None = None
        self._counted = False
        self._guessed = False
        self._ran_out: Position | None = None
        self._drawn_uncounted = False
        self._accounted = False

    def here(self, over: Over) -> Position:
        """Where the next sample stands that is to be counted."""
        used_up = self.position.consumed > 0 and over(self.position)
        return next_epoch(self.position) if used_up and self._named is None else self.position

    def ahead(self, over: Over) -> Position:
        """Where an iterator that began now would begin."""
        return next_epoch(self.position) if self._drawn_out else self.here(over)

    @property
    def _drawn_out(self) -> bool:
        uncounted = self._named is None and not self._counted
        return uncounted and self._ran_out == self.position

    def begin(self, over: Over) -> Position:
        """An iterator begins: where."""
        start = self.ahead(over)
        if start != self.position and self._drawn_out:
            self._guessed = True
        self.position, self._fresh = start, False
        return start

    def ended(self, start: Position) -> None:
        """An iterator that began at `start` has run out."""
        self._ran_out = start
        if start.consumed < start.length:
            self._drawn_uncounted = not self._accounted

    def kept(self) -> None:
        """A loader keeps the position of what was drawn with its own state: nobody has to count."""
        self._drawn_uncounted, self._accounted = False, True

    def why_misleading(self) -> str:
        """Why the position is not where training stands, when first asked for; or nothing."""
        if not self._drawn_uncounted:
            return ""
        self._drawn_uncounted, self._accounted = False, True
        here = self.position
        return (
            "an epoch was drawn to its end from this ElasticDistributedSampler, and nothing was"
            f" counted: its state says that {here.consumed} samples of epoch {here.epoch} were"
            " trained on, and whoever resumes from it trains on the others again. Call"
            " sampler.advance(batch_size * world_size) after each step, on every rank"
        )

    def advance(self, count: int) -> None:
        """Count `count` samples as used.

        Raises:
            ConfigError: `count` is negative, or no integer; or the present epoch began because the
                one before had been drawn, by someone who does count: which of the two is trained
                on?
        """
        if self._guessed and self._named is None and not self._counted:
            raise ConfigError(
                f"epoch {self.position.epoch} began by itself, as the one before it was drawn to"
                " its end and nothing was counted; now samples are. Call set_epoch() before each"
                " epoch, or look at the order through another sampler"
            )
        self.position = advance(self.position, count)
        self._fresh, self._counted = False, True
        self._drawn_uncounted, self._accounted = False, True

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`, or stay if that is the present one.

        A sampler of which nothing was drawn, counted or loaded yet keeps its place: that is how
        `start_index` comes to be a place in the first epoch that is named.

        Raises:
            ConfigError: `epoch` is negative, or no integer.
        """
        epoch = whole("epoch", epoch)
        if epoch < 0:
            raise ConfigError(f"need epoch >= 0, got {epoch}")
        here = self.position
        stays = self._fresh or epoch == here.epoch
        self.position = attrs.evolve(here, epoch=epoch, consumed=here.consumed if stays else 0)
        self._fresh, self._named = False, epoch

    def load(self, state: Mapping[str, Any], on_mismatch: OnMismatch = "refuse") -> None:
        """Go to where `state` stands; see `resume` for what it raises."""
        self._go_to(resume(state, self.position, on_mismatch))
        self._counted = False

    def restore(self, state: Mapping[str, Any], over: Over) -> Position:
        """Go to where an iterator stood: where.

        A loader does this late, when it is first iterated, so `set_epoch` may have named the next
        epoch meanwhile; that is right if the state's has come to its end.

        Raises:
            StateMismatch: as `resume`; or `set_epoch` named an epoch that neither is the state's
                nor follows its end: some would be trained on again, or passed over.
        """
        saved, named = resume(state, self.position), self._named
        if named is not None and named != saved.epoch:
            fits = saved.epoch + 1 if over(saved) else saved.epoch
            if named != fits:
                raise StateMismatch(
                    f"epoch is {saved.epoch} in the loader's state, with {saved.consumed} of"
                    f" {saved.length} samples used, and set_epoch({named}) was called: call"
                    f" set_epoch({fits}) to go on after it"
                )
            saved = next_epoch(saved)
        self._go_to(saved)
        return saved

    def _go_to(self, position: Position) -> None:
        """Stand at `position`; what was drawn before says nothing about it."""
        self.position, self._fresh = position, False
        self._ran_out, self._guessed = None, False
