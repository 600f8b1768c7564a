"""Train a residual network on a folder of images, through every crash and resize.

DATA has the folders train/CLASS/ and val/CLASS/ with images in them, as ImageNet comes; without
one, `--synthetic 512` draws one. Start it with `elasticrun --nproc-per-node 2 imagenet.py DATA`,
with torchrun, or with plain python. Needs Pillow: pip install 'elasticlib[images]'.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from elasticlib import (
    CheckpointManager,
    CollateOrEmpty,
    ElasticBatchSampler,
    ElasticDistributedSampler,
    Stop,
    context,
    ignore_signals_worker_init,
    plan_batches,
)
from elasticlib.clock import monotonic
from elasticlib.errors import ConfigError
from elasticlib.examples.byte_transformer import sha256_of
from elasticlib.examples.drawn_shapes import draw_shapes
from elasticlib.examples.image_folder import Augment, Center, ImageFolder, Images
from elasticlib.examples.image_step import (
    Scores,
    Step,
    choose_precision,
    join_process_group,
    leave_process_group,
    must_be_same,
    score,
    scores_of,
)
from elasticlib.examples.small_resnet import SMALL, build_model
from elasticlib.examples.trace import Trace


class Training:
    """What is trained, and where it stands: `state` is all that a checkpoint must hold."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(args.seed)
        self.images = ImageFolder(args.data / "train")
        self.held_out = ImageFolder(args.data / "val", self.images.classes)
        self.precision = choose_precision(args.amp, device)
        self.sampler = ElasticDistributedSampler(self.images, seed=args.seed, tail="exact")
        self.batches = ElasticBatchSampler(
            self.sampler, args.batch_size, max_micro_batch=args.max_micro_batch
        )
        self.model = build_model(args.arch, len(self.images.classes)).to(device)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            args.lr,
            momentum=args.momentum,
            weight_decay=args.weight_decay,
        )
        self.scaler = self.precision.scaler()
        self.progress: dict[str, Any] = {"step": 0, "validated": 0, "best": -1.0}
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scaler": self.scaler,
            "sampler": self.sampler,
            "images": self.images,
            "progress": self.progress,
        }

    @property
    def step(self) -> int:
        return int(self.progress["step"])

    @property
    def epochs_done(self) -> float:
        """How far the training is, in epochs; the same at any world size."""
        position = self.sampler.position
        return position.epoch + position.consumed / position.length


