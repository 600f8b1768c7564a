"""The example on images, in one process: their order, what chance does to them, and one step."""

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
from elasticlib.examples.imagenet import Images, build_model, draw_images


def put(folder: Path, name: str, colour: tuple[int, int, int] = (9, 9, 9)) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 4), colour).save(path)
    return path


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "drawn"
    draw_images(folder, 32, 32)
    return folder


def test_numbers_and_labels_follow_the_bytes_of_names_whatever_was_there_first(
    tmp_path: Path,
) -> None:
    names = ["b/10.png", "b/9.PNG", "a/é.jpeg", "a/z.bmp", "b/1.png", "Z/x.jpg"]
    for name in names:
        put(tmp_path, name)
    put(tmp_path, "beside.png")
    put(tmp_path, "a/.hidden.png")
    put(tmp_path, ".cache/1.png")
    (tmp_path / "a/notes.txt").write_text("cats")
    images = Images(tmp_path, 4)
    assert images.classes == ["Z", "a", "b"]
    assert images.names == sorted(names, key=os.fsencode)
    assert [images[index][1] for index in range(len(images))] == [0, 1, 1, 2, 2, 2]


def test_a_folder_without_images_and_other_classes_held_out_are_refused(tmp_path: Path) -> None:
    for split in ("none", "train"):
        with pytest.raises(ConfigError, match=rf"/{split} has no images: it must have some as "):
            Images(tmp_path / split, 4)
        (tmp_path / "train/cat").mkdir(parents=True, exist_ok=True)
    put(tmp_path, "train/cat/1.png")
    put(tmp_path, "val/dog/1.png")
    args = imagenet.parse([str(tmp_path)])
    args.device = torch.device("cpu")
    with pytest.raises(ConfigError, match=r"/val has other classes than .*/train"):
        imagenet.Training(args)


@pytest.mark.parametrize("damage", ["cut short", "text", "nothing", "no file", "a folder"])
def test_what_is_no_image_is_named_by_the_loader_worker_that_reads_it(
    tmp_path: Path, damage: str
) -> None:
    good = put(tmp_path, "cat/1.png")
    bad = tmp_path / "cat/2.png"
    whole = good.read_bytes()
    bad.write_bytes({"cut short": whole[:-30], "text": b"a cat"}.get(damage, b""))
    images = Images(tmp_path, 4)
    if damage in ("no file", "a folder"):
        bad.unlink()
    if damage == "a folder":
        bad.mkdir()
    workers = 1 if damage == "cut short" else 0
    loader = DataLoader(images, num_workers=workers, worker_init_fn=ignore_signals_worker_init)
    with pytest.raises(ValueError, match=r"cat/2\.png cannot be read as an image \(\w+: .*\):"):
        list(loader)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_images_of_other_kinds_of_pixels_are_read_as_colours(tmp_path: Path, mode: str) -> None:
    (tmp_path / "x").mkdir()
    Image.new(mode, (5, 7)).save(tmp_path / "x" / "1.tif")
    assert Images(tmp_path, 4)[0][0].shape == (3, 4, 4)


def test_chance_depends_on_seed_epoch_and_number_alone(drawn: Path) -> None:
    def seen(seed: int, epoch: int, order: range, workers: int = 0) -> torch.Tensor:
        images = Images(drawn / "train", 8, seed)
        images.epoch = epoch
        batches = DataLoader(images, 8, sampler=list(order), num_workers=workers)
        found = dict(zip(order, torch.cat([x for x, _ in batches]), strict=True))
        return torch.stack([found[number] for number in sorted(found)])

    forward = range(32)
    whole = seen(0, 3, forward)
    random.seed(5)
    torch.manual_seed(5)
    assert torch.equal(whole, seen(0, 3, forward[::-1], workers=2))
    assert torch.equal(whole[20:], seen(0, 3, forward[20:]))
    # No two images or epochs have the same chances.
    images = Images(drawn / "train", 8)
    images.epoch, image = 3, Image.open(images.folder / images.names[0])
    assert not torch.equal(images.prepare(image, 0), images.prepare(image, 1))
    assert not any(torch.equal(*pair) for pair in zip(whole, seen(0, 4, forward), strict=True))
    assert not any(torch.equal(*pair) for pair in zip(whole, seen(1, 3, forward), strict=True))


class Sized:
    """An image as far as `prepare` asks, which remembers the box that was cut out."""

    def __init__(self, width: int, height: int) -> None:
        self.size = (width, height)

    def resize(
        self, size: tuple[int, int], _: object, box: tuple[float, float, float, float]
    ) -> Image.Image:
        self.box = box
        return Image.new("RGB", size)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(), st.sampled_from([None, 3]))
def test_a_part_is_within_the_image_and_has_an_area(
    width: int, height: int, seed: int, epoch: int | None
) -> None:
    images = Images.__new__(Images)
    images.size, images.seed, images.epoch = 2, seed, epoch
    image = Sized(width, height)
    images.prepare(image, 0)  # type: ignore[arg-type]
    left, upper, right, lower = image.box
    assert 0 <= left < right <= width
    assert 0 <= upper < lower <= height


