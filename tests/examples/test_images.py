"""The image example in one process: order and augmentation of the images, and one step."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from elasticlib import ignore_signals_worker_init
from elasticlib.errors import ConfigError
from elasticlib.examples import imagenet
from elasticlib.examples.imagenet import ImageDataset, build_model, draw_images


def save_image(directory: Path, name: str, colour: tuple[int, int, int] = (9, 9, 9)) -> Path:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 4), colour).save(path)
    return path


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "drawn"
    draw_images(folder, 32, 32)
    return folder


def test_images_and_classes_are_sorted_by_the_bytes_of_their_names(tmp_path: Path) -> None:
    names = ["b/10.png", "b/9.PNG", "a/é.jpeg", "a/z.bmp", "b/1.png", "Z/x.jpg"]
    for name in names:
        save_image(tmp_path, name)
    save_image(tmp_path, "outside.png")
    save_image(tmp_path, "a/.hidden.png")
    save_image(tmp_path, ".cache/1.png")
    (tmp_path / "a/notes.txt").write_text("cats")
    images = ImageDataset(tmp_path, 4)
    assert images.classes == ["Z", "a", "b"]
    assert images.names == sorted(names, key=os.fsencode)
    assert [images[index][1] for index in range(len(images))] == [0, 1, 1, 2, 2, 2]


def test_a_directory_without_images_and_other_validation_classes_are_rejected(
    tmp_path: Path,
) -> None:
    for split in ("none", "train"):
        with pytest.raises(ConfigError, match=rf"/{split} has no images: expected files like "):
            ImageDataset(tmp_path / split, 4)
        (tmp_path / "train/cat").mkdir(parents=True, exist_ok=True)
    save_image(tmp_path, "train/cat/1.png")
    save_image(tmp_path, "val/dog/1.png")
    args = imagenet.parse_args([str(tmp_path)])
    args.device = torch.device("cpu")
    with pytest.raises(ConfigError, match=r"/val has other classes than .*/train"):
        imagenet.Training(args)


@pytest.mark.parametrize("damage", ["truncated", "text", "empty", "missing", "directory"])
def test_a_file_that_is_not_an_image_is_named_in_the_error(tmp_path: Path, damage: str) -> None:
    good = save_image(tmp_path, "cat/1.png")
    bad = tmp_path / "cat/2.png"
    content = good.read_bytes()
    bad.write_bytes({"truncated": content[:-30], "text": b"a cat"}.get(damage, b""))
    images = ImageDataset(tmp_path, 4)
    if damage in ("missing", "directory"):
        bad.unlink()
    if damage == "directory":
        bad.mkdir()
    workers = 1 if damage == "truncated" else 0
    loader = DataLoader(images, num_workers=workers, worker_init_fn=ignore_signals_worker_init)
    with pytest.raises(ValueError, match=r"cat/2\.png cannot be read as an image \(\w+: .*\):"):
        list(loader)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_images_in_other_pixel_modes_are_converted_to_rgb(tmp_path: Path, mode: str) -> None:
    (tmp_path / "x").mkdir()
    Image.new(mode, (5, 7)).save(tmp_path / "x" / "1.tif")
    assert ImageDataset(tmp_path, 4)[0][0].shape == (3, 4, 4)


def test_augmentation_depends_only_on_seed_epoch_and_index(drawn: Path) -> None:
    def augmented(seed: int, epoch: int, order: range, workers: int = 0) -> torch.Tensor:
        images = ImageDataset(drawn / "train", 8, seed)
        images.epoch = epoch
        batches = DataLoader(images, 8, sampler=list(order), num_workers=workers)
        items = dict(zip(order, torch.cat([x for x, _ in batches]), strict=True))
        return torch.stack([items[number] for number in sorted(items)])

    forward = range(32)
    expected = augmented(0, 3, forward)
    random.seed(5)
    torch.manual_seed(5)
    assert torch.equal(expected, augmented(0, 3, forward[::-1], workers=2))
    assert torch.equal(expected[20:], augmented(0, 3, forward[20:]))
    # Other images, epochs and seeds have other augmentations.
    images = ImageDataset(drawn / "train", 8)
    images.epoch, image = 3, Image.open(images.directory / images.names[0])
    assert not torch.equal(images.augment(image, 0), images.augment(image, 1))
    assert not any(
        torch.equal(*pair) for pair in zip(expected, augmented(0, 4, forward), strict=True)
    )
    assert not any(
        torch.equal(*pair) for pair in zip(expected, augmented(1, 3, forward), strict=True)
    )


class FakeImage:
    """An image with the methods that `augment` needs. It records the box of the crop."""

    def __init__(self, width: int, height: int) -> None:
        self.size = (width, height)

    def resize(
        self, size: tuple[int, int], _: object, box: tuple[float, float, float, float]
    ) -> Image.Image:
        self.box = box
        return Image.new("RGB", size)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(), st.sampled_from([None, 3]))
def test_a_crop_is_within_the_image_and_not_empty(
    width: int, height: int, seed: int, epoch: int | None
) -> None:
    images = ImageDataset.__new__(ImageDataset)
    images.size, images.seed, images.epoch = 2, seed, epoch
    image = FakeImage(width, height)
    images.augment(image, 0)  # type: ignore[arg-type]
    left, upper, right, lower = image.box
    assert 0 <= left < right <= width
    assert 0 <= upper < lower <= height


def test_a_center_crop_is_normalized(tmp_path: Path) -> None:
    save_image(tmp_path, "a/1.png", (255, 0, 51))
    pixel = ImageDataset(tmp_path, 4)[0][0]
    expected = torch.tensor([(1 - 0.485) / 0.229, -0.456 / 0.224, (0.2 - 0.406) / 0.225])
    torch.testing.assert_close(pixel, expected[:, None, None].expand(3, 4, 4))


def test_half_of_the_images_are_flipped(tmp_path: Path) -> None:
    # A gradient from left to right shows whether the image is flipped.
    (tmp_path / "a").mkdir()
    gradient = Image.linear_gradient("L").rotate(90)
    gradient.save(tmp_path / "a/1.png")
    images, num_flipped = ImageDataset(tmp_path, 8), 0
    for images.epoch in range(200):
        picture = images[0][0][0]
        num_flipped += bool(picture[:, 0].mean() > picture[:, -1].mean())
    assert 70 < num_flipped < 130


def test_synthetic_images_are_reproducible_and_not_drawn_again(drawn: Path, tmp_path: Path) -> None:
    again = tmp_path / "a/b/again"
    draw_images(again, 32, 32)
    files = sorted(path.relative_to(drawn) for path in drawn.rglob("*.png"))
    assert len(files) == 32 + 8
    assert [(again / file).read_bytes() for file in files] == [
        (drawn / file).read_bytes() for file in files
    ]
    assert sorted(path.name for path in again.parent.iterdir()) == ["again"]
    (again / files[0]).unlink()
    draw_images(again, 32, 32)
    assert not (again / files[0]).exists()


@pytest.mark.parametrize("size", [8, 31, 64])
def test_the_small_network_accepts_any_image_size_and_an_empty_batch(size: int) -> None:
    model = build_model("small", 7)
    assert model(torch.randn(3, 3, size, size)).shape == (3, 7)
    empty = model(torch.randn(0, 3, size, size))
    empty.sum().backward()
    assert empty.shape == (0, 7)
    assert not any(weights.grad.any() for weights in model.parameters())  # type: ignore[union-attr]
    assert not list(model.buffers()), "running statistics would depend on the world size"


TORCHVISION = """
from torch import nn

