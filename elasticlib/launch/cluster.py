"""Which scheduler this node was started by, and what its variables say of the job.

A detector is a function of the environment: None where it is not that scheduler's, else settings
by name (`nnodes`, `rdzv_endpoint`, ...), each as text, as on the command line, with the name of
the variable it is from. Others' are found in the entry-point group `elasticlib.cluster`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import import_module

from ..errors import ConfigError, describe

GROUP = "elasticlib.cluster"
Told = Mapping[str, tuple[str, str]]
Detector = Callable[[Mapping[str, str]], Told | None]

OURS: Mapping[str, str] = {
    "slurm": "elasticlib.launch.slurm:read_slurm",
    "skypilot": "elasticlib.launch.skypilot:read_skypilot",
}
"""Detectors of ours, in the order in which `auto` asks them, as module:function."""


class ClusterNames(Collection[str]):
    """What --from-env takes; the metadata of distributions is read only where ours do not do."""

    def __contains__(self, name: object) -> bool:
        return name in (*_WORDS, *OURS) or name in _registered()

    def __iter__(self) -> Iterator[str]:
        yield from _WORDS
        yield from OURS
        yield from sorted(set(_registered()) - set(OURS) - set(_WORDS))

    def __len__(self) -> int:
        return len(list(iter(self)))


_WORDS = ("none", "auto")
CLUSTERS = ClusterNames()


def read_cluster(name: str, environment: Mapping[str, str]) -> tuple[str, Told]:
    """The scheduler's name and what it says; nothing where `auto` finds none.

    Raises:
        ConfigError: the one that is named did not start this process, or its detector is broken.
    """
    if name == "none":
        return "none", {}
    for candidate in CLUSTERS if name == "auto" else (name,):
        if candidate in _WORDS:
            continue
        told = _detector(candidate)(environment)
        if told is not None:
            return candidate, told
    if name == "auto":
        return "none", {}
    raise ConfigError(
        f"--from-env {name}: nothing in the environment is of {name}; "
        "start elasticrun in one of its jobs, or leave the flag out"
    )


def _detector(name: str) -> Detector:
    target = OURS.get(name)
    if target is not None:
        module, _, function = target.partition(":")
        found: Detector = getattr(import_module(module), function)
        return found
    return _foreign(name, _registered()[name])


def _foreign(name: str, value: Callable[[], Detector]) -> Detector:
    def detect(environment: Mapping[str, str]) -> Told | None:
        try:
            return value()(environment)
        except Exception as error:
            # Anything may be wrong in code that is not ours, and the user must learn in whose.
            raise ConfigError(f"--from-env {name} failed: {describe(error)}") from error

    return detect


def _registered() -> dict[str, Callable[[], Detector]]:
    # Imported here: it costs as much as half of `elasticrun --help`.
    from importlib.metadata import entry_points

    return {point.name: point.load for point in entry_points(group=GROUP)}