def learning_rate(args: argparse.Namespace, epochs_done: float) -> float:
    """From a hundredth straight up through the warm-up, then a tenth at each `--lr-step` epochs."""
    if epochs_done < args.warmup_epochs:
        return float(args.lr * (0.01 + 0.99 * epochs_done / args.warmup_epochs))
    return float(args.lr * 0.1 ** (int(epochs_done) // args.lr_step))


def loader(
    images: Images, batches: ElasticBatchSampler, args: argparse.Namespace
) -> DataLoader[tuple[Tensor, int, int]]:
    """This rank's share of each batch that is left: images, labels, and their numbers."""
    return DataLoader(
        images,
        batch_sampler=batches,
        collate_fn=CollateOrEmpty(images),
        num_workers=args.workers,
        worker_init_fn=ignore_signals_worker_init,
        pin_memory=torch.cuda.is_available(),
    )


class Run:
    """One process's part in a training, from a restored state to the end or a stop."""

    def __init__(
        self,
        training: Training,
        manager: CheckpointManager,
        best: CheckpointManager,
        args: argparse.Namespace,
    ) -> None:
        self._training, self._args = training, args
        self._manager, self._best = manager, best
        self._trace = Trace(args.trace, args.generation, dist.get_rank(), launch=args.launch)
        self._since = monotonic()
        self._seen = self._own = 0
        self._loss: float | None = None

    def train(self) -> bool:
        """To the end, or until we are asked to stop; whether it was the end."""
        training, args = self._training, self._args
        self._trace.resumed(training.step)
        take = Step(training.model, training.optimizer, training.scaler, training.precision)
        for epoch in range(training.sampler.epoch, args.epochs):
            training.sampler.set_epoch(epoch)
            for _ in self._epoch(take, epoch):
                if self._must_stop():
                    return False
            if training.progress["validated"] <= epoch and not self._validate(epoch):
                return False
            self._manager.snapshot(training.step, training.state)
            self._manager.save(training.step, training.state)
        return True

    def _epoch(self, take: Step, epoch: int) -> Iterator[None]:
        """The steps that are left of an epoch."""
        training, args = self._training, self._args
        images = Images(training.images, Augment(args.image_size, args.seed, epoch))
        for x, y, numbers in loader(images, training.batches, args):
            step, rate = training.step + 1, learning_rate(args, training.epochs_done)
            self._trace.step(step, epoch, numbers.tolist(), dist.get_world_size())
            for group in training.optimizer.param_groups:
                group["lr"] = rate
            sums = take(x, y, training.batches.plan())
            self._seen += training.batches.advance()
            self._own = len(numbers)
            training.progress["step"] = step
            if step % args.print_freq == 0:
                more = f"lr {rate:.3g} {self._images_a_second():.0f} images/s"
                scores = scores_of(sums)
                self._loss = scores.loss
                self._report(f"epoch {epoch} step {step}", scores, more)
            yield

    def _must_stop(self) -> bool:
        """Keep what has to be kept of the step; whether we are to stop after it."""
        step, state, args = self._training.step, self._training.state, self._args
        context().step(step, loss=self._loss, samples=self._own)
        if step % args.snapshot_every == 0:
            self._manager.snapshot(step, state)
        stop = context().should_stop()
        if stop or step % args.save_every == 0:
            self._manager.save(step, state)
        return self._says_stop(stop)

    def _says_stop(self, stop: Stop | None) -> bool:
        if stop:
            say(f"stopping after step {self._training.step}: {stop.reason}")
        return stop is not None

    def _validate(self, epoch: int) -> bool:
        """Score the model, and keep it if it is the best; False if we were asked to stop."""
        training = self._training
        scores = self.validation()
        if scores is None:
            self._manager.save(training.step, training.state)
            return False
        self._report(f"validated epoch {epoch}", scores, f"on {scores.images} images")
        if scores.top1 > training.progress["best"]:
            kept = {"model": training.model, "epoch": epoch, "top1": scores.top1}
            self._best.save(training.step, kept)
            # Nobody must find it noted as kept before it is.
            self._best.wait()
            training.progress["best"] = scores.top1
        training.progress["validated"] = epoch + 1
        return True

    def validation(self) -> Scores | None:
        """Of the images held out, each once; None if we were asked to stop on the way."""
        training, args = self._training, self._args
        sampler = ElasticDistributedSampler(training.held_out, shuffle=False, tail="exact")
        batches = ElasticBatchSampler(sampler, args.batch_size)
        plan = plan_batches(args.batch_size, dist.get_world_size(), args.max_micro_batch)
        most = plan.micro_batches(0)[0].size
        sums = torch.zeros(4, dtype=torch.float64, device=training.precision.device)
        images = Images(training.held_out, Center(args.image_size))
        for x, y, _ in loader(images, batches, args):
            sums += score(training.model, x, y, most, training.precision)
            context().step(training.step)
            if self._says_stop(context().should_stop()):
                return None
        return scores_of(sums)

    def _images_a_second(self) -> float:
        """Trained on since this was asked before, by all ranks."""
        seen, since = self._seen, self._since
        self._seen, self._since = 0, monotonic()
        return seen / max(1e-9, self._since - since)

    def _report(self, what: str, scores: Scores, more: str) -> None:
        group = f"(world {dist.get_world_size()}, generation {self._args.generation})"
        say(f"{what} {in_words(scores)} {more} {group}")


def in_words(scores: Scores) -> str:
    return f"loss {scores.loss:.4f} top-1 {scores.top1:.2f} top-5 {scores.top5:.2f}"


def main(args: argparse.Namespace) -> None:
    join_process_group(args.dist_backend, args.rank)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", args.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if args.synthetic and args.local_rank == 0:
        draw_shapes(args.data, args.synthetic, size=args.image_size, seed=args.seed)
    dist.barrier()
    training = Training(args, device)
    must_be_same("the images", training.images.state_dict())
    must_be_same("what --amp comes to", training.precision.name)
    best = CheckpointManager(f"{args.checkpoints}/best", keep_last=1)
    with CheckpointManager(args.checkpoints, keep_last=args.keep_last) as manager, best:
        manager.restore(training.state)
        run = Run(training, manager, best, args)
        if args.evaluate:
            evaluate(run, training, args)
        elif run.train():
            kept = f"best top-1 {training.progress['best']:.2f}"
            say(f"done: steps {training.step} {kept} weights sha256 {sha256_of(training.model)}")
    # DDP goes before its group: torch may hang where it goes after.
    del run
    leave_process_group()


def evaluate(run: Run, training: Training, args: argparse.Namespace) -> None:
    if not training.step:
        raise ConfigError(f"--evaluate needs a checkpoint, and {args.checkpoints} has none")
    scores = run.validation()
    if scores:
        say(f"step {training.step}: {in_words(scores)} on {scores.images} images")


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def at_least(least: int) -> Any:
    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"need at least {least}, got {text}")
        return int(text)

    return number


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, metavar="DATA", help="the folder with train/ and val/")
    add_training_flags(parser)
    add_folder_flags(parser)
    environment = os.environ
    parser.set_defaults(
        rank=environment.get("RANK"),
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        generation=int(environment.get("ELASTICLIB_GENERATION", "0")),
        launch=environment.get("ELASTICLIB_INCARNATION", ""),
    )
    return parser.parse_args(arguments)


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    """What is trained, and how."""
    add, count = parser.add_argument, at_least(1)
    add("-a", "--arch", default=SMALL, help="small, or a ResNet of torchvision, as resnet50")
    add("--epochs", type=count, default=90)
    add("-b", "--batch-size", type=count, default=256, help="images a step, of all ranks together")
    add("--max-micro-batch", type=count, metavar="N", help="the most that a rank's memory takes")
    add("--lr", "--learning-rate", type=float, default=0.1, help="after the warm-up")
    add("--lr-step", type=count, default=30, metavar="EPOCHS", help="a tenth of it after these")
    add("--warmup-epochs", type=float, default=0.0)
    add("--momentum", type=float, default=0.9)
    add("--wd", "--weight-decay", dest="weight_decay", type=float, default=1e-4)
    add("--amp", choices=["auto", "off", "bf16", "fp16"], default="auto", help="auto: on a GPU")
    add("--image-size", type=count, default=224, metavar="PIXELS")
    add("--seed", type=int, default=0)
    add("--dist-backend", choices=["nccl", "gloo"], help="by default nccl where there is a GPU")
    add("-j", "--workers", type=at_least(0), default=4, help="that load images, a rank")
    add(
        "-e",
        "--evaluate",
        action="store_true",
        help="score the newest checkpoint, and end; not beside a training that saves there",
    )


def add_folder_flags(parser: argparse.ArgumentParser) -> None:
    """What is read and kept, and when."""
    add, count = parser.add_argument, at_least(1)
    add("--synthetic", type=int, metavar="N", help="draw N images into DATA, if it is not there")
    add("--checkpoints", default="checkpoints", help="a folder, or a URL; /best has the best model")
    add("--keep-last", type=count, default=3, metavar="CHECKPOINTS")
    add("--save-every", type=count, default=1000, metavar="STEPS", help="and after each epoch")
    add("--snapshot-every", type=count, default=10, metavar="STEPS", help="into the agent's memory")
    add("-p", "--print-freq", type=count, default=10, metavar="STEPS")
    add("--trace", metavar="PREFIX", help="write which images each step used")


if __name__ == "__main__":
    try:
        main(parse())
    except ConfigError as wrong:
        # As of wrong arguments: by this code a launcher knows that another try is no use.
        print(f"imagenet.py: {wrong}", file=sys.stderr)
        sys.exit(2)
