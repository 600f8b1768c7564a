"""The names that --rdzv-backend takes: ours, and those that installed distributions register.

A distribution registers `name = package.module:open` in the entry-point group
`elasticlib.rendezvous`. Nothing of it is imported before a launch asks for that name, and a name
of ours is never another's. What is registered for torchrun is taken too, where nobody has
registered that name with us.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from ..compat import TORCH_C10D, TORCHRUN_NAMES, registered_with_torch

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "elasticlib.rendezvous"
ETCD_BACKENDS = ("etcd", "etcd-v2")
"""The second is torch's name for a backend that spoke etcd's version 2; here it speaks 3 too."""
OUR_BACKENDS = ("tcp", "c10d", "file", "static", *ETCD_BACKENDS)


class BackendNames(Collection[str]):
    """All names, ours first; the metadata of distributions is read only where ours do not do."""

    def __contains__(self, name: object) -> bool:
        if name in OUR_BACKENDS or name in TORCHRUN_NAMES or name == TORCH_C10D:
            return True
        return name in registered() or name in registered_with_torch()

    def __iter__(self) -> Iterator[str]:
        yield from OUR_BACKENDS
        known = {*OUR_BACKENDS, TORCH_C10D}
        here = set(registered()) - known
        yield from sorted(here)
        yield TORCH_C10D
        yield from sorted(set(registered_with_torch()) - here - known)

    def __len__(self) -> int:
        return len(list(iter(self)))


BACKENDS = BackendNames()


def is_torchs(name: str) -> bool:
    """Whether it stands for a handler of torch's kind."""
    if name in OUR_BACKENDS:
        return False
    return name == TORCH_C10D or (name not in registered() and name in registered_with_torch())


def registered() -> dict[str, list[EntryPoint]]:
    """The entry points of our group, by name."""
    # Imported here: it costs as much as half of `elasticrun --help`.
    from importlib.metadata import entry_points

    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, []).append(point)
    return found
