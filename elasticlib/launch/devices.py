"""How many workers --nproc-per-node means, where it names a kind of device.

torch is imported only for those who ask for devices to be counted; what it does not see is refused
with what it does see.
"""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from ..workers.cpu import count_cores

KINDS = "a number, cpu, gpu, xpu, auto, or the name of a backend that torch was given"


def worker_count(text: str) -> int:
    """`auto` is all accelerators of the kind that torch sees, and processors where it sees none.

    Raises:
        ConfigError: there are none of these here, or it is no such word.
    """
    try:
        return int(text)
    except ValueError:
        pass
    if text == "cpu":
        return count_cores()
    if not text.isidentifier():
        raise ConfigError(f"--nproc-per-node is {KINDS}, got {text!r}")
    import torch

    if text == "auto":
        return _accelerators(torch) or count_cores()
    own = torch._C._get_privateuse1_backend_name()
    kind = "cuda" if text == "gpu" else text
    counts = {name: _count(torch, name) for name in ("cuda", "xpu", own)}
    if kind not in counts:
        raise ConfigError(f"--nproc-per-node is {KINDS}, got {text!r}")
    if counts[kind]:
        return counts[kind]
    here = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    raise ConfigError(
        f"--nproc-per-node {text}: torch {torch.__version__} sees no {text.upper()} on this "
        f"machine; it sees {here or 'no accelerator'} and {count_cores()} processors (cpu)"
    )


def _accelerators(torch: Any) -> int:
    """Those of the kind that this torch prefers."""
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None:  # older than 2.6
        return _count(torch, "cuda")
    return int(accelerator.device_count()) if accelerator.is_available() else 0


def _count(torch: Any, kind: str) -> int:
    devices = getattr(torch, kind, None)
    return int(devices.device_count()) if devices is not None and devices.is_available() else 0
