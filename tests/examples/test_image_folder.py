"""Folders of images: their order, what is said of a bad one, and what chance does to an image."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader

from elasticlib import ignore_signals_worker_init
from elasticlib.errors import ConfigError, ElasticError, StateMismatch
from elasticlib.examples.drawn_shapes import SHAPES, draw_shapes
from elasticlib.examples.image_folder import (
    Augment,
    BrokenImage,
    Center,
    ImageFolder,
    Images,
    center_box,
    random_box,
)


def put(folder: Path, name: str, colour: tuple[int, int, int] = (9, 9, 9)) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 4), colour).save(path)
    return path


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "shapes"
    draw_shapes(folder, 32)
    return folder


def test_numbers_and_labels_follow_the_bytes_of_names_whatever_was_there_first(
    tmp_path: Path,
) -> None:
    names = ["b/10.png", "b/9.PNG", "a/é.jpeg", "a/z.bmp", "b/1.png", "Z/x.jpg"]
    for name in names:
        put(tmp_path, name)
    put(tmp_path, "beside.png")
    put(tmp_path, "a/.hidden.png")
    (tmp_path / ".cache").mkdir()
    images = ImageFolder(tmp_path)
    assert images.classes == ("Z", "a", "b")
    found = [str(images.path(index).relative_to(tmp_path)) for index in range(len(images))]
    assert found == sorted(names, key=os.fsencode)
    assert [images.label(index) for index in range(len(images))] == [0, 1, 1, 2, 2, 2]


def test_held_out_images_are_labelled_as_those_that_are_trained_on(tmp_path: Path) -> None:
    """Though a class has none of them, which would shift the labels after it."""
    put(tmp_path, "val/b/1.png")
    put(tmp_path, "val/c/1.png")
    held_out = ImageFolder(tmp_path / "val", ("a", "b", "c"))
    assert [held_out.label(0), held_out.label(1)] == [1, 2]
    with pytest.raises(
        ConfigError, match=r"val/c is of no class that is trained on: those are a, b"
    ):
        ImageFolder(tmp_path / "val", ("a", "b"))


def test_a_folder_that_cannot_be_is_named_with_the_rule(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none cannot be read .*\(No such file or directory\)"):
        ImageFolder(tmp_path / "none")
    file = put(tmp_path, "one.png")
    with pytest.raises(ConfigError, match=r"one\.png cannot be read .*\(Not a directory\)"):
        ImageFolder(file)
    with pytest.raises(ConfigError, match="has no images: it must have a folder for each class"):
        ImageFolder(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"/empty has no images: put some in, or delete"):
        ImageFolder(tmp_path)
    (tmp_path / "empty/notes.txt").write_text("cats")
    with pytest.raises(ConfigError, match=r"empty/notes\.txt is not named as an image"):
        ImageFolder(tmp_path)


@pytest.mark.parametrize("damage", ["cut short", "text", "nothing", "no file", "a folder"])
def test_what_is_no_image_is_named_by_the_loader_worker_that_reads_it(
    tmp_path: Path, damage: str
) -> None:
    good = put(tmp_path, "cat/1.png")
    bad = tmp_path / "cat/2.png"
    whole = good.read_bytes()
    bad.write_bytes({"cut short": whole[:-30], "text": b"a cat"}.get(damage, b""))
    images = ImageFolder(tmp_path)
    if damage in ("no file", "a folder"):
        bad.unlink()
    if damage == "a folder":
        bad.mkdir()
    workers = 1 if damage == "cut short" else 0
    loader = DataLoader(
        Images(images, Center(4)),
        num_workers=workers,
        worker_init_fn=ignore_signals_worker_init,
    )
    with pytest.raises(BrokenImage, match=r"cat/2\.png cannot be read as an image \(\w+: .*\):"):
        list(loader)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_images_of_other_kinds_of_pixels_are_read_as_colours(tmp_path: Path, mode: str) -> None:
    (tmp_path / "x").mkdir()
    Image.new(mode, (5, 7)).save(tmp_path / "x" / "1.tif")
    assert Images(ImageFolder(tmp_path), Center(4))[0][0].shape == (3, 4, 4)


def test_a_checkpoint_of_other_images_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "a/1.png")
    put(tmp_path, "a/2.png")
    images = ImageFolder(tmp_path)
    images.load_state_dict(ImageFolder(tmp_path).state_dict())
    (tmp_path / "a/2.png").rename(tmp_path / "a/3.png")
    with pytest.raises(StateMismatch, match=r"has 2 images .* the checkpoint is of 2 "):
        ImageFolder(tmp_path).load_state_dict(images.state_dict())


def test_chance_depends_on_seed_epoch_and_number_alone(shapes: Path) -> None:
    images = ImageFolder(shapes / "train")

    def seen(seed: int, epoch: int, order: range, workers: int = 0) -> torch.Tensor:
        loader = DataLoader(
            Images(images, Augment(8, seed, epoch)), 8, sampler=list(order), num_workers=workers
        )
        found = {
            int(number): image for batch in loader for image, _, number in zip(*batch, strict=True)
        }
        return torch.stack([found[number] for number in sorted(found)])

    forward = range(len(images))
    whole = seen(0, 3, forward)
    random.seed(5)
    torch.manual_seed(5)
    assert torch.equal(whole, seen(0, 3, forward[::-1], workers=2))
    assert torch.equal(whole[20:], seen(0, 3, forward[20:]))
    # No two images or epochs have the same chances.
    augment, image = Augment(8, 0, 3), images.open(0)
    assert not torch.equal(augment(image, 0), augment(image, 1))
    assert not any(torch.equal(*pair) for pair in zip(whole, seen(0, 4, forward), strict=True))
    assert not any(torch.equal(*pair) for pair in zip(whole, seen(1, 3, forward), strict=True))


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers())
def test_a_box_is_within_the_image_and_has_an_area(width: int, height: int, seed: int) -> None:
    for box in (random_box(width, height, random.Random(seed)), center_box(width, height)):
        left, upper, right, lower = box
        assert 0 <= left < right <= width
        assert 0 <= upper < lower <= height
    left, upper, right, lower = random_box(width, height, random.Random(seed))
    part = (right - left) * (lower - upper) / (width * height)
    whole = min(width, height) ** 2 / (width * height)
    assert 0.079 < part < 1.001 or part == pytest.approx(whole)


def test_a_middle_is_what_was_there_in_the_units_of_imagenet(tmp_path: Path) -> None:
    put(tmp_path, "a/1.png", (255, 0, 51))
    pixel = Images(ImageFolder(tmp_path), Center(4))[0][0]
    expected = torch.tensor([(1 - 0.485) / 0.229, -0.456 / 0.224, (0.2 - 0.406) / 0.225])
    torch.testing.assert_close(pixel, expected[:, None, None].expand(3, 4, 4))


def test_half_of_the_images_are_mirrored(tmp_path: Path) -> None:
    """A gradient from left to right tells which."""
    (tmp_path / "a").mkdir()
    gradient = Image.linear_gradient("L").rotate(90)
    gradient.save(tmp_path / "a/1.png")
    images = ImageFolder(tmp_path)
    turned = 0
    for epoch in range(200):
        picture = Augment(8, 0, epoch)(images.open(0), 0)[0]
        turned += bool(picture[:, 0].mean() > picture[:, -1].mean())
    assert 70 < turned < 130


def test_drawn_images_are_the_same_anywhere_and_left_alone_once_there(
    shapes: Path, tmp_path: Path
) -> None:
    again = tmp_path / "a/b/again"
    draw_shapes(again, 32)
    files = sorted(path.relative_to(shapes) for path in shapes.rglob("*.png"))
    assert len(files) == 32 + 8
    assert [(again / file).read_bytes() for file in files] == [
        (shapes / file).read_bytes() for file in files
    ]
    assert ImageFolder(again / "train").classes == tuple(SHAPES)
    assert sorted(path.name for path in again.parent.iterdir()) == ["again"]
    shutil.rmtree(again / "val")
    draw_shapes(again, 32)
    assert not (again / "val").exists()
    with pytest.raises(ConfigError, match="has 32 drawn images, and 64 were asked for"):
        draw_shapes(again, 64)
    with pytest.raises(ElasticError, match="need at least 16 images to draw, got 15"):
        draw_shapes(tmp_path / "few", 15)