def test_a_middle_is_what_was_there_in_the_units_of_imagenet(tmp_path: Path) -> None:
    put(tmp_path, "a/1.png", (255, 0, 51))
    pixel = Images(tmp_path, 4)[0][0]
    expected = torch.tensor([(1 - 0.485) / 0.229, -0.456 / 0.224, (0.2 - 0.406) / 0.225])
    torch.testing.assert_close(pixel, expected[:, None, None].expand(3, 4, 4))


def test_half_of_the_images_are_mirrored(tmp_path: Path) -> None:
    """A gradient from left to right tells which."""
    (tmp_path / "a").mkdir()
    gradient = Image.linear_gradient("L").rotate(90)
    gradient.save(tmp_path / "a/1.png")
    images, turned = Images(tmp_path, 8), 0
    for images.epoch in range(200):
        picture = images[0][0][0]
        turned += bool(picture[:, 0].mean() > picture[:, -1].mean())
    assert 70 < turned < 130


def test_drawn_images_are_the_same_anywhere_and_left_alone_once_there(
    drawn: Path, tmp_path: Path
) -> None:
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
def test_the_small_network_takes_images_of_any_size_and_a_batch_of_none(size: int) -> None:
    model = build_model("small", 7)
    assert model(torch.randn(3, 3, size, size)).shape == (3, 7)
    empty = model(torch.randn(0, 3, size, size))
    empty.sum().backward()
    assert empty.shape == (0, 7)
    assert not any(weights.grad.any() for weights in model.parameters())  # type: ignore[union-attr]
    assert not list(model.buffers()), "a resize would change what it normalises by"


TORCHVISION = """
from torch import nn

def get_model(name, *, num_classes, norm_layer):
    return nn.Sequential(nn.Conv2d(3, 64, 3), norm_layer(64), nn.Linear(8, num_classes))
"""


def test_torchvisions_networks_normalise_within_each_sample_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of torchvision there is a build for each of torch; this has its call."""
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
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("amp", "far", "close"), [([], 0, 1e-5), (["--amp"], 1e-4, 0.2)])
def test_a_batch_in_pieces_has_the_gradient_and_the_sums_of_the_whole(
    drawn: Path, amp: list[str], far: float, close: float
) -> None:
    torch.manual_seed(1)
    x, y = torch.randn(7, 3, 16, 16), torch.randint(0, 4, (7,))
    found = []
    for most in ("7", "3"):
        flags = ["-b", "7", "--max-micro-batch", most, "--lr", "0", *amp]
        args = imagenet.parse([str(drawn), *flags])
        args.device = torch.device("cpu")
        training = imagenet.Training(args)
        parallel = DistributedDataParallel(training.model)
        training.take_step(parallel, x, y)
        sums = training.take_step(parallel, x, y)  # nothing is left of the step before
        assert training.step == 2
        found.append((torch.cat([w.grad.flatten() for w in training.model.parameters()]), sums))
        del parallel
    (whole, sums), (pieces, sums_of_pieces) = found
    assert (whole - pieces).norm() / whole.norm() < close
    torch.testing.assert_close(sums_of_pieces, sums, rtol=close, atol=0)
    training.model.zero_grad()
    loss = cross_entropy(training.model(x), y)
    loss.backward()
    assert sums[0].item() == pytest.approx(7 * loss.item(), rel=close)
    assert sums[2].item() == 7
    plain = torch.cat([w.grad.flatten() for w in training.model.parameters()])
    assert far <= (whole - plain).norm() / plain.norm() < close


def test_the_learning_rate_follows_the_epochs_at_any_world_size() -> None:
    args = imagenet.parse(["data", "--lr", "0.4", "--warmup-epochs", "2", "--lr-step", "10"])
    rates = [imagenet.learning_rate(args, done) for done in (0, 1, 2, 9.99, 10, 25)]
    assert rates == pytest.approx([0.004, 0.202, 0.4, 0.4, 0.04, 0.004])


@pytest.mark.usefixtures("alone")
def test_the_learning_rate_follows_the_batch(drawn: Path) -> None:
    """The same eight images, once and twice, have the same gradient."""
    torch.manual_seed(1)
    x, y, moved = torch.randn(8, 3, 16, 16), torch.randint(0, 4, (8,)), []
    for times in (1, 2):
        flags = ["-b", str(8 * times), "--lr", "0.8", "--weight-decay", "0"]
        args = imagenet.parse([str(drawn), *flags])
        args.device = torch.device("cpu")
        training = imagenet.Training(args)
        before = [weights.detach().clone() for weights in training.model.parameters()]
        parallel = DistributedDataParallel(training.model)
        training.take_step(parallel, x.repeat(times, 1, 1, 1), y.repeat(times))
        pairs = zip(before, training.model.parameters(), strict=True)
        moved.append(torch.cat([(one - other).flatten() for one, other in pairs]).norm().item())
    assert moved[1] == pytest.approx(2 * moved[0], rel=1e-3)


def test_there_must_be_a_checkpoint_to_evaluate(
    drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    flags = ["--image-size", "8", "--evaluate", "--checkpoints", str(tmp_path / "none")]
    with pytest.raises(ConfigError, match=r"--evaluate needs a checkpoint, and .*/none has none"):
        imagenet.main(imagenet.parse([str(drawn), *flags]))
    dist.destroy_process_group()


@pytest.mark.parametrize("flags", [["-b", "0"], ["-j", "-1"], ["--arch", "small", "--resume", "x"]])
def test_flags_that_cannot_be_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        imagenet.parse(["data", *flags])
