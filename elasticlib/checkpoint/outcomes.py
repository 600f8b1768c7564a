"""What became of a manager's calls: of a restore, and of the saves that one rank makes for others.

The latter is told by the store that the ranks met in. Nobody waits in a collective, as only some
ranks may ask; each save has a number, which is the same on all ranks, as all make the same calls.
"""

from __future__ import annotations

import json
import logging
import threading
import zlib
from collections import Counter, deque
from numbers import Number
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import torch.distributed as dist

from ..clock import monotonic
from ..errors import CheckpointError

log = logging.getLogger("elasticlib.checkpoint")

POLL_SECONDS = 0.02
REMEMBERED = 100
"""So many saves that nobody asked for are remembered; of ten times as many the store tells."""

_numbers: Counter[str] = Counter()

_FROM = {
    "memory": "from this node's memory",
    "peer": "from another node's memory",
    "disk": "from the disk",
}


@attrs.frozen(repr=False)
class Restored:
    """What `CheckpointManager.restore` has brought the state to; true if there was anything.

    found: whether there was a state to go on from. If not, nothing was changed.
    step: after which that state was taken; 0 if there was none.
    source: where this rank's came from: `memory` of this node, that of a `peer`, or a `disk`;
        empty if there was none.
    passed_over: why newer states, or other copies of this one, were not taken: a sentence each.

    It is no number: whoever takes it for its step gets a TypeError that says so.
    """

    step: int = 0
    source: str = ""
    passed_over: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        return bool(self.source)

    def __bool__(self) -> bool:
        return self.found

    def __str__(self) -> str:
        said = f"step {self.step} {_FROM[self.source]}" if self.found else "nothing to go on from"
        return "; ".join([said, *(f"passed over: {why}" for why in self.passed_over)])

    def __repr__(self) -> str:
        return f"<Restored: {self}>"

    if not TYPE_CHECKING:  # a type checker is to find these before they are run

        def _is_no_number(self, *_: object) -> NoReturn:
            raise TypeError(
                "what restore() returns is a Restored, not a number: its .step is the step, and "
                ".found says whether there was any"
            )

        def __eq__(self, other: object) -> bool:
            if isinstance(other, Number):
                self._is_no_number()
            if not isinstance(other, Restored):
                return NotImplemented
            return attrs.astuple(self) == attrs.astuple(other)

        def __hash__(self) -> int:
            return hash(attrs.astuple(self))

        __lt__ = __le__ = __gt__ = __ge__ = _is_no_number
        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _is_no_number
        __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = (
            _is_no_number
        )
        __int__ = __index__ = __float__ = _is_no_number


@attrs.frozen
class Pending:
    """A save that another rank makes for this one."""

    number: int
    step: int


class Outcomes:
    """Of one manager's saves. All ranks give the same `name`, and the rank of their writer."""

    def __init__(self, group: dist.ProcessGroup | None, name: str, writer: int) -> None:
        ranks = None if group is None else dist.get_process_group_ranks(group)
        told = zlib.crc32(f"{name}\0{ranks}\0{writer}".encode())
        self._prefix = f"elasticlib/saves/{told:08x}"
        self._writer = writer
        # torch has no public name for the store that a process group met in.
        grouped = dist.is_available() and dist.is_initialized()
        self._store: Any = dist.distributed_c10d._get_default_store() if grouped else None
        self._pending: deque[Pending] = deque(maxlen=REMEMBERED)

    def began(self) -> int:
        """The number of a save that begins here, or on the writing rank."""
        # Not this object's: another manager of the same folder goes on counting.
        _numbers[self._prefix] += 1
        return _numbers[self._prefix]

    def expect(self, step: int) -> None:
        """The writing rank has been asked to save this step, too."""
        self._pending.append(Pending(self.began(), step))

    def tell(self, number: int, step: int, error: BaseException | None = None) -> None:
        """How a save of this rank came out."""
        if self._store is None:
            return
        why = "" if error is None else str(error)[:4000]
        try:
            self._store.set(self._key(number), json.dumps({"step": step, "error": why}))
            if number > 10 * REMEMBERED:
                self._store.delete_key(self._key(number - 10 * REMEMBERED))
        except (RuntimeError, NotImplementedError) as lost:
            log.info("the other ranks are not told that step %d was saved: %s", step, lost)

    def wait(self, deadline: float) -> Pending | None:
        """The last save that was expected, once it is known how all came out; None if there is none
        of which that has to be looked for elsewhere.

        Raises:
            CheckpointError: one was not saved, or nothing was heard of it.
        """
        pending, self._pending = [*self._pending], deque(maxlen=REMEMBERED)
        if not pending or self._store is None:
            return pending[-1] if pending else None
        for one in pending:
            try:
                said = self._said(one, deadline)
            except RuntimeError as lost:
                # Its host may have ended once it had saved.
                log.info("the ranks' store does not say how step %d came out: %s", one.step, lost)
                return pending[-1]
            self._check(one, said)
        return None

    def _said(self, one: Pending, deadline: float) -> dict[str, Any]:
        pause = threading.Event()
        # Asked again and again: who waits in the store keeps it from this process's other threads.
        while not self._store.check([self._key(one.number)]):
            if monotonic() > deadline:
                raise CheckpointError(
                    f"nothing was heard of the save of step {one.step}, which rank {self._writer} "
                    "makes: it has died, is still at it, or was not asked to save"
                )
            pause.wait(POLL_SECONDS)
        found: dict[str, Any] = json.loads(self._store.get(self._key(one.number)))
        return found

    def _check(self, one: Pending, said: dict[str, Any]) -> None:
        if said["step"] != one.step:
            raise CheckpointError(
                f"rank {self._writer} was asked to save step {said['step']}, and this rank step "
                f"{one.step}: all ranks have to make the same calls"
            )
        if said["error"]:
            raise CheckpointError(
                f"step {one.step} was not saved by rank {self._writer}: {said['error']}"
            )

    def _key(self, number: int) -> str:
        return f"{self._prefix}/{number}"
