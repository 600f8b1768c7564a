"""The example on images with real processes: killed, signalled, resized, and given a bad file."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from jobs import Job, Node, until
from processes import children, workers_of

from elasticlib import CheckpointManager
from elasticlib.examples.drawn_shapes import SHAPES, draw_shapes
from elasticlib.examples.image_folder import ImageFolder
from elasticlib.examples.trace import survey

LAUNCH = (sys.executable, "-m", "elasticlib.launch", "--standalone", "--restart-backoff", "0")
SCRIPT = Path(__file__).parents[2] / "elasticlib/examples/imagenet.py"
IMAGES, EPOCHS, BATCH = 94, 5, 8
STEPS_AN_EPOCH = -(-IMAGES // BATCH)
STEPS = EPOCHS * STEPS_AN_EPOCH
DONE = r"done: steps (\d+) best top-1 (\S+) weights sha256 (\w{64})"
REPORTED = r"epoch \d+ step \d+ loss (\S+) top-1"
VALIDATED = r"validated epoch (\d+) loss \S+ top-1 (\S+) top-5 100.00 on (\d+) images"


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """94 images to train on, of which the last batch has 6, and 23 held out: odd on two ranks."""
    folder = tmp_path_factory.mktemp("images") / "shapes"
    draw_shapes(folder, IMAGES)
    return folder


@pytest.fixture
def job(job: Job) -> Iterator[Job]:
    """A job whose loader workers may have been killed: by multiprocessing, or with their rank."""
    yield job
    job.close()
    for listening in job.temporary.glob("pymp-*"):  # to hand out what it loaded
        shutil.rmtree(listening)


@attrs.frozen
class Run:
    """The example on these images, with a folder of its own for what it leaves."""

    job: Job
    name: str
    images: Path

    @property
    def trace(self) -> Path:
        return self.job.folder / f"{self.name}-trace"

    @property
    def checkpoints(self) -> Path:
        return self.job.folder / f"{self.name}-checkpoints"

    def start(self, ranks: int, restarts: int = 3) -> Node:
        agent = (*LAUNCH, "--nproc-per-node", str(ranks), "--max-restarts", str(restarts))
        folders = ("--checkpoints", str(self.checkpoints), "--trace", str(self.trace))
        sizes = ("--image-size", "32", "--epochs", str(EPOCHS), "-b", str(BATCH), "-j", "1")
        pace = ("--lr", "0.05", "-p", "1", "--snapshot-every", "4", "--save-every", "9")
        script = (str(SCRIPT), str(self.images), *folders, *sizes, *pace)
        return self.job.start(self.name, *agent, *script, OMP_NUM_THREADS="1")

    def check_whole(self, node: Node) -> None:
        """Each image of each epoch was used once, and each epoch scored on all held out."""
        told = survey(self.trace)
        assert sorted(told.uses) == list(range(EPOCHS))
        assert told.exactly_once(IMAGES)
        assert told.steps == STEPS
        scored = re.findall(VALIDATED, node.text)
        assert {int(epoch) for epoch, _, _ in scored} == set(range(EPOCHS))
        assert {int(images) for _, _, images in scored} == {IMAGES // 4}


def test_a_run_that_lost_a_worker_has_used_each_image_once_and_ends_with_the_same_weights(
    job: Job, shapes: Path
) -> None:
    calm, storm = Run(job, "calm", shapes), Run(job, "storm", shapes)
    undisturbed, node = calm.start(2), storm.start(2)
    # Four steps past a snapshot's, so that some are done again.
    node.says(rf"epoch 1 step {STEPS_AN_EPOCH + 3} ")
    victim = workers_of(node.pid)[1]
    loading = children(victim)
    os.kill(victim, signal.SIGKILL)
    assert node.exit_code() == 0, node.text
    assert undisturbed.exit_code() == 0, undisturbed.text
    assert loading, "it had a loader worker, of which nothing may be left: see the fixture"
    assert "generation 2 " in node.text
    for run, ended in ((calm, undisturbed), (storm, node)):
        run.check_whole(ended)
    steps, best, weights = re.findall(DONE, node.text)[-1]
    assert (steps, best, weights) == re.findall(DONE, undisturbed.text)[-1]
    assert survey(calm.trace).redone == 0 < survey(storm.trace).redone <= 2 * 5
    check_it_has_learned(undisturbed.text, float(best))
    kept = CheckpointManager(f"{storm.checkpoints}/best").load()
    assert kept["top1"] == pytest.approx(float(best), abs=0.005)


def check_it_has_learned(text: str, best: float) -> None:
    losses = [float(loss) for loss in re.findall(REPORTED, text)]
    assert len(losses) == STEPS
    first, last = losses[:STEPS_AN_EPOCH], losses[-STEPS_AN_EPOCH:]
    assert sum(last) < 0.7 * sum(first)
    assert best > 2 * 100 / len(SHAPES), "twice what chance gets right"


def test_a_signal_to_every_process_of_the_step_is_a_clean_stop_and_one_rank_goes_on(
    job: Job, shapes: Path
) -> None:
    """As a scheduler signals before it takes the node away: loader workers, too, hear it."""
    run = Run(job, "run", shapes)
    node = run.start(2)
    node.says(r"epoch 0 step 2 ")
    workers = workers_of(node.pid)
    for loading in [child for worker in workers for child in children(worker)]:
        for number in (signal.SIGTERM, signal.SIGUSR2):
            os.kill(loading, number)
    node.signal(signal.SIGUSR2)
    assert node.exit_code() == 75, node.text
    stopped = re.search(r"stopping after step (\d+): ", node.text)
    assert stopped, node.text
    assert CheckpointManager(run.checkpoints).latest() == int(stopped[1])
    alone = run.start(1)
    assert alone.exit_code() == 0, alone.text
    run.check_whole(alone)
    assert survey(run.trace).redone == 0


def test_a_worker_killed_at_the_end_of_an_epoch_has_it_scored_and_trains_on_none_of_it_again(
    job: Job, shapes: Path
) -> None:
    run = Run(job, "run", shapes)
    node = run.start(2)
    node.says(rf"epoch 0 step {STEPS_AN_EPOCH} ")
    os.kill(until("workers", lambda: workers_of(node.pid))[0], signal.SIGKILL)
    assert node.exit_code() == 0, node.text
    run.check_whole(node)


def test_a_damaged_image_ends_the_job_with_its_name_in_the_report(job: Job, shapes: Path) -> None:
    images = ImageFolder(shapes / "train")
    bad = job.folder / "images"
    for split in ("train", "val"):
        (bad / split).mkdir(parents=True)
    for index in range(0, IMAGES, 2):
        path = images.path(index)
        for split in ("train", "val"):
            copy = bad / split / path.parent.name / path.name
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(path.read_bytes())
    victim = sorted(bad.glob("train/square/*.png"))[3]
    victim.write_bytes(victim.read_bytes()[:60])
    node = Run(job, "run", bad).start(1, restarts=0)
    assert node.exit_code() == 1, node.text
    report = node.text[node.text.index("elasticrun: first failure") :]
    assert f"{victim} cannot be read as an image (" in report
    assert "replace it, or take it out of the data" in report


def test_a_folder_that_is_not_there_ends_the_job_at_once(job: Job) -> None:
    node = Run(job, "run", job.folder / "nowhere").start(1)
    assert node.exit_code() == 1, node.text
    assert "not retried" in node.text
    assert f"{job.folder}/nowhere/train cannot be read as a folder of images" in node.text


BUFFERS = """
import sys, torch, torch.distributed as dist
from elasticlib import plan_batches
from elasticlib.examples.image_step import *
join_process_group("gloo", "given by the launcher")
rank = dist.get_rank()
model = torch.nn.Sequential(torch.nn.BatchNorm2d(1, momentum=1.0), torch.nn.Flatten())
precision = choose_precision("off", torch.device("cpu"))
take = Step(model, torch.optim.SGD(model.parameters(), 0.0), precision.scaler(), precision)
# Rank 0 has two samples of mean 0, and rank 1 one of mean 3; then rank 0 has one, and rank 1 none.
first, second = torch.full((2 - rank, 1, 2, 2), 3.0 * rank), torch.zeros(1 - rank, 1, 2, 2)
for images, batch in ((first, 3), (second, 1)):
    take(images, torch.zeros(len(images), dtype=torch.int64), plan_batches(batch, 2))
    mean = model[0].running_mean.item()
    # With its end in one write, or the ranks' lines run into one another.
    sys.stdout.write(f"rank {rank} batch {batch} mean {mean:.3f}\\n")
del take
leave_process_group()
"""


def test_running_statistics_are_the_mean_over_all_ranks_samples_on_every_rank(job: Job) -> None:
    script = job.folder / "buffers.py"
    script.write_text(BUFFERS)
    node = job.start("run", *LAUNCH, "--nproc-per-node", "2", str(script))
    assert node.exit_code() == 0, node.text
    found = sorted(re.findall(r"rank (\d) batch (\d) mean (\S+)", node.text))
    assert found == [
        ("0", "1", "0.000"),
        ("0", "3", "1.000"),
        ("1", "1", "0.000"),
        ("1", "3", "1.000"),
    ]
