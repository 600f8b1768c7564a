"""Examples for frameworks under elasticrun with kills, drains and resizes."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator

import pytest
from framework_jobs import (
    BATCH,
    SAMPLES,
    SAVE_EVERY,
    STEPS,
    FrameworkJob,
    read_result,
    train_undisturbed,
)
from jobs import Job, Node

from elasticlib.testing.waiting import wait_until

NAMES = ("lightning", "transformers", "accelerate", "torchdata")
NEEDS = {"torchdata": "torchdata.stateful_dataloader"}
KILLS = (12, 18)  # steps within an epoch
DRAINED_AT = 22  # a step within the last epoch
# The loops of the other examples use the sampler and the checkpoints directly. Resizes of these are
# tested in tests/faults/test_training_under_faults.py, and with the frameworks before a release.
RESIZED = (
    *("lightning", "transformers"),
    *(pytest.param(name, marks=pytest.mark.release) for name in ("accelerate", "torchdata")),
)

pytestmark = pytest.mark.timeout(480)


@pytest.fixture(params=NAMES)
def framework(request: pytest.FixtureRequest, job: Job) -> Iterator[FrameworkJob]:
    pytest.importorskip(NEEDS.get(request.param, request.param))
    yield FrameworkJob(job, request.param)
    for folder in job.temporary.glob("pymp-*"):
        shutil.rmtree(
            folder
        )  # multiprocessing leaves the directories of loader workers that were killed


@pytest.fixture(scope="session")
def expected_digest(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return the digest of the weights that the job of a framework must have at its end."""
    base = tmp_path_factory.mktemp("undisturbed")
    return lambda name: train_undisturbed(name, base / name)


def test_training_is_unchanged_after_kills_a_drain_and_a_second_launch(
    framework: FrameworkJob, expected_digest: Callable[[str], str]
) -> None:
    framework.hold.write_text(str(DRAINED_AT))
    first = framework.start_single("a", "--max-restarts", "2", kills=",".join(map(str, KILLS)))
    framework.wait_for_step(DRAINED_AT, world=2)
    first.signal(signal.SIGUSR2)
    first.wait_for_log("drain: the workers have")
    framework.hold.unlink()
    assert first.exit_code() == 75, first.text
    assert "restarts 2/2" in first.text, first.text
    stopped_at, _ = read_result(first, "stopped: drain")
    assert DRAINED_AT <= stopped_at <= DRAINED_AT + 2
    second = framework.start_single("b")
    assert second.exit_code() == 0, second.text
    assert stopped_at in [line.get("resumed") for line in framework.read_lines()]
    assert read_result(second, "done") == (STEPS, expected_digest(framework.name))
    traces = framework.read_traces()
    assert (traces.steps, len(traces.uses)) == (STEPS, STEPS * BATCH // SAMPLES)
    assert traces.used_exactly_once(SAMPLES)
    # Only kills repeat steps, because a drain saves the step at which it stops.
    if framework.keeps_each_step:
        # A kill repeats the current step, and the one before if its snapshot was not complete.
        assert len(KILLS) <= traces.redone <= 2 * len(KILLS)
    else:
        assert traces.redone == sum(step % SAVE_EVERY for step in KILLS)


@pytest.mark.parametrize("framework", RESIZED, indirect=True)
def test_each_sample_is_used_once_after_a_node_is_lost_and_another_joins(
    framework: FrameworkJob,
) -> None:
    framework.hold.write_text("7")
    meet = (
        "--nnodes",
        "1:2",
        "--rdzv-endpoint",
        framework.job.start_store(),
        "--max-restarts",
        "2",
    )
    # Both nodes start together, because a single node would block at step 7 before the other joins.
    meet += ("--rdzv-conf", "last_call_timeout=60")
    resize = "resize: the workers have"
    nodes: dict[str, Node] = {name: framework.start(name, *meet) for name in "ab"}
    framework.wait_for_step(7, world=2)
    together = max(line["generation"] for line in framework.read_lines())
    nodes["b"].kill()
    framework.wait_for_resume(generation=together + 1)
    resizes = nodes["a"].text.count(resize)
    nodes["c"] = framework.start("c", *meet)
    wait_until(resize, lambda: nodes["a"].text.count(resize) > resizes)
    framework.hold.unlink()
    framework.wait_for_step(8, world=2)
    for name in "ac":
        assert nodes[name].exit_code() == 0, nodes[name].text
    worlds = [line["world_size"] for line in framework.read_lines() if "step" in line]
    assert {1, 2} == set(worlds)
    traces = framework.read_traces()
    assert (traces.steps, len(traces.uses)) == (STEPS, STEPS * BATCH // SAMPLES)
    # Repeated are the steps after the last checkpoint or replica; the resize repeats none.
    assert traces.redone in ((0, 1, 2) if framework.keeps_each_step else (7 % SAVE_EVERY,))
    assert traces.used_exactly_once(SAMPLES)
