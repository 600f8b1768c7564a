"""The models of `imagenet.py`: a small residual network of our own, and torchvision's by name.

Ours normalises within each sample, so its weights do not depend on how a batch is shared out.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from elasticlib.errors import ConfigError

SMALL = "small"
FAMILIES = ("resnet", "resnext", "wide_resnet")


def build_model(arch: str, classes: int) -> nn.Module:
    """An untrained model of images (n x 3 x height x width) to logits (n x classes).

    Args:
        arch: `small`, or the name of one of torchvision's residual networks, as `resnet50`.

    Raises:
        ConfigError: torchvision is missing or cannot be imported, which is said, or it has no
            residual network of that name.
    """
    if arch == SMALL:
        return SmallResNet(classes)
    if not arch.startswith(FAMILIES):
        raise ConfigError(
            f"--arch is {arch!r}, must be {SMALL} or one of torchvision's residual networks, "
            f"whose names begin with {', '.join(FAMILIES)}"
        )
    models = _torchvision_models(arch)
    known = models.list_models(include=[f"{family}*" for family in FAMILIES])
    if arch not in known:
        raise ConfigError(f"--arch is {arch!r}, torchvision has {', '.join(known)}")
    model: nn.Module = models.get_model(arch, weights=None, num_classes=classes)
    return model


def _torchvision_models(arch: str) -> Any:
    try:
        return importlib.import_module("torchvision.models")
    except Exception as error:  # of another build than torch it raises what it likes
        what = " ".join(str(error).split()) or "no reason given"
        raise ConfigError(
            f"--arch {arch} is a model of torchvision, which cannot be imported here "
            f"({type(error).__name__}: {what}): install the torchvision that was built for torch "
            f"{torch.__version__}, or use --arch {SMALL}"
        ) from error


class Block(nn.Module):
    """Two 3 x 3 convolutions, added to their input, which is brought to their size if need be."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for _ in range(2))
        same = stride == 1 and before == width
        self.past = nn.Identity() if same else nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.past(x) + self.norms[1](self.second(inner)))


class SmallResNet(nn.Module):
    """Six convolutions in three blocks behind a first one, 78,000 weights; any size of image."""

    def __init__(self, classes: int, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        pairs = zip((widths[0], *widths), widths, strict=False)
        self.blocks = nn.Sequential(
            *(Block(*pair, 1 if n == 0 else 2) for n, pair in enumerate(pairs))
        )
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.stem(images)).mean((2, 3)))
        return logits
