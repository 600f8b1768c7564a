"""What the agents of stock torchrun tell one another in, for as long as a generation stands.

torch's agent takes an error of its store for the end of its node. So a call that another node's
loss leaves without an answer ends here with the generation, and where the agent is about to
start workers it is answered all the same: it stops them at its next look at the rendezvous.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ..clock import duration
from ..errors import RendezvousError
from ..threads import helper

LOOK_SECONDS = 0.05
_ROLES = "torchelastic/role_info/"
_RANKS = "torchelastic/assigned_ranks/"

Answer = TypeVar("Answer")
Ended = Callable[[float], "str | None"]


class GenerationEnded(RendezvousError):
    """The generation was over before another of its nodes had answered."""


def watched(act: Callable[[], Answer], ended: Ended, patience: float) -> Answer:
    """What `act` returns, while `ended(seconds)` has nothing to say.

    patience: seconds for which an error of `act` may be the first sign of an end.

    Raises:
        GenerationEnded: it ended first, for that reason. RuntimeError: torch's own.
    """
    answers: list[Answer] = []
    errors: list[Exception] = []

    def call() -> None:
        try:
            answers.append(act())
        except Exception as error:
            errors.append(error)

    # torch's calls cannot be cancelled: one that is given up ends with its connection.
    thread = helper(call, "torchrun-store")
    thread.start()
    thread.join(LOOK_SECONDS)
    while thread.is_alive():
        reason = ended(0.0)
        if reason is not None:
            raise GenerationEnded(reason)
        thread.join(LOOK_SECONDS)
    if answers:
        return answers[0]
    (error,) = errors
    reason = ended(patience)
    if reason is not None:
        raise GenerationEnded(reason) from error
    raise error


class AgentStore(PrefixStore):
    """torch's store of one generation, as torch's agent uses it.

    Args:
        address, port: where group rank 0 of the generation serves it.
        ended: why the generation is over, waiting up to so many seconds for that; None if not.
        patience: seconds within which the loss of a node is known.
        timeout: seconds that torch's calls may take.
    """

    def __init__(
        self, address: str, port: int, *, ended: Ended, patience: float, timeout: float
    ) -> None:
        self._ended = ended
        self._patience = patience
        self._own_role = b""

        def connect() -> TCPStore:
            return TCPStore(
                address,
                port,
                is_master=False,
                wait_for_workers=False,
                timeout=duration(timeout),
            )

        store = watched(connect, ended, patience)
        super().__init__("elasticlib/agents", store)

    def set(self, key: str, value: Any) -> None:
        if key.startswith(_ROLES):
            self._own_role = value.encode() if isinstance(value, str) else bytes(value)
        self._told("set", key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        self._told("multi_set", list(keys), list(values))

    def get(self, key: str) -> bytes:
        try:
            return bytes(self._asked("get", key))
        except GenerationEnded:
            if not self._own_role or not key.startswith(_RANKS):
                raise
            return self._alone(int(key.removeprefix(_RANKS)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        try:
            return list(self._asked("multi_get", list(keys)))
        except GenerationEnded:
            if not self._own_role or not all(key.startswith(_ROLES) for key in keys):
                raise
            return [self._own_role for _ in keys]

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        self._asked("wait", list(keys), *(() if timeout is None else (timeout,)))

    def add(self, key: str, amount: int) -> int:
        return int(self._asked("add", key, amount))

    def _told(self, name: str, *args: Any) -> None:
        try:
            self._asked(name, *args)
        except GenerationEnded:
            # Nobody is left who would read it.
            return

    def _asked(self, name: str, *args: Any) -> Any:
        act = getattr(super(), name)
        return watched(lambda: act(*args), self._ended, self._patience)

    def _alone(self, rank: int) -> bytes:
        """Ranks in a world that cannot come together, as one of its nodes is gone."""
        slots = json.loads(self._own_role)["local_world_size"]
        world = slots * (rank + 2)
        return json.dumps([slots * rank, world, slots * rank, world]).encode()
