"""The image example with real processes: kills, signals, resizes and a damaged file."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from jobs import Job, Node
from processes import find_children, find_workers

from elasticlib import CheckpointManager
from elasticlib.examples.imagenet import POLYGON_COLORS, ImageDataset, draw_images
from elasticlib.testing.waiting import wait_until

LAUNCH = (sys.executable, "-m", "elasticlib.launch", "--standalone")
SCRIPT = Path(__file__).parents[2] / "elasticlib/examples/imagenet.py"
IMAGES, EPOCHS, BATCH = 94, 5, 8
STEPS_AN_EPOCH = -(-IMAGES // BATCH)
STEPS = EPOCHS * STEPS_AN_EPOCH
DONE = r"done: steps (\d+), the best after step (\d+)$"
REPORTED = r"epoch \d+ step \d+ world \d: loss (\S+) top-1"
VALIDATED = r"step (\d+) validated: loss \S+ top-1 (\S+) on (\d+) images"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create 94 training images, with 6 in the last batch, and 23 validation images."""
    folder = tmp_path_factory.mktemp("images") / "drawn"
    draw_images(folder, IMAGES, 32)
    return folder


@pytest.fixture
def job(job: Job) -> Iterator[Job]:
    """Delete the directories that killed loader workers leave, before the job checks for files."""
    yield job
    job.close()
    for listening in job.temporary.glob("pymp-*"):  # to hand out what it loaded
        shutil.rmtree(listening)


@attrs.frozen
class Run:
    """A run of the example with its own checkpoint directory."""

    job: Job
    name: str
    images: Path

    @property
    def checkpoints(self) -> Path:
        return self.job.folder / f"{self.name}-checkpoints"

    def start(self, ranks: int, restarts: int = 3) -> Node:
        agent = (*LAUNCH, "--nproc-per-node", str(ranks), "--max-restarts", str(restarts))
        sizes = ("--image-size", "32", "--epochs", str(EPOCHS), "-b", str(BATCH), "-j", "1")
        pace = ("--lr", "1.6", "--print-freq", "1", "--snapshot-every", "4", "--save-every", "9")
        script = (str(SCRIPT), str(self.images), "--checkpoints", str(self.checkpoints))
        return self.job.start(self.name, *agent, *script, *sizes, *pace, OMP_NUM_THREADS="1")

    def weights(self) -> dict[str, torch.Tensor]:
        state: dict[str, Any] = CheckpointManager(self.checkpoints).load(STEPS)
        assert state["progress"]["validated_epochs"] == EPOCHS
        return state["model"]  # type: ignore[no-any-return]


