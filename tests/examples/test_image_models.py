"""The models, one step of them, and what a rank makes of its share, without any launcher."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from elasticlib import plan_batches
from elasticlib.errors import ConfigError
from elasticlib.examples import imagenet
from elasticlib.examples.image_step import (
    Step,
    choose_precision,
    join_process_group,
    leave_process_group,
    score,
    scores_of,
)
from elasticlib.examples.small_resnet import SmallResNet, build_model

CPU = torch.device("cpu")


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    join_process_group("gloo", None)
    yield
    leave_process_group()


@pytest.mark.parametrize("size", [8, 31, 64])
def test_the_small_network_takes_images_of_any_size_and_a_batch_of_none(size: int) -> None:
    model = build_model("small", 7)
    assert model(torch.randn(3, 3, size, size)).shape == (3, 7)
    empty = model(torch.randn(0, 3, size, size))
    empty.sum().backward()
    assert empty.shape == (0, 7)
    assert not any(weights.grad.any() for weights in model.parameters())
    assert not list(model.buffers()), "a resize would change what it normalises by"


def test_a_name_that_is_no_residual_network_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--arch is 'alexnet', must be small or one of torchvis"):
        build_model("alexnet", 10)


def test_a_torchvision_that_cannot_be_imported_says_why_and_what_else_to_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a wheel that was built for CUDA raises beside torch for the CPU."""
    broken = "raise RuntimeError('operator torchvision::nms\\ndoes not exist')"
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text(broken)
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    sentence = (
        "--arch resnet18 is a model of torchvision, which cannot be imported here "
        "(RuntimeError: operator torchvision::nms does not exist): install the torchvision that "
        f"was built for torch {torch.__version__}, or use --arch small"
    )
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        build_model("resnet18", 10)


def test_torchvisions_networks_are_had_by_name() -> None:
    try:
        import torchvision  # noqa: F401
    except Exception as error:  # of another build than torch it raises what it likes
        pytest.skip(f"torchvision cannot be imported here: {error}")
    model = build_model("resnet18", 10)
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 10)
    with pytest.raises(ConfigError, match=r"--arch is 'resnet19', torchvision has .*resnet18"):
        build_model("resnet19", 10)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("amp", "far", "close"), [("off", 0, 1e-5), ("bf16", 1e-4, 0.2)])
def test_a_batch_in_pieces_has_the_gradient_and_the_sums_of_the_whole(
    amp: str, far: float, close: float
) -> None:
    torch.manual_seed(1)
    images, labels = torch.randn(7, 3, 16, 16), torch.randint(0, 6, (7,))
    found = []
    for most in (7, 3):
        torch.manual_seed(0)
        model = SmallResNet(6)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        precision = choose_precision(amp, CPU)
        take = Step(model, optimizer, precision.scaler(), precision)
        take(images, labels, plan_batches(7, 1, most))
        sums = take(images, labels, plan_batches(7, 1, most))  # nothing is left of the step before
        found.append((torch.cat([w.grad.flatten() for w in model.parameters()]), sums))
    (whole, sums), (pieces, sums_of_pieces) = found
    assert (whole - pieces).norm() / whole.norm() < close
    torch.testing.assert_close(sums_of_pieces, sums, rtol=close, atol=0)
    torch.manual_seed(0)
    model = SmallResNet(6)
    cross_entropy(model(images), labels).backward()
    plain = torch.cat([w.grad.flatten() for w in model.parameters()])
    assert far <= (whole - plain).norm() / plain.norm() < close


@pytest.mark.usefixtures("alone")
def test_scores_count_the_likeliest_class_and_the_five_likeliest() -> None:
    class Told(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images[:, 0, 0]

    # Of eight classes the k-th is the k-th likeliest; three images of them.
    likely = torch.arange(8.0, 0.0, -1).expand(3, 3, 1, 8)
    labels = torch.tensor([0, 4, 5])
    scores = scores_of(score(Told(), likely, labels, 2, choose_precision("off", CPU)))
    assert scores.images == 3
    assert scores.top1 == pytest.approx(100 / 3)
    assert scores.top5 == pytest.approx(200 / 3)
    assert scores.loss == pytest.approx(float(cross_entropy(likely[:, 0, 0], labels)))


def test_what_needs_a_gpu_is_refused_without_one() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert choose_precision("auto", CPU).name == "off"
    with pytest.raises(ConfigError, match="--amp fp16 needs a GPU, and this is cpu"):
        choose_precision("fp16", CPU)
    with pytest.raises(ConfigError, match="--dist-backend nccl needs a GPU"):
        join_process_group("nccl", None)
    assert not dist.is_initialized()


def test_the_learning_rate_follows_the_epochs_at_any_world_size() -> None:
    args = imagenet.parse(["data", "--lr", "0.4", "--warmup-epochs", "2", "--lr-step", "10"])
    rates = [imagenet.learning_rate(args, done) for done in (0, 1, 2, 9.99, 10, 25)]
    assert rates == pytest.approx([0.004, 0.202, 0.4, 0.4, 0.04, 0.004])


@pytest.mark.parametrize("flags", [["-b", "0"], ["-j", "-1"], ["--arch", "small", "--resume", "x"]])
def test_flags_that_cannot_be_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        imagenet.parse(["data", *flags])
