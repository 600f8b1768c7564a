"""Our rendezvous under stock torchrun: its agent's idea of a handler, over a handler of ours.

torch's agent asks one thing while workers run, how many nodes wait, and restarts them if any do.
So the answer is above 0 whenever the generation is over, be it that a node has come or has gone;
and what ends the job, or this node, is an error with its reason.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import attrs
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous import RendezvousError as TorchRendezvousError

from ..clock import duration
from ..errors import (
    ConfigError,
    ElasticError,
    RendezvousClosed,
    RendezvousError,
    RendezvousTimeout,
    StoreError,
)
from ..launch.config import LaunchConfig, in_flags
from ..launch.endpoints import read_secret
from ..launch.rendezvous_setup import Meeting, open_meeting
from ..rendezvous.interface import BootstrapStoreInfo, Change, ChangeKind
from ..threads import call_watched
from .launching import TorchrunOptions, wants_libuv

log = logging.getLogger("elasticlib.launch")

SOON = 1.0
"""Seconds: a longer wait for the other nodes is logged."""
TORCHS_STOP = 60.0
"""Seconds in which torch's agent has stopped its workers: 30 until SIGKILL, and 30 after it."""
MARK = "@torchrun"
"""Ends our own name of a job whose agents are torch's: those of elasticrun deal ranks otherwise,
and a job of both would wait for ever."""
_ROLES = "torchelastic/role_info/"
_RANKS = "torchelastic/assigned_ranks/"

Answer = TypeVar("Answer")


def open_for_torchrun(kind: str, params: RendezvousParameters) -> RendezvousHandler:
    """The handler that `--rdzv-backend el-KIND` asks for; no other node is waited for.

    Raises:
        ConfigError: the settings cannot work, or the store cannot be served or opened.
    """
    try:
        config = read_params(kind, params, os.environ)
        secret = read_secret(os.environ, config.options.secret_file, "--rdzv-conf secret_file")
        meeting = open_meeting(attrs.evolve(config, run_id=config.run_id + MARK), secret)
    except ConfigError as error:
        raise ConfigError(f"--rdzv-backend {params.backend}: {in_flags(error)}") from error
    return TorchrunHandler(params.backend, config, meeting)


def read_params(
    kind: str, params: RendezvousParameters, environment: Mapping[str, str]
) -> LaunchConfig:
    """What torchrun was asked for, as a launch of ours.

    Raises:
        ConfigError: an option that is none of ours, or a value that cannot work.
    """
    return LaunchConfig(
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        run_id=params.run_id,
        rdzv_backend=kind,
        rdzv_endpoint=params.endpoint,
        # With a timeout of torchrun's own, before which a join_timeout goes.
        rdzv_configs=dict(params.config),
        # torch's agents count their restarts by themselves: a failure that comes here is the end.
        max_restarts=0,
        local_addr=params.local_addr,
        torchrun=TorchrunOptions(use_libuv=wants_libuv(environment)),
    )


