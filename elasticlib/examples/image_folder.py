"""Folders of images as datasets: SPLIT/CLASS/NAME.png, in an order that no file system decides.

What happens to an image at random depends on seed, epoch and the image's number alone, so a
resumed or resized run sees what the undisturbed one would have seen. Needs Pillow.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import random
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from elasticlib.errors import ConfigError, ElasticError, StateMismatch

if TYPE_CHECKING:
    from PIL.Image import Image

ENDINGS = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Of the names of images, in either case."""
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of red, green and blue from 0 to 1, over ImageNet."""

Prepare = Callable[["Image", int], Tensor]
"""What makes a tensor of an image, which is told the image's number, too."""


class BrokenImage(ElasticError):
    """A file that is named as an image cannot be read as one."""


@functools.cache
def pillow(module: str) -> Any:
    """A module of Pillow, `Image` or `ImageDraw`.

    Raises:
        ConfigError: it is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(f"PIL.{module}")
    except ImportError as error:
        raise ConfigError(
            f"reading images needs Pillow ({error}): pip install 'elasticlib[images]'"
        ) from error


class ImageFolder(Dataset[tuple[Any, int]]):
    """The images of one split, numbered by class and name, both in the order of their bytes.

    Names are kept in one piece, so that a million of them are a hundred bytes each, and processes
    that are forked from this one share them.

    Args:
        folder: has a folder for each class; files beside these are of no class, and left alone.
        classes: the names that labels 0, 1, ... stand for; by default those of the folders.

    Raises:
        ConfigError: there is no such folder, or no class in it; a class folder is empty, is not
            one of `classes`, or has a file in it that is not named as an image.
    """

    def __init__(self, folder: str | Path, classes: tuple[str, ...] | None = None) -> None:
        self.folder = Path(folder)
        found = _class_folders(self.folder)
        self.classes = found if classes is None else classes
        unknown = sorted(set(found) - set(self.classes))
        if unknown:
            raise ConfigError(
                f"{self.folder / unknown[0]} is of no class that is trained on: "
                f"those are {_some(self.classes)}"
            )
        names, labels = [], []
        for name in found:
            images = _images_in(self.folder / name)
            names += [f"{name}/{image}".encode() for image in images]
            labels += [self.classes.index(name)] * len(images)
        self._names = b"".join(names)
        self._ends = torch.tensor([len(name) for name in names]).cumsum(0)
        self._labels = torch.tensor(labels)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Image, int]:
        return self.open(index), self.label(index)

    def path(self, index: int) -> Path:
        """Of the image with this number."""
        start = int(self._ends[index - 1]) if index else 0
        return self.folder / self._names[start : int(self._ends[index])].decode()

    def label(self, index: int) -> int:
        """The class of the image with this number, as a place in `classes`."""
        return int(self._labels[index])

    def open(self, index: int) -> Image:
        """The image with this number, read to its end, in red, green and blue.

        Raises:
            BrokenImage: the file is cut short, damaged, no image, or cannot be read.
        """
        path = self.path(index)
        image = pillow("Image")
        try:
            with image.open(path) as file:
                return file.convert("RGB")  # type: ignore[no-any-return]
        except Exception as error:  # a decoder may raise anything on what is damaged
            raise BrokenImage(
                f"{path} cannot be read as an image ({type(error).__name__}: {error}): "
                "replace it, or take it out of the data and start the epoch again"
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """What tells these images from others: how many, and a sum over their names."""
        return {"images": len(self), "names": zlib.crc32(self._names)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See that a checkpoint is of these images; there is nothing to change.

        Raises:
            StateMismatch: it is of others, whose numbers mean other images.
        """
        if dict(state) != self.state_dict():
            raise StateMismatch(
                f"{self.folder} has {len(self)} images (names {zlib.crc32(self._names):08x}), and "
                f"the checkpoint is of {state['images']} ({state['names']:08x}): give the folder "
                "that was trained on, or another one for checkpoints"
            )


class Images(Dataset[tuple[Tensor, int, int]]):
    """Image, label and number of each image of a folder, prepared by `prepare`."""

    def __init__(self, folder: ImageFolder, prepare: Prepare) -> None:
        self.folder, self._prepare = folder, prepare

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        image, label = self.folder[index]
        return self._prepare(image, index), label, index


class Augment:
    """A random part of an image, mirrored or not: of 8 to 100 % of its area, as is usual.

    Args:
        size: of the square that it is brought to, in pixels.
        seed, epoch: with the image's number, all that chance depends on.
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self.size, self.seed, self.epoch = size, seed, epoch

    def __call__(self, image: Image, index: int) -> Tensor:
        # Seeded by text, which Python hashes the same way everywhere.
        chance = random.Random(f"{self.seed}/{self.epoch}/{index}")
        box = random_box(image.width, image.height, chance)
        tensor = cut(image, box, self.size)
        return tensor.flip(2) if chance.random() < 0.5 else tensor


class Center:
    """The middle of an image, seven eighths of its shorter side; nothing is left to chance."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Image, index: int) -> Tensor:  # noqa: ARG002 - as Augment's
        return cut(image, center_box(image.width, image.height), self.size)


Box = tuple[float, float, float, float]
"""Left, upper, right and lower edge, in pixels."""


def random_box(width: int, height: int, chance: random.Random) -> Box:
    """A part of 8 to 100 % of the area, 3:4 to 4:3 in shape; the middle where none fits."""
    for _ in range(10):
        area = width * height * chance.uniform(0.08, 1.0)
        ratio = math.exp(chance.uniform(math.log(3 / 4), math.log(4 / 3)))
        wide, high = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if wide <= width and high <= height:
            left, upper = chance.uniform(0, width - wide), chance.uniform(0, height - high)
            # Rounding must not put an edge outside.
            return left, upper, min(left + wide, width), min(upper + high, height)
    return center_box(width, height, 1.0)


def center_box(width: int, height: int, part: float = 7 / 8) -> Box:
    """The square in the middle whose side is `part` of the image's shorter one."""
    side = min(width, height) * part
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


def cut(image: Image, box: Box, size: int) -> Tensor:
    """The box as a tensor of 3 x size x size, each colour with mean 0 and deviation 1 or so."""
    bilinear = pillow("Image").Resampling.BILINEAR
    resized = image.resize((size, size), bilinear, box, reducing_gap=2.0)
    pixels = torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8)
    colours = pixels.view(size, size, 3).permute(2, 0, 1).float().div_(255)
    return colours.sub_(_column(MEAN)).div_(_column(DEVIATION))


def _column(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values)[:, None, None]


def _class_folders(folder: Path) -> tuple[str, ...]:
    try:
        with os.scandir(folder) as entries:
            found = [entry.name for entry in entries if entry.is_dir() and _shown(entry.name)]
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be read as a folder of images ({error.strerror}): it must have a "
            "folder for each class, as train/cat/1.png"
        ) from error
    if not found:
        raise ConfigError(
            f"{folder} has no images: it must have a folder for each class, as train/cat/1.png"
        )
    return tuple(sorted(found, key=os.fsencode))


def _images_in(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        found = sorted((entry.name for entry in entries if _shown(entry.name)), key=os.fsencode)
    if not found:
        raise ConfigError(f"{folder} has no images: put some in, or delete the folder")
    for name in found:
        if not name.lower().endswith(ENDINGS):
            raise ConfigError(
                f"{folder / name} is not named as an image, which end in {_some(ENDINGS)}: "
                "take it out of the class's folder"
            )
    return found


def _shown(name: str) -> bool:
    return not name.startswith(".")


def _some(names: tuple[str, ...], most: int = 10) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
