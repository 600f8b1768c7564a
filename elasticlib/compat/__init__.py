"""torch's names and shapes, which could be deleted whole; what is light to import is here.

Only `launch` imports this folder, from here and from `launching.py`, where it has torch's fields,
variables and shapes: `tests/test_architecture.py` sees to it. From torchrun's side all comes to
`torchrun_handlers.py`, by the entry points of `torchrun.handlers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

TIMER_FILE = "TORCHELASTIC_TIMER_FILE"
TORCH_GROUP = "torchrun.handlers"
"""torch's group of entry points: handlers that other distributions register for torchrun."""
TORCH_C10D = "torch-c10d"
"""torch's dynamic rendezvous over a c10d store, which torchrun calls c10d."""
TORCHS_TIMEOUT = 900
"""Seconds that torch writes into rdzv_configs as `timeout` unless the user gives one."""
TORCHRUN_NAMES = {"el-tcp": "tcp", "el-file": "file", "el-etcd": "etcd"}
"""The names of our backends under torchrun; elasticrun takes them, too."""


def our_name(name: str) -> str:
    """What elasticrun calls the backend that torchrun knows by that name, if it is one of ours."""
    return TORCHRUN_NAMES.get(name, name)


def registered_with_torch() -> dict[str, EntryPoint]:
    """The entry points of torch's group that are not ours, by name."""
    from importlib.metadata import entry_points

    found = {point.name: point for point in entry_points(group=TORCH_GROUP)}
    return {name: point for name, point in found.items() if name not in TORCHRUN_NAMES}
