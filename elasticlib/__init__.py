"""Elastic, fault-tolerant distributed training on PyTorch.

`import elasticlib` costs milliseconds and does not import torch: each public name is loaded from
its module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

_HOMES = {
    "stores.interface": ("Store", "Entry", "CompareSet", "Listing", "ABSENT"),
    "stores.memory": ("MemoryStore",),
    "stores.file": ("FileStore",),
    "stores.tcp": ("TcpStore",),
    "stores.server": ("TcpStoreServer",),
    "data.sampler": ("ElasticDistributedSampler",),
    "checkpoint.file": ("save_checkpoint", "load_checkpoint", "latest_checkpoint"),
    "errors": ("ElasticError",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME_OF)]

if TYPE_CHECKING:
    from .checkpoint.file import latest_checkpoint as latest_checkpoint
    from .checkpoint.file import load_checkpoint as load_checkpoint
    from .checkpoint.file import save_checkpoint as save_checkpoint
    from .data.sampler import ElasticDistributedSampler as ElasticDistributedSampler
    from .errors import ElasticError as ElasticError
    from .stores.file import FileStore as FileStore
    from .stores.interface import ABSENT as ABSENT
    from .stores.interface import CompareSet as CompareSet
    from .stores.interface import Entry as Entry
    from .stores.interface import Listing as Listing
    from .stores.interface import Store as Store
    from .stores.memory import MemoryStore as MemoryStore
    from .stores.server import TcpStoreServer as TcpStoreServer
    from .stores.tcp import TcpStore as TcpStore


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'elasticlib' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
