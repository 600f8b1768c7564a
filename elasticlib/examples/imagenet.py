"""Train a convolutional network on a folder of images, through every crash and resize.

DATA has the folders train/CLASS/ and val/CLASS/ with images in them, as ImageNet comes; without
one, `--synthetic 512` draws one. `elasticrun --nproc-per-node 2 imagenet.py DATA`, or torchrun, or
plain python starts it. Needs Pillow: pip install 'elasticlib[images]'.
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # DDP would import it late, and hold the group
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

ENDINGS = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
MEAN, DEVIATION = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[:, :, None, None]
"""Of red, green and blue from 0 to 1, over ImageNet."""
DRAWN = {3: (230, 180, 50), 4: (80, 190, 90), 5: (70, 120, 230), 60: (220, 60, 60)}
"""The colours of polygons, by the number of their corners: the classes that are drawn."""


class Images(Dataset[tuple[Tensor, int]]):
    """The images of FOLDER/CLASS/, in the order of their names' bytes, as 3 x size x size.

    In an epoch a random part of each is cut out, and mirrored or not; without one, its middle. What
    chance does follows from seed, epoch and the image's number alone, so a resumed or resized run
    sees what the undisturbed one would have seen.
    """

    def __init__(self, folder: Path, size: int, seed: int = 0) -> None:
        folders = [one for one in folder.glob("[!.]*") if one.is_dir()]
        found = [f"{one.name}/{name}" for one in folders for name in os.listdir(one)]
        kept = [name for name in found if name.lower().endswith(ENDINGS) and "/." not in name]
        if not kept:
            raise ConfigError(f"{folder} has no images: it must have some as {folder}/cat/1.png")
        self.folder, self.names = folder, sorted(kept, key=os.fsencode)
        self.classes = sorted({name.partition("/")[0] for name in kept}, key=os.fsencode)
        self.size, self.seed = size, seed
        self.epoch: int | None = None

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        name = self.names[index]
        file = self.folder / name
        try:
            with Image.open(file) as opened:
                image = opened.convert("RGB")
        except Exception as error:  # a decoder may raise anything on what is damaged
            raise ValueError(
                f"{file} cannot be read as an image ({type(error).__name__}: {error}): replace it,"
                " or take it out of the data and start the epoch again"
            ) from error
        return self.prepare(image, index), self.classes.index(name.partition("/")[0])

    def prepare(self, image: Image.Image, index: int) -> Tensor:
        chance = random.Random(f"{self.seed}/{self.epoch}/{index}")  # of text: the same anywhere
        width, height = image.size
        wide = high = min(image.size) * 7 / 8
        left, upper = (width - wide) / 2, (height - high) / 2
        if self.epoch is not None:  # 8 to 100 % of the area, 3:4 to 4:3 in shape, as is usual
            area = width * height * chance.uniform(0.08, 1.0)
            shape = math.exp(chance.uniform(math.log(3 / 4), math.log(4 / 3)))
            wide, high = min(width, math.sqrt(area * shape)), min(height, math.sqrt(area / shape))
            left, upper = chance.uniform(0, width - wide), chance.uniform(0, height - high)
        box = (left, upper, min(left + wide, width), min(upper + high, height))
        small = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box)
        pixels = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8)
        colours = pixels.view(self.size, self.size, 3).permute(2, 0, 1).float().div_(255)
        colours = colours.sub_(MEAN).div_(DEVIATION)
        mirrored = self.epoch is not None and chance.random() < 0.5
        return colours.flip(2) if mirrored else colours


def draw_images(folder: Path, samples: int, size: int) -> None:
    """Draw polygons: `samples` into `folder`/train and a quarter as many into `folder`/val.

    A folder that is there is left alone.
    """
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=folder.parent))  # so that it is there whole, or not at all
    for split, count in (("train", samples), ("val", samples // 4)):
        for number in range(count):
            chance, corners = random.Random(f"{split}/{number}"), list(DRAWN)[number % 4]
            image = Image.new("RGB", (size, size), (chance.randrange(90),) * 3)
            radius = size * chance.uniform(0.25, 0.4)
            circle = (*(chance.uniform(radius, size - radius) for _ in "xy"), radius)
            shade = tuple(colour + chance.randrange(-40, 36) for colour in DRAWN[corners])
            pen = ImageDraw.Draw(image)
            pen.regular_polygon(circle, corners, chance.randrange(360), fill=shade)
            file = aside / split / f"{corners}-corners" / f"{number:06}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            image.save(file)
    with contextlib.suppress(OSError):  # another node has drawn the same
        aside.rename(folder)
    shutil.rmtree(aside, ignore_errors=True)


def build_model(arch: str, classes: int) -> nn.Module:
    """A small network, or a ResNet of torchvision's by its name: images to n x classes logits.

    Both normalise within each sample: nothing depends on how a batch is shared out, and there are
    no running statistics in which ranks differ.
    """
    if arch != "small":
        from torchvision import models

        norm = partial(nn.GroupNorm, 32)
        model: nn.Module = models.get_model(arch, num_classes=classes, norm_layer=norm)
        return model
    layers: list[nn.Module] = []
    for before, width in ((3, 16), (16, 32), (32, 64)):
        convolution = nn.Conv2d(before, width, 3, stride=2, padding=1)
        layers += [convolution, nn.GroupNorm(8, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


class Training:
    """What is trained, and where it stands: `state` is all that a checkpoint must hold."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.args = args
        self.images = Images(args.data / "train", args.image_size, args.seed)
        self.held_out = Images(args.data / "val", args.image_size)
        if self.held_out.classes != self.images.classes:
            raise ConfigError(f"{args.data}/val has other classes than {args.data}/train")
        self.sampler = ElasticDistributedSampler(self.images, seed=args.seed, tail="exact")
        self.batches = ElasticBatchSampler(self.sampler, args.batch_size)
        self.model = build_model(args.arch, len(self.images.classes)).to(args.device)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), args.lr, momentum=0.9, weight_decay=args.weight_decay
        )
        self.progress: dict[str, Any] = {"step": 0, "validated": 0, "best_top1": -1.0}
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "sampler": self.sampler,
            "progress": self.progress,
        }

    @property
    def step(self) -> int:
        return int(self.progress["step"])

    def load(self, images: Images, batches: ElasticBatchSampler) -> DataLoader[Any]:
        """This rank's share of each batch that is left: images and labels."""
        return DataLoader(
            images,
            batch_sampler=batches,
            collate_fn=EmptyBatchCollator(images),
            num_workers=self.args.workers,
            worker_init_fn=ignore_signals_worker_init,
            pin_memory=self.args.device.type == "cuda",
        )

    def look_at(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The summed loss of some images, and three sums: loss, right answers, images."""
        x, y = x.to(self.args.device), y.to(self.args.device)
        with torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.args.amp):
            logits = model(x)
        loss = cross_entropy(logits.float(), y, reduction="sum")
        seen = (loss.detach(), (logits.argmax(1) == y).sum(), torch.ones_like(y).sum())
        return loss, torch.stack([part.double() for part in seen])

    def take_step(self, parallel: DistributedDataParallel, x: Tensor, y: Tensor) -> Tensor:
        """Take this rank's share of a global batch, in pieces that fit its memory; its sums."""
        position, weight = self.sampler.position, self.batches.sample_weight
        # All ranks take equally many pieces, because DDP communicates in the last one. It may be
        # empty on some ranks.
        world, most = dist.get_world_size(), self.args.max_micro_batch or self.args.batch_size
        count = math.ceil(self.batches.next_batch_size / (world * most))
        rate = learning_rate(self.args, position.epoch + position.consumed / position.length)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.train()
        self.optimizer.zero_grad()
        sums = torch.zeros(3, dtype=torch.float64, device=self.args.device)
        pieces = zip(x.tensor_split(count), y.tensor_split(count), strict=True)
        for turn, piece in enumerate(pieces, 1):
            with contextlib.nullcontext() if turn == count else parallel.no_sync():
                loss, seen = self.look_at(parallel, *piece)
                (weight * loss).backward()
            sums += seen
        self.optimizer.step()
        self.batches.advance()
        self.progress["step"] += 1
        return sums

    @torch.no_grad()
    def validate(self) -> float | None:
        """Per cent of the images held out that are right, each seen once; None if asked to stop."""
        sampler = ElasticDistributedSampler(self.held_out, shuffle=False, tail="exact")
        world = dist.get_world_size()
        most = (self.args.max_micro_batch or self.args.batch_size) * world
        batches = ElasticBatchSampler(sampler, min(self.args.batch_size, most))
        sums = torch.zeros(3, dtype=torch.float64, device=self.args.device)
        self.model.eval()
        for x, y in self.load(self.held_out, batches):
            sums += self.look_at(self.model, x, y)[1]
            context().step(self.step)
            if context().should_stop():
                return None
        return report(f"step {self.step} validated:", sums)


def learning_rate(args: argparse.Namespace, epochs_done: float) -> float:
    """Return `--lr` in proportion to the global batch, with a warm-up and steps.

    The warm-up rises linearly from a hundredth. Then the rate is divided by ten at each `--lr-step`
    epochs.
    """
    rate = args.lr * args.batch_size / 256
    if epochs_done < args.warmup_epochs:
        return float(rate * (0.01 + 0.99 * epochs_done / args.warmup_epochs))
    return float(rate * 0.1 ** (int(epochs_done) // args.lr_step))


def report(what: str, sums: Tensor) -> float:
    """Print what all ranks have seen; per cent of right answers."""
    dist.all_reduce(sums)
    loss, right, images = map(float, sums.tolist())
    top1 = 100 * right / images
    say(f"{what} loss {loss / images:.4f} top-1 {top1:.2f} on {images:.0f} images")
    return top1


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def train(training: Training, manager: CheckpointManager) -> bool:
    """To the end, or until we are asked to stop; whether it was the end."""
    args, progress, state = training.args, training.progress, training.state
    manager.restore(state)
    parallel = DistributedDataParallel(training.model)
    for epoch in range(training.sampler.epoch, args.epochs):
        training.sampler.set_epoch(epoch)
        training.images.epoch = epoch
        for x, y in training.load(training.images, training.batches):
            sums = training.take_step(parallel, x, y)
            context().step(training.step, samples=len(y))
            if training.step % args.print_freq == 0:
                world = dist.get_world_size()
                report(f"epoch {epoch} step {training.step} world {world}:", sums)
            if training.step % args.snapshot_every == 0:
                manager.snapshot(training.step, state)
            stop = context().should_stop()
            if stop or training.step % args.save_every == 0:
                manager.save(training.step, state)
            if stop:
                say(f"stopping after step {training.step}: {stop.reason}")
                return False
        is_best = False
        if progress["validated"] <= epoch:
            top1 = training.validate()
            if top1 is None:
                manager.save(training.step, state)
                say(f"stopping after step {training.step}, which is to be validated")
                return False
            is_best = top1 > progress["best_top1"]
            progress.update(validated=epoch + 1, best_top1=max(top1, progress["best_top1"]))
        manager.snapshot(training.step, state)
        manager.save(training.step, state, pin=is_best)
    return True


def evaluate(training: Training, manager: CheckpointManager) -> None:
    """Validate the best checkpoint, also beside a job that trains: `load` takes nothing from it."""
    best = manager.steps(pinned_only=True)
    if not best:
        raise ConfigError(
            f"--evaluate needs a checkpoint, and {training.args.checkpoints} has none"
        )
    saved = manager.load(best[-1])
    training.model.load_state_dict(saved["model"])
    training.progress.update(saved["progress"])
    training.validate()


def main(args: argparse.Namespace) -> None:
    on_gpu = torch.cuda.is_available()
    args.device = torch.device("cuda", args.local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(args.device)
    backend = "nccl" if on_gpu else "gloo"
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
            say(f"done: steps {training.step}, the best after step {best}")
    dist.destroy_process_group()


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"need at least {least}, got {text}")
        return int(text)

    return number


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add, count = parser.add_argument, at_least(1)
    add("data", type=Path, metavar="DATA", help="the folder with train/ and val/")
    add("--synthetic", type=count, metavar="N", help="draw N images into DATA, if it is not there")
    add("-a", "--arch", default="small", help="small, or a ResNet of torchvision, as resnet50")
    add("--epochs", type=count, default=90)
    add("-b", "--batch-size", type=count, default=256, help="images a step, of all ranks together")
    add("--max-micro-batch", type=count, metavar="N", help="the most that a rank's memory takes")
    add("--lr", type=float, default=0.1, help="of 256 images a step; it follows --batch-size")
    add("--lr-step", type=count, default=30, metavar="EPOCHS", help="a tenth of it after these")
    add("--warmup-epochs", type=float, default=0.0)
    add("--weight-decay", type=float, default=1e-4)
    add("--amp", action="store_true", help="compute in bfloat16 where torch says that it is safe")
    add("--image-size", type=count, default=224, metavar="PIXELS")
    add("--seed", type=int, default=0)
    add("-j", "--workers", type=at_least(0), default=4, help="that load images, a rank")
    add("--evaluate", action="store_true", help="score the best checkpoint, and end")
    add("--checkpoints", default="checkpoints", help="a folder, or a URL")
    add("--save-every", type=count, default=1000, metavar="STEPS", help="and after each epoch")
    add("--snapshot-every", type=count, default=10, metavar="STEPS", help="into the agent's memory")
    add("--print-freq", type=count, default=10, metavar="STEPS")
    parser.set_defaults(local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        main(parse())
    except ConfigError as wrong:
        # As of wrong arguments: by this code a launcher knows that another try is no use.
        print(f"imagenet.py: {wrong}", file=sys.stderr)
        sys.exit(2)
