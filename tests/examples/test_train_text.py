"""The text example with real processes: shares of a batch, saves, and the exit.

tests/faults/test_training_under_faults.py kills its workers.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from traces import read_traces

from elasticlib import CheckpointManager
from elasticlib.errors import ElasticError
from elasticlib.examples import train_text

SAMPLES, BATCH = 206, 8  # 25 full steps an epoch, and one of 6 samples
DONE = r"done: loss (\S+) steps (\d+) weights sha256 (\w{64})"


def flags(folder, **options):
    settings = {
        "checkpoint-dir": folder / "checkpoints",
        "trace": folder / "trace",
        "samples": SAMPLES,
        "global-batch": BATCH,
        "save-every": 4,
        "print-every": 1,
        **{name.replace("_", "-"): value for name, value in options.items()},
    }
    return [f"--{name}={value}" for name, value in settings.items()]


def train(arguments):
    train_text.main(train_text.parse_args(arguments))


@pytest.fixture
def train_here(monkeypatch, capfd):
    """Return a function that trains in this process, without a launcher.

    The function returns what the example prints last: loss, steps and checksum of the weights.
    """
    monkeypatch.delenv("RANK", raising=False)

    def train_here(folder, generation=1, **options):
        monkeypatch.setenv("ELASTICLIB_GENERATION", str(generation))
        train(flags(folder, **options))
        return re.search(DONE, capfd.readouterr().out).groups()

    yield train_here
    if dist.is_initialized():  # after an exception
        dist.destroy_process_group()


def test_ranks_with_fewer_samples_or_none_do_not_change_the_gradient(ranks, tmp_path, train_here):
    """Three ranks share batches of 4 samples and of 1 sample: rank 0 gets two and one."""
    folders = [tmp_path / "one", tmp_path / "three"]
    for folder in folders:
        folder.mkdir()
    train_here(folders[0], samples=9, global_batch=4)
    ranks.run(train, 3, flags(folders[1], samples=9, global_batch=4), launched=True)
    one, three = (CheckpointManager(folder / "checkpoints").load(3) for folder in folders)
    assert one["progress"]["loss"] == pytest.approx(three["progress"]["loss"], rel=1e-4)
    for weight, adam in one["optimizer"]["state"].items():
        other = three["optimizer"]["state"][weight]["exp_avg"]
        torch.testing.assert_close(adam["exp_avg"], other, rtol=1e-2, atol=1e-5)
    assert read_traces(folders[1] / "trace").used_exactly_once(9)


def test_the_last_state_is_saved_after_a_change_of_the_batch_size(tmp_path, train_here):
    train_here(tmp_path, samples=8, global_batch=4, save_every=100)
    _, steps, _ = train_here(
        tmp_path, generation=2, samples=8, global_batch=8, epochs=2, save_every=100
    )
    assert steps == "3"  # two epochs of one step would have been two steps
    checkpoints = CheckpointManager(tmp_path / "checkpoints")
    assert checkpoints.load()["progress"]["step"] == checkpoints.latest() == 3
    assert checkpoints.load()["sampler"]["epoch"] == 2


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (3, 2, "count is 2 and 3: the weights would be different"),
        (3, 0, "the state has no 'logical', which was saved"),
        (0, 2, "nothing was saved under 'logical'"),
    ],
)
def test_a_changed_number_of_logical_workers_is_rejected(
    tmp_path, train_here, before, after, message
):
    train_here(tmp_path, samples=8, logical_workers=before)
    with pytest.raises(ElasticError, match=message):
        train_here(tmp_path, samples=8, logical_workers=after, epochs=2)


TRAIN_AND_LIST_THREADS = """
import contextlib, os, sys, time
from elasticlib.examples import train_text
train_text.main(train_text.parse_args(sys.argv[1:]))

def gloo_threads():
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as name:
            if "gloo" in name.read():
                yield task

# The kernel may show a thread for a moment after it was joined.
deadline = time.monotonic() + 5
while left := [*gloo_threads()]:
    assert time.monotonic() < deadline, left
"""


def test_training_without_a_launcher_leaves_no_gloo_thread(tmp_path):
    """A gloo thread that outlives the process group sometimes aborts the process at its exit."""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN_AND_LIST_THREADS, *flags(tmp_path, samples=16)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert re.search(DONE, done.stdout), done.stderr
    assert (done.returncode, done.stderr) == (0, "")
    assert CheckpointManager(tmp_path / "checkpoints").steps() == [2]
