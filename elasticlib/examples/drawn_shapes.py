"""A small folder of images for who has no ImageNet at hand: coloured shapes, a class for each.

The same arguments draw the same images anywhere, and a folder is there whole or not at all.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from elasticlib.errors import ConfigError
from elasticlib.examples.image_folder import pillow

SHAPES = {
    "circle": (60, (220, 60, 60)),
    "cross": (4, (70, 120, 230)),
    "square": (4, (80, 190, 90)),
    "triangle": (3, (230, 180, 50)),
}
"""The classes: how many corners the shape has (a cross is a square's diagonals), and its colour."""


def draw_shapes(folder: str | Path, samples: int, *, size: int = 32, seed: int = 0) -> None:
    """Draw `folder`/train with so many images, and `folder`/val with a quarter as many.

    Of a folder that is there already nothing is changed. Several processes may draw the same one.

    Args:
        samples: of the training split, over all classes, dealt to them in turn.
        size: of the square images, in pixels.
        seed: of places, sizes, shades and noise.

    Raises:
        ConfigError: `samples` is less than 16, four of each class; the folder that is there has
            another number of images; or Pillow is missing.
    """
    folder = Path(folder)
    if samples < 4 * len(SHAPES):
        raise ConfigError(f"need at least {4 * len(SHAPES)} images to draw, got {samples}")
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            _draw_split(aside / "train", samples, size, f"{seed}/train")
            _draw_split(aside / "val", samples // 4, size, f"{seed}/val")
            aside.chmod(0o755)
            _put(aside, folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    there = len(list(folder.glob("train/*/*.png")))
    if there != samples:
        raise ConfigError(
            f"{folder} has {there} drawn images, and {samples} were asked for: name another "
            "folder, or delete it"
        )


def _put(aside: Path, folder: Path) -> None:
    try:
        os.rename(aside, folder)
    except OSError:
        if not folder.exists():  # else somebody else has drawn the same
            raise


def _draw_split(folder: Path, samples: int, size: int, seed: str) -> None:
    names = list(SHAPES)
    for name in names:
        (folder / name).mkdir(parents=True)
    for number in range(samples):
        name = names[number % len(names)]
        image = draw_shape(name, size, random.Random(f"{seed}/{number}"))
        image.save(folder / name / f"{number:06}.png")


def draw_shape(name: str, size: int, chance: random.Random) -> Any:
    """One image of a class of SHAPES: its place, size, turn and shades are chance."""
    corners, colour = SHAPES[name]
    ground = tuple(chance.randrange(90) for _ in range(3))
    image = pillow("Image").new("RGB", (size, size), ground)
    radius = size * chance.uniform(0.25, 0.4)
    middle = [chance.uniform(radius, size - radius) for _ in range(2)]
    turn = chance.uniform(0, 2 * math.pi)
    points = [
        (
            middle[0] + radius * math.cos(turn + 2 * math.pi * corner / corners),
            middle[1] + radius * math.sin(turn + 2 * math.pi * corner / corners),
        )
        for corner in range(corners)
    ]
    shade = tuple(min(255, max(0, part + chance.randrange(-40, 41))) for part in colour)
    pen = pillow("ImageDraw").Draw(image)
    if name == "cross":
        for start in range(2):
            pen.line([points[start], points[start + 2]], fill=shade, width=max(1, size // 8))
    else:
        pen.polygon(points, fill=shade)
    return image