class TorchrunHandler(RendezvousHandler):
    """Membership that is noticed and survives, for torch's agent.

    Args:
        name: what --rdzv-backend was given.
        config: what torchrun was asked for.
        meeting: where this node meets the others; closed by `shutdown`.
    """

    def __init__(self, name: str, config: LaunchConfig, meeting: Meeting) -> None:
        self._name = name
        self._config = config
        self._meeting = meeting
        self._handler = meeting.handler
        self._held = False
        self._left = False
        # Something that the caller handles already is no news of how this launch ended.
        self._handled = sys.exc_info()[1]
        # After a signal torchrun leaves handlers alone, as its own would end the job for all.
        atexit.register(self._leave)

    def get_backend(self) -> str:
        return self._name

    def get_run_id(self) -> str:
        return self._config.run_id

    @property
    def use_agent_store(self) -> bool:
        """True: torch's store is served by group rank 0's agent, anew for each generation."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        with _in_torchs_words():
            while True:
                info = self._handler.next_rendezvous()
                try:
                    store = self._open_store(info.bootstrap_store_info)
                except GenerationEnded as error:
                    log.info("generation %d: %s", info.generation, error)
                    continue
                self._held = True
                at = RendezvousStoreInfo(*attrs.astuple(info.bootstrap_store_info))
                return RendezvousInfo(store, info.rank, info.world_size, at)

    def is_closed(self) -> bool:
        with _in_torchs_words():
            return self._handler.is_closed()

    def set_closed(self) -> None:
        with _in_torchs_words():
            self._handler.set_closed()

    def num_nodes_waiting(self) -> int:
        """Above 0 when this node's workers must start anew, for whatever reason.

        Raises:
            RendezvousClosedError: the job is over, or goes on without this node.
            RendezvousConnectionError: the store was away for longer than the job can bear.
        """
        change = self._handler.wait_for_change(0.0)
        if change is None:
            return 0
        if change.kind.final:
            raise _end_of(change)
        # torch's agent logs that it found new nodes, which may be wrong.
        log.warning("the workers start anew: %s", change.reason)
        return max(1, self._handler.num_nodes_waiting())

    def shutdown(self) -> bool:
        """Leave. After success the job is over once all have succeeded; after a failure it goes
        on without this node where enough others are left, and has failed where not.

        The node that serves the TCP store stays for as long as others live.
        """
        if self._left:
            return True
        error = sys.exc_info()[1]
        if error is self._handled:
            error = None
        if self._held and error is None:
            self._handler.report_done()
            self._wait_for_all()
        elif self._held and isinstance(error, ChildFailedError):
            self._report_failure(error)
        return self._leave(serve=True)

    def _open_store(self, at: BootstrapStoreInfo) -> AgentStore:
        timeout = duration(self._config.options.read_timeout)
        connect = partial(
            TCPStore,
            *(at.master_addr, at.master_port),
            is_master=False,
            wait_for_workers=False,
            timeout=timeout,
        )
        return AgentStore(self._watched(connect), self._watched)

    def _watched(self, act: Callable[[], Answer]) -> Answer:
        """What `act` returns, while the generation stands.

        Raises:
            GenerationEnded: it does not, for that reason. RuntimeError: torch's own.
        """

        def look(seconds: float = 0.0) -> None:
            change = self._handler.wait_for_change(seconds)
            if change is not None:
                raise GenerationEnded(change.reason)

        try:
            return call_watched(act, "torchrun-store", look)
        except GenerationEnded:
            raise
        except Exception:
            # It may be the first sign of a node's loss, which is known within this time.
            look(2 * self._config.timing.lease)
            raise

    def _wait_for_all(self) -> None:
        """Until all are done; while the store is away this cannot be known."""
        patience = self._config.timing.close
        soon = min(SOON, patience)
        if self._handler.wait_for_change(soon) is None:
            log.warning(
                "the workers here are done, and the other nodes are waited for, for %g s at most "
                "(--rdzv-conf close_timeout)",
                patience,
            )
            self._handler.wait_for_change(patience - soon)

    def _report_failure(self, error: ChildFailedError) -> None:
        """Report why, and stay until the others have read it, or have had the time to."""
        rank, failure = error.get_first_failure()
        how = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
        self._handler.report_failure(f"rank {rank} ended with {how}, its node's last restart")
        give_up = threading.Timer(self._config.timing.close, self._handler.shutdown)
        give_up.daemon = True
        give_up.start()
        with contextlib.suppress(ElasticError):
            self._handler.next_rendezvous()
        give_up.cancel()

    def _leave(self, serve: bool = False) -> bool:
        if self._left:
            return True
        self._left = True
        atexit.unregister(self._leave)
        ended = self._handler.shutdown()
        if serve:
            self._meeting.serve_others(lambda: False)
        else:
            self._meeting.hand_over(
                lambda: False,
                self._config.timing,
                needed=self._config.min_nodes,
                stopping=TORCHS_STOP,
            )
        self._meeting.close()
        return ended


def _end_of(change: Change) -> TorchRendezvousError:
    sentence = f"{change.kind.value}: {change.reason}"
    if change.kind is ChangeKind.LOST:
        return RendezvousConnectionError(sentence)
    return RendezvousClosedError(sentence)


_WORDS: tuple[tuple[type[Exception], Callable[[str], TorchRendezvousError]], ...] = (
    (RendezvousClosed, RendezvousClosedError),
    (RendezvousTimeout, RendezvousTimeoutError),
    (StoreError, RendezvousConnectionError),
    (ElasticError, TorchRendezvousError),
)


@contextlib.contextmanager
def _in_torchs_words() -> Iterator[None]:
    """Errors of ours as those that torch's agents and their users know."""
    try:
        yield
    except ElasticError as error:
        raise next(theirs for kind, theirs in _WORDS if isinstance(error, kind))(
            str(error)
        ) from error


# -- the store of one generation -------------------------------------------------------------------
#
# What torch's agents tell one another in, for as long as a generation stands. torch's agent takes
# an error of its store for the end of its node. So a call that another node's loss leaves without
# an answer ends here with the generation, and where the agent is about to start workers it is
# answered all the same: it stops them at its next look at the rendezvous.


class GenerationEnded(RendezvousError):
    """The generation was over before another of its nodes had answered."""


class AgentStore(PrefixStore):
    """torch's store of one generation, as torch's agent uses it; watched: calls what it is given,
    as long as the generation stands."""

    def __init__(self, store: TCPStore, watched: Callable[[Callable[[], Any]], Any]) -> None:
        super().__init__("elasticlib/agents", store)
        self._watched = watched
        self._own_role = b""

    def set(self, key: str, value: Any) -> None:
        if key.startswith(_ROLES):
            self._own_role = value.encode() if isinstance(value, str) else bytes(value)
        self._put("set", key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        self._put("multi_set", list(keys), list(values))

    def get(self, key: str) -> bytes:
        try:
            return bytes(self._call("get", key))
        except GenerationEnded:
            if not self._own_role or not key.startswith(_RANKS):
                raise
            return self._alone(int(key.removeprefix(_RANKS)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        try:
            return list(self._call("multi_get", list(keys)))
        except GenerationEnded:
            if not self._own_role or not all(key.startswith(_ROLES) for key in keys):
                raise
            return [self._own_role for _ in keys]

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        self._call("wait", list(keys), *(() if timeout is None else (timeout,)))

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", key, amount))

    def _put(self, name: str, *args: Any) -> None:
        try:
            self._call(name, *args)
        except GenerationEnded:
            # No node is left that would read it.
            return

    def _call(self, name: str, *args: Any) -> Any:
        act = getattr(super(), name)
        return self._watched(lambda: act(*args))

    def _alone(self, rank: int) -> bytes:
        """Ranks in a world that cannot come together, as one of its nodes is gone."""
        slots = json.loads(self._own_role)["local_world_size"]
        world = slots * (rank + 2)
        return json.dumps([slots * rank, world, slots * rank, world]).encode()
