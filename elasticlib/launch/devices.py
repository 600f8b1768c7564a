"""The number of workers that --nproc-per-node means on this machine."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from ..workers.node_resources import count_usable_cpus

NPROC_RULE = "must be a number, cpu, gpu, xpu, auto, or the name of a registered torch backend"


def worker_count(text: str) -> int:
    """Return the number of workers that a value of --nproc-per-node means.

    `auto` is the number of accelerators of the kind that torch prefers, or of CPU cores if torch
    finds no accelerator.

    Raises:
        ValueError: the text has no meaning. The message is a rule.
        ConfigError: this machine has no such device.
    """
    try:
        return int(text)
    except ValueError:
        pass
    if text == "cpu":
        return count_usable_cpus()
    if not text.isidentifier():
        raise ValueError(NPROC_RULE)
    import torch

    if text == "auto":
        accelerator = torch.accelerator
        count = accelerator.device_count() if accelerator.is_available() else 0
        return int(count) or count_usable_cpus()
    registered = torch._C._get_privateuse1_backend_name()
    kind = "cuda" if text == "gpu" else text
    counts = {name: _count_devices(torch, name) for name in ("cuda", "xpu", registered)}
    if kind not in counts:
        raise ValueError(NPROC_RULE)
    if counts[kind]:
        return counts[kind]
    found = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    raise ConfigError(
        f"torch {torch.__version__} finds no {text.upper()} on this machine (found: "
        f"{found or 'no accelerator'}, {count_usable_cpus()} CPU cores; use cpu), got {text!r}"
    )


def _count_devices(torch: Any, kind: str) -> int:
    devices = getattr(torch, kind, None)
    return int(devices.device_count()) if devices is not None and devices.is_available() else 0
