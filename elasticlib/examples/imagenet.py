"""Train a convolutional network on images, with workers that may crash or be resized.

Usage: `elasticrun --nproc-per-node 2 imagenet.py DATA`, or with torchrun or python. DATA has images
in the directories train/CLASS and val/CLASS, like ImageNet. To try the script without images, let
it draw some with `--synthetic 512`. Needs Pillow: pip install 'elasticlib[images]'.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported before init_process_group, see train_text.main
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from elasticlib import (
    CheckpointManager,
    ElasticBatchSampler,
    ElasticDistributedSampler,
    context,
    ignore_signals_worker_init,
)
from elasticlib.data.batch_sampler import EmptyBatchCollator
from elasticlib.errors import ConfigError

IMAGE_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
# Mean and standard deviation of the red, green and blue values (0 to 1) of ImageNet.
MEAN, STD = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[:, :, None, None]
# Classes of the synthetic images: number of corners of the polygon, and its color.
POLYGON_COLORS = {3: (230, 180, 50), 4: (80, 190, 90), 5: (70, 120, 230), 60: (220, 60, 60)}


class ImageDataset(Dataset[tuple[Tensor, int]]):
    """The images in DIRECTORY/CLASS/, sorted by the bytes of their names.

    An item is a tensor of shape (3, size, size) and the number of its class. If `epoch` is set, a
    random crop is returned and flipped at random, else the center crop. The augmentation depends
    only on the seed, the epoch and the index, so that a resumed or resized run gets the same items.
    """

    def __init__(self, directory: Path, size: int, seed: int = 0) -> None:
        classes = [path for path in directory.glob("[!.]*") if path.is_dir()]
        files = [f"{path.name}/{file}" for path in classes for file in os.listdir(path)]
        names = [
            name for name in files if name.lower().endswith(IMAGE_SUFFIXES) and "/." not in name
        ]
        if not names:
            raise ConfigError(
                f"{directory} has no images: expected files like {directory}/cat/1.png"
            )
        self.directory = directory
        self.names = sorted(names, key=os.fsencode)
        self.classes = sorted({name.partition("/")[0] for name in names}, key=os.fsencode)
        self.size, self.seed = size, seed
        self.epoch: int | None = None

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        name = self.names[index]
        file = self.directory / name
        try:
            with Image.open(file) as opened:
                image = opened.convert("RGB")
        except Exception as error:  # a decoder may raise any exception for a damaged file
            raise ValueError(
                f"{file} cannot be read as an image ({type(error).__name__}: {error}): replace it,"
                " or remove it and restart the epoch"
            ) from error
        return self.augment(image, index), self.classes.index(name.partition("/")[0])

    def augment(self, image: Image.Image, index: int) -> Tensor:
        """Return a crop of the image as a normalized tensor."""
        # A seed that is a string gives the same numbers in every process.
        generator = random.Random(f"{self.seed}/{self.epoch}/{index}")
        is_training = self.epoch is not None
        box = random_crop(image.size, generator) if is_training else center_crop(image.size)
        crop = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box)
        pixels = torch.frombuffer(bytearray(crop.tobytes()), dtype=torch.uint8)
        tensor = pixels.view(self.size, self.size, 3).permute(2, 0, 1).float().div_(255)
        tensor = tensor.sub_(MEAN).div_(STD)
        return tensor.flip(2) if is_training and generator.random() < 0.5 else tensor


def center_crop(size: tuple[int, int]) -> tuple[float, float, float, float]:
    """Return the box of a square with 7/8 of the shorter side: left, upper, right, lower."""
    width, height = size
    side = min(size) * 7 / 8
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


def random_crop(
    size: tuple[int, int], generator: random.Random
) -> tuple[float, float, float, float]:
    """Return a random box with 8 to 100 % of the area and an aspect ratio of 3:4 to 4:3."""
    width, height = size
    area = width * height * generator.uniform(0.08, 1.0)
    aspect_ratio = math.exp(generator.uniform(math.log(3 / 4), math.log(4 / 3)))
    crop_width = min(width, math.sqrt(area * aspect_ratio))
    crop_height = min(height, math.sqrt(area / aspect_ratio))
    left = generator.uniform(0, width - crop_width)
    upper = generator.uniform(0, height - crop_height)
    return left, upper, min(left + crop_width, width), min(upper + crop_height, height)


def draw_images(directory: Path, num_images: int, size: int) -> None:
    """Draw polygons: `num_images` into `directory`/train, and a quarter as many into val.

    Nothing is changed if the directory exists.
    """
    if directory.exists():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    temp_dir = Path(tempfile.mkdtemp(dir=directory.parent))  # renamed when it is complete
    for split, count in (("train", num_images), ("val", num_images // 4)):
        for number in range(count):
            corners = list(POLYGON_COLORS)[number % len(POLYGON_COLORS)]
            file = temp_dir / split / f"{corners}-corners" / f"{number:06}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            draw_polygon(corners, size, random.Random(f"{split}/{number}")).save(file)
    with contextlib.suppress(OSError):  # another node has drawn the same images
        temp_dir.rename(directory)
    shutil.rmtree(temp_dir, ignore_errors=True)


def draw_polygon(corners: int, size: int, generator: random.Random) -> Image.Image:
    """Draw a polygon at a random position and angle, on a gray background."""
    image = Image.new("RGB", (size, size), (generator.randrange(90),) * 3)
    radius = size * generator.uniform(0.25, 0.4)
    x, y = (generator.uniform(radius, size - radius) for _ in range(2))
    color = tuple(value + generator.randrange(-40, 36) for value in POLYGON_COLORS[corners])
    angle = generator.randrange(360)
    ImageDraw.Draw(image).regular_polygon((x, y, radius), corners, angle, fill=color)
    return image


def build_model(arch: str, num_classes: int) -> nn.Module:
    """Return a small network, or a ResNet of torchvision, that maps images to logits.

    Both use group normalization. The running statistics of batch normalization would depend on each
    rank's part of the batch.
    """
    if arch != "small":
        from torchvision import models

        norm = partial(nn.GroupNorm, 32)
        model: nn.Module = models.get_model(arch, num_classes=num_classes, norm_layer=norm)
        return model
    layers: list[nn.Module] = []
    for in_channels, out_channels in ((3, 16), (16, 32), (32, 64)):
        conv = nn.Conv2d(in_channels, out_channels, 3, stride=2, padding=1)
        layers += [conv, nn.GroupNorm(8, out_channels), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))


class Training:
    """Model, optimizer, data and progress. `state` is the content of a checkpoint."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.args = args
        self.train_images = ImageDataset(args.data / "train", args.image_size, args.seed)
        self.val_images = ImageDataset(args.data / "val", args.image_size)
        if self.val_images.classes != self.train_images.classes:
            raise ConfigError(f"{args.data}/val has other classes than {args.data}/train")
        self.sampler = ElasticDistributedSampler(self.train_images, seed=args.seed, tail="exact")
        self.batches = ElasticBatchSampler(self.sampler, args.batch_size)
        self.model = build_model(args.arch, len(self.train_images.classes)).to(args.device)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), args.lr, momentum=0.9, weight_decay=args.weight_decay
        )
        self.progress: dict[str, Any] = {"step": 0, "validated_epochs": 0, "best_top1": -1.0}
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "sampler": self.sampler,
            "progress": self.progress,
        }

    @property
    def step(self) -> int:
        return int(self.progress["step"])

    @property
    def max_micro_batch(self) -> int:
        """Largest number of images that a rank processes at once."""
        return int(self.args.max_micro_batch or self.args.batch_size)

    def data_loader(self, images: ImageDataset, batches: ElasticBatchSampler) -> DataLoader[Any]:
        """Return a loader of this rank's part of each remaining batch."""
        return DataLoader(
            images,
            batch_sampler=batches,
            collate_fn=EmptyBatchCollator(images),
            num_workers=self.args.workers,
            worker_init_fn=ignore_signals_worker_init,
            pin_memory=self.args.device.type == "cuda",
        )

    def forward_loss(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the summed loss, and the sums that `report_metrics` needs.

        The sums are a tensor of the summed loss, the number of correct images and of all images.
        """
        x, y = x.to(self.args.device), y.to(self.args.device)
        with torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.args.amp):
            logits = model(x)
        loss = cross_entropy(logits.float(), y, reduction="sum")
        sums = (loss.detach(), (logits.argmax(1) == y).sum(), torch.ones_like(y).sum())
        return loss, torch.stack([value.double() for value in sums])

    def train_step(self, model: DistributedDataParallel, x: Tensor, y: Tensor) -> Tensor:
        """Train on this rank's part of a global batch, and return its sums (see forward_loss)."""
        # All ranks use the same number of micro-batches, because DDP communicates in the last one.
        # A micro-batch may be empty.
        num_images = self.batches.next_batch_size
        num_micro_batches = math.ceil(num_images / (dist.get_world_size() * self.max_micro_batch))
        sample_weight = self.batches.sample_weight
        self.set_learning_rate()
        self.model.train()
        self.optimizer.zero_grad()
        sums = torch.zeros(3, dtype=torch.float64, device=self.args.device)
        chunks = zip(
            x.tensor_split(num_micro_batches), y.tensor_split(num_micro_batches), strict=True
        )
        for number, (x_chunk, y_chunk) in enumerate(chunks, 1):
            is_last = number == num_micro_batches
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss, chunk_sums = self.forward_loss(model, x_chunk, y_chunk)
                (sample_weight * loss).backward()
            sums += chunk_sums
        self.optimizer.step()
        self.batches.advance()
        self.progress["step"] += 1
        return sums

    def set_learning_rate(self) -> None:
        position = self.sampler.position
        rate = learning_rate(self.args, position.epoch + position.consumed / position.length)
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    @torch.no_grad()
    def validate(self) -> float | None:
        """Return the top-1 accuracy on the validation images in percent.

        Returns:
            The accuracy, or None if the job has asked its workers to stop before the end.
        """
        sampler = ElasticDistributedSampler(self.val_images, shuffle=False, tail="exact")
        batch_size = min(self.args.batch_size, self.max_micro_batch * dist.get_world_size())
        batches = ElasticBatchSampler(sampler, batch_size)
        sums = torch.zeros(3, dtype=torch.float64, device=self.args.device)
        self.model.eval()
        for x, y in self.data_loader(self.val_images, batches):
            sums += self.forward_loss(self.model, x, y)[1]
            context().step(self.step)
            if context().should_stop():
                return None
        return report_metrics(f"step {self.step} validated:", sums)


def learning_rate(args: argparse.Namespace, epochs_done: float) -> float:
    """Return the learning rate: `--lr` times the global batch size, divided by 256.

    During the warm-up, it rises linearly from a hundredth. After every `--lr-step` epochs, it is
    divided by ten.
    """
    rate = args.lr * args.batch_size / 256
    if epochs_done < args.warmup_epochs:
        return float(rate * (0.01 + 0.99 * epochs_done / args.warmup_epochs))
    return float(rate * 0.1 ** (int(epochs_done) // args.lr_step))


def report_metrics(prefix: str, sums: Tensor) -> float:
    """Print the metrics over all ranks, and return the top-1 accuracy in percent."""
    dist.all_reduce(sums)
    loss, correct, images = map(float, sums.tolist())
    top1 = 100 * correct / images
    print_rank0(f"{prefix} loss {loss / images:.4f} top-1 {top1:.2f} on {images:.0f} images")
    return top1


def print_rank0(text: str) -> None:
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def train(training: Training, manager: CheckpointManager) -> bool:
    """Train to the end, or until a stop is requested. Return True at the end."""
    args = training.args
    manager.restore(training.state)
    model = DistributedDataParallel(training.model)
    num_trained = training.sampler.epoch
    is_validated = training.progress["validated_epochs"] == num_trained
    if not is_validated and not validate_epoch(training, manager, num_trained):
        return False  # This validation, too, was interrupted by a stop request.
    loader = training.data_loader(training.train_images, training.batches)
    for epoch, batches in training.batches.epochs(args.epochs, loader):
        training.train_images.epoch = epoch  # before the workers of the loader start
        if not train_epoch(training, manager, model, batches):
            return False
        if not validate_epoch(training, manager, epoch + 1):
            return False
    return True


def validate_epoch(training: Training, manager: CheckpointManager, num_trained: int) -> bool:
    """Validate and save after `num_trained` epochs. Return False if a stop is requested."""
    top1 = training.validate()
    if top1 is None:
        manager.save(training.step, training.state)
        print_rank0(f"stopping after step {training.step}, before its validation has ended")
        return False
    is_best = top1 > training.progress["best_top1"]
    best_top1 = max(top1, training.progress["best_top1"])
    training.progress.update(validated_epochs=num_trained, best_top1=best_top1)
    manager.snapshot(training.step, training.state)
    manager.save(training.step, training.state, pin=is_best)
    return True


def train_epoch(
    training: Training,
    manager: CheckpointManager,
    model: DistributedDataParallel,
    batches: Iterable[tuple[Tensor, Tensor]],
) -> bool:
    """Train on the remaining batches of an epoch. Return False if a stop is requested."""
    args, epoch = training.args, training.sampler.epoch
    for x, y in batches:
        sums = training.train_step(model, x, y)
        context().step(training.step, samples=len(y))
        if training.step % args.print_freq == 0:
            world_size = dist.get_world_size()
            report_metrics(f"epoch {epoch} step {training.step} world {world_size}:", sums)
        if training.step % args.snapshot_every == 0:
            manager.snapshot(training.step, training.state)
        stop = context().should_stop()
        if stop or training.step % args.save_every == 0:
            manager.save(training.step, training.state)
        if stop:
            print_rank0(f"stopping after step {training.step}: {stop.reason}")
            return False
    return True


def evaluate(training: Training, manager: CheckpointManager) -> None:
    """Validate the best checkpoint. This may run while another job trains and saves."""
    best = manager.steps(pinned_only=True)
    if not best:
        raise ConfigError(
            f"--evaluate needs a checkpoint, but {training.args.checkpoints} has none"
        )
    state = manager.load(best[-1])
    training.model.load_state_dict(state["model"])
    training.progress.update(state["progress"])
    training.validate()


def main(args: argparse.Namespace) -> None:
    """Train or validate on the GPU of this rank, or on the CPU."""
    use_cuda = torch.cuda.is_available()
    args.device = torch.device("cuda", args.local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(args.device)
    backend = "nccl" if use_cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if args.synthetic and args.local_rank == 0:
        draw_images(args.data, args.synthetic, args.image_size)
    dist.barrier()
    training = Training(args)
    with CheckpointManager(args.checkpoints) as manager:
        if args.evaluate:
            evaluate(training, manager)
        elif train(training, manager):
            manager.wait()
            best = manager.steps(pinned_only=True)[-1]
            print_rank0(f"done: steps {training.step}, the best after step {best}")
    dist.destroy_process_group()


def integer_from(minimum: int) -> Callable[[str], int]:
    """Return an argparse type for integers that are not less than `minimum`."""

    def parse(text: str) -> int:
        if int(text) < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {text}")
        return int(text)

    return parse


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the arguments of the command line, or the given ones."""
    parser = argparse.ArgumentParser(description="train a convolutional network on images")
    add, positive = parser.add_argument, integer_from(1)
    add("data", type=Path, metavar="DATA", help="directory with train/CLASS and val/CLASS")
    add("--synthetic", type=positive, metavar="N", help="draw N images if DATA does not exist")
    add("-a", "--arch", default="small", help="small, or a ResNet of torchvision like resnet50")
    add("--epochs", type=positive, default=90)
    add("-b", "--batch-size", type=positive, default=256, help="images per step, over all ranks")
    add("--max-micro-batch", type=positive, metavar="N", help="largest batch in a rank's memory")
    add("--lr", type=float, default=0.1, help="learning rate for a batch size of 256")
    add(
        "--lr-step",
        type=positive,
        default=30,
        metavar="EPOCHS",
        help="divide it by ten after these",
    )
    add("--warmup-epochs", type=float, default=0.0)
    add("--weight-decay", type=float, default=1e-4)
    add("--amp", action="store_true", help="use automatic mixed precision with bfloat16")
    add("--image-size", type=positive, default=224, metavar="PIXELS")
    add("--seed", type=int, default=0)
    add("-j", "--workers", type=integer_from(0), default=4, help="data loader workers per rank")
    add("--evaluate", action="store_true", help="only validate the best checkpoint")
    add("--checkpoints", default="checkpoints", help="a directory or an fsspec URL")
    add("--save-every", type=positive, default=1000, metavar="STEPS", help="and after each epoch")
    add(
        "--snapshot-every", type=positive, default=10, metavar="STEPS", help="in the agent's memory"
    )
    add("--print-freq", type=positive, default=10, metavar="STEPS")
    parser.set_defaults(local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        main(parse_args())
    except ConfigError as error:
        # The same exit code as for wrong arguments: elasticrun does not restart the worker.
        print(f"imagenet.py: {error}", file=sys.stderr)
        sys.exit(2)