def get_model(name, *, num_classes, norm_layer):
    return nn.Sequential(nn.Conv2d(3, 64, 3), norm_layer(64), nn.Linear(8, num_classes))
"""


def test_networks_of_torchvision_use_group_normalization(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This is a substitute, because torchvision would have to match the installed torch.
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text("")
    (tmp_path / "torchvision/models.py").write_text(TORCHVISION)
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    model = build_model("resnet18", 7)
    assert model(torch.randn(2, 3, 10, 10)).shape == (2, 64, 8, 7)
    assert not list(model.buffers())


@pytest.fixture
def single_rank() -> Iterator[None]:
    """A process group with one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize(("amp", "min_error", "max_error"), [([], 0, 1e-5), (["--amp"], 1e-4, 0.2)])
def test_micro_batches_give_the_gradient_and_the_sums_of_the_whole_batch(
    drawn: Path, amp: list[str], min_error: float, max_error: float
) -> None:
    torch.manual_seed(1)
    x, y = torch.randn(7, 3, 16, 16), torch.randint(0, 4, (7,))
    results = []
    for size in ("7", "3"):
        flags = ["-b", "7", "--max-micro-batch", size, "--lr", "0", *amp]
        args = imagenet.parse_args([str(drawn), *flags])
        args.device = torch.device("cpu")
        training = imagenet.Training(args)
        model = DistributedDataParallel(training.model)
        training.train_step(model, x, y)
        sums = training.train_step(model, x, y)  # without gradients of the first step
        assert training.step == 2
        results.append((torch.cat([w.grad.flatten() for w in training.model.parameters()]), sums))
        del model
    (whole, sums), (chunks, sums_of_chunks) = results
    assert (whole - chunks).norm() / whole.norm() < max_error
    torch.testing.assert_close(sums_of_chunks, sums, rtol=max_error, atol=0)
    training.model.zero_grad()
    loss = cross_entropy(training.model(x), y)
    loss.backward()
    assert sums[0].item() == pytest.approx(7 * loss.item(), rel=max_error)
    assert sums[2].item() == 7
    plain = torch.cat([w.grad.flatten() for w in training.model.parameters()])
    assert min_error <= (whole - plain).norm() / plain.norm() < max_error


