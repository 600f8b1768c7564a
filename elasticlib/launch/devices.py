"""How many workers --nproc-per-node means, where it names a kind of device.

torch is imported only for those who ask for devices to be counted; what it does not see is refused
with what it does see.
"""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from ..workers.processors import count_cores

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

    found = _accelerators(torch)
    if text == "auto":
        return max(found.values(), default=0) or count_cores()
    kind = "cuda" if text == "gpu" else text
    if found.get(kind):
        return found[kind]
    names = ("cuda", "xpu", torch._C._get_privateuse1_backend_name())
    if kind not in names:
        raise ConfigError(f"--nproc-per-node is {KINDS}, got {text!r}")
    here = ", ".join(f"{count} {name}" for name, count in found.items()) or "no accelerator"
    raise ConfigError(
        f"--nproc-per-node {text}: torch {torch.__version__} sees no {text.upper()} on this "
        f"machine; it sees {here} and {count_cores()} processors (cpu)"
    )


def _accelerators(torch: Any) -> dict[str, int]:
    """By kind, as torch calls it. A torch has one kind at a time."""
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None:  # older than 2.6
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return {"cuda": count} if count else {}
    if not accelerator.is_available():
        return {}
    return {accelerator.current_accelerator().type: accelerator.device_count()}