def assert_validated(node: Node) -> None:
    """Check that each epoch was validated on all validation images."""
    scored = re.findall(VALIDATED, node.text)
    ends = [STEPS_AN_EPOCH * (epoch + 1) for epoch in range(EPOCHS)]
    assert sorted({int(step) for step, _, _ in scored}) == ends
    assert {int(images) for _, _, images in scored} == {IMAGES // 4}


@pytest.fixture
def undisturbed(job: Job, images: Path) -> tuple[Run, Node]:
    """Start a run on two ranks without faults."""
    run = Run(job, "undisturbed", images)
    return run, run.start(2)


def test_weights_after_a_killed_worker_are_equal_to_those_without_faults(
    job: Job, images: Path, undisturbed: tuple[Run, Node]
) -> None:
    run, node_without_faults = undisturbed
    storm = Run(job, "storm", images)
    node = storm.start(2)
    # The kill is four steps after a snapshot, so that some steps are repeated.
    node.wait_for_log(rf"epoch 1 step {STEPS_AN_EPOCH + 3} ")
    victim = find_workers(node.pid)[1]
    loading = find_children(victim)
    os.kill(victim, signal.SIGKILL)
    assert node.exit_code() == 0, node.text
    assert node_without_faults.exit_code() == 0, node_without_faults.text
    assert loading, "it had a loader worker, of which nothing may be left: see the fixture"
    assert "generation 2: " in node.text
    assert_validated(node_without_faults)
    assert_validated(node)
    ((steps, best),) = re.findall(DONE, node.text, re.MULTILINE)
    assert [(steps, best)] == re.findall(DONE, node_without_faults.text, re.MULTILINE)
    assert steps == str(STEPS)
    expected = run.weights()
    assert all(torch.equal(tested, expected[name]) for name, tested in storm.weights().items())
    scores = {
        int(step): float(top1) for step, top1, _ in re.findall(VALIDATED, node_without_faults.text)
    }
    assert scores[int(best)] == max(scores.values())
    assert_has_learned(node_without_faults.text, max(scores.values()))
    manager = CheckpointManager(storm.checkpoints)
    assert manager.steps(pinned_only=True)[-1] == int(best)
    kept = manager.load(int(best))["progress"]["best_top1"]
    assert kept == pytest.approx(max(scores.values()), abs=0.005)


def assert_has_learned(text: str, best: float) -> None:
    losses = [float(loss) for loss in re.findall(REPORTED, text)]
    assert len(losses) == STEPS
    first, last = losses[:STEPS_AN_EPOCH], losses[-STEPS_AN_EPOCH:]
    assert sum(last) < 0.7 * sum(first)
    assert best > 2 * 100 / len(POLYGON_COLORS), "twice what chance gets right"


def test_a_signal_to_all_processes_stops_cleanly_and_one_rank_can_resume(
    job: Job, images: Path, undisturbed: tuple[Run, Node]
) -> None:
    # A scheduler also signals the data loader workers. The weights of one rank differ from those of
    # two by rounding; a lost or repeated batch would change them more.
    run = Run(job, "run", images)
    node = run.start(2)
    node.wait_for_log(r"epoch 0 step 2 ")
    workers = find_workers(node.pid)
    for loading in [child for worker in workers for child in find_children(worker)]:
        for number in (signal.SIGTERM, signal.SIGUSR2):
            os.kill(loading, number)
    node.signal(signal.SIGUSR2)
    assert node.exit_code() == 75, node.text
    stopped = re.search(r"stopping after step (\d+): ", node.text)
    assert stopped, node.text
    assert CheckpointManager(run.checkpoints).latest() == int(stopped[1])
    single = run.start(1)
    assert single.exit_code() == 0, single.text
    assert_validated(single)
    assert undisturbed[1].exit_code() == 0, undisturbed[1].text
    weights = (one.weights().values() for one in (run, undisturbed[0]))
    tested, expected = (torch.cat([part.flatten() for part in parts]) for parts in weights)
    # Rounding changes the weights by 0.0008, and a missing batch by 0.02 (last) to 0.5 (first).
    assert (tested - expected).norm() < 0.005 * expected.norm()


def test_a_worker_killed_at_the_end_of_an_epoch_resumes_with_its_validation(
    job: Job, images: Path, undisturbed: tuple[Run, Node]
) -> None:
    run = Run(job, "run", images)
    node = run.start(2)
    node.wait_for_log(rf"epoch 0 step {STEPS_AN_EPOCH} ")
    os.kill(wait_until("workers", lambda: find_workers(node.pid))[0], signal.SIGKILL)
    assert node.exit_code() == 0, node.text
    assert_validated(node)
    assert undisturbed[1].exit_code() == 0, undisturbed[1].text
    expected = undisturbed[0].weights()
    assert all(torch.equal(tested, expected[name]) for name, tested in run.weights().items())


def test_a_damaged_image_is_named_in_the_failure_report(job: Job, images: Path) -> None:
    bad = job.folder / "images"
    for name in ImageDataset(images / "train", 32).names[::2]:
        for split in ("train", "val"):
            copy = bad / split / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((images / "train" / name).read_bytes())
    victim = sorted(bad.glob("train/4-corners/*.png"))[3]
    victim.write_bytes(victim.read_bytes()[:60])
    node = Run(job, "run", bad).start(1, restarts=0)
    assert node.exit_code() == 1, node.text
    report = node.text[node.text.index("elasticrun: root cause") :]
    assert f"{victim} cannot be read as an image (" in report
    assert "replace it, or remove it" in report


def test_a_missing_directory_is_named_in_the_failure_report(job: Job) -> None:
    node = Run(job, "run", job.folder / "nowhere").start(1, restarts=0)
    assert node.exit_code() == 1, node.text
    assert f"{job.folder}/nowhere/train has no images" in node.text