def test_learning_rate_has_a_warm_up_and_steps() -> None:
    args = imagenet.parse_args(["data", "--lr", "0.4", "--warmup-epochs", "2", "--lr-step", "10"])
    rates = [imagenet.learning_rate(args, done) for done in (0, 1, 2, 9.99, 10, 25)]
    assert rates == pytest.approx([0.004, 0.202, 0.4, 0.4, 0.04, 0.004])


@pytest.mark.usefixtures("single_rank")
def test_learning_rate_is_proportional_to_the_batch_size(drawn: Path) -> None:
    # Eight images have the same gradient as the same images twice.
    torch.manual_seed(1)
    x, y, moved = torch.randn(8, 3, 16, 16), torch.randint(0, 4, (8,)), []
    for times in (1, 2):
        flags = ["-b", str(8 * times), "--lr", "0.8", "--weight-decay", "0"]
        args = imagenet.parse_args([str(drawn), *flags])
        args.device = torch.device("cpu")
        training = imagenet.Training(args)
        before = [weights.detach().clone() for weights in training.model.parameters()]
        model = DistributedDataParallel(training.model)
        training.train_step(model, x.repeat(times, 1, 1, 1), y.repeat(times))
        pairs = zip(before, training.model.parameters(), strict=True)
        moved.append(torch.cat([(one - other).flatten() for one, other in pairs]).norm().item())
    assert moved[1] == pytest.approx(2 * moved[0], rel=1e-3)


def test_evaluate_requires_a_checkpoint(
    drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    flags = ["--image-size", "8", "--evaluate", "--checkpoints", str(tmp_path / "none")]
    with pytest.raises(ConfigError, match=r"--evaluate needs a checkpoint, but .*/none has none"):
        imagenet.main(imagenet.parse_args([str(drawn), *flags]))
    dist.destroy_process_group()


@pytest.mark.parametrize("flags", [["-b", "0"], ["-j", "-1"], ["--arch", "small", "--resume", "x"]])
def test_invalid_flags_are_rejected(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        imagenet.parse_args(["data", *flags])
