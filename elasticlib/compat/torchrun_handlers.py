"""The names by which stock torchrun finds our backends: entry points of `torchrun.handlers`.

torchrun calls these functions whenever it starts, whatever backend it was asked for, so nothing
is imported here before one of them is to be opened.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

    Creator = Callable[[RendezvousParameters], RendezvousHandler]


def el_tcp() -> Creator:
    """Nodes meet in a TCP store at the endpoint: `--rdzv-backend el-tcp`."""
    return partial(_open, "tcp")


def el_file() -> Creator:
    """Nodes meet in a shared folder: `--rdzv-backend el-file`."""
    return partial(_open, "file")


def el_etcd() -> Creator:
    """Nodes meet in etcd v3: `--rdzv-backend el-etcd`."""
    return partial(_open, "etcd")


def _open(kind: str, params: RendezvousParameters) -> RendezvousHandler:
    from .torchrun import open_for_torchrun

    return open_for_torchrun(kind, params)
