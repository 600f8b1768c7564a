"""What must be alike on all ranks, and from start to start, for weights to be bitwise equal.

What can be read off is compared, and named where it differs. What cannot (that the program draws
no other random numbers, that its kernels give the same bits each time) stands in
docs/same_weights.md.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import ConfigError, NotReproducible
from .exchange import gather_plain

ADVICE = {
    "threads": "call torch.set_num_threads(1), or another fixed number, before training;"
    " launchers choose it by the number of workers on a node",
    "weights": "load the same checkpoint on every rank, or seed torch alike before making them",
}
"""What to do about a difference, where the name does not say it."""


def conditions(parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """What this process computes with: plain values that may be saved."""
    devices = {parameter.device.type for parameter in parameters.values()}
    return {
        "torch": torch.__version__.partition("+")[0],
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "devices": sorted(torch.cuda.get_device_name() if d == "cuda" else d for d in devices),
        "matmul precision": torch.get_float32_matmul_precision(),
    }


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The names and values that differ, the first one's first, and what to do; None if none do."""
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    if not names:
        return None
    found = ", ".join(f"{name} is {one.get(name)} and {other.get(name)}" for name in names)
    advice = "; ".join(ADVICE[name] for name in names if name in ADVICE)
    return f"{found} ({advice})" if advice else found


def check_device(parameters: Mapping[str, Tensor]) -> None:
    """Refuse a GPU whose kernels may give other bits each time.

    Raises:
        ConfigError: says what to call.
    """
    if not any(parameter.device.type == "cuda" for parameter in parameters.values()):
        return
    if not torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.benchmark:
        raise ConfigError(
            "on a GPU, kernels give other bits each time: call"
            " torch.use_deterministic_algorithms(True), leave torch.backends.cudnn.benchmark"
            " False, and set CUBLAS_WORKSPACE_CONFIG=:4096:8"
        )


def check_ranks_agree(mine: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """Refuse to train where the ranks do not begin alike. Called by all ranks.

    Raises:
        NotReproducible: on every rank, with the same sentence, since all of them have to end.
    """
    if not dist.is_initialized():
        return
    everyone = gather_plain(dict(mine), group)
    for rank, theirs in enumerate(everyone):
        found = differences(everyone[0], theirs)
        if found:
            raise NotReproducible(f"ranks 0 and {rank} differ: {found}")


def digest_of(model: nn.Module) -> str:
    """Of all weights and buffers, names and bits: BLAKE2b, in hexadecimal."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        plain = tensor.detach().cpu().contiguous()
        size = plain.numel() * plain.element_size()
        digest.update((ctypes.c_char * size).from_address(plain.data_ptr()) if size else b"")
    return digest.hexdigest()


Buffers = dict[str, tuple[int, int]]
"""Of each buffer, which tensor it is and how often that was written to."""


def buffers_of(model: nn.Module) -> Buffers:
    """What would show a change of a buffer."""
    return {name: (id(buffer), buffer._version) for name, buffer in model.named_buffers()}


def check_buffers(model: nn.Module, before: Buffers, worker: int) -> Buffers:
    """What they are now, or a refusal where a logical worker changed one: no other rank sees that.

    Raises:
        NotReproducible: names the buffer and its module.
    """
    after = buffers_of(model)
    for name in after.keys() | before.keys():
        if after.get(name) != before.get(name):
            place = name.rpartition(".")[0]
            kind = type(model.get_submodule(place)).__name__
            raise NotReproducible(
                f"logical worker {worker} changed the buffer {name} of a {kind}: it would come to"
                " depend on which logical workers this rank computes. Use a module without"
                " running statistics (track_running_stats=False, GroupNorm, LayerNorm), or put it"
                " into eval mode"
            )
    return after


def seed_all(seed: int, parameters: Iterable[Tensor]) -> None:
    """Seed the generators of the CPU and of all devices of the kinds that the parameters are on.

    `torch.manual_seed` does so, too, but takes 0.4 ms to keep it in mind for all other kinds.
    """
    torch.default_generator.manual_seed(seed)
    for kind in {parameter.device.type for parameter in parameters} - {"cpu"}:
        module = torch.get_device_module(kind)
        getattr(module, "manual_seed_all", module.manual_seed)(seed)
