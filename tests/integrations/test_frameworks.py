"""Examples for frameworks under elasticrun with kills, drains and resizes."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator

import pytest
from framework_jobs import BATCH, SAMPLES, SAVE_EVERY, STEPS, FrameworkJob, said, undisturbed
from jobs import Job, Node

from elasticlib.testing.waiting import wait_until

NAMES = ("lightning", "transformers", "accelerate", "torchdata")
NEEDS = {"torchdata": "torchdata.stateful_dataloader"}
KILLS = (12, 18)  # steps within an epoch
DRAINED_AT = 22  # a step within the last epoch
# The others' loops are the examples' own, over our sampler and checkpoints, whose resizes
# tests/faults/test_training_under_faults.py has; under these frameworks before a release.
RESIZED = (
    *("lightning", "transformers"),
    *(pytest.param(name, marks=pytest.mark.release) for name in ("accelerate", "torchdata")),
)

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(params=NAMES)
def framework(request: pytest.FixtureRequest, job: Job) -> Iterator[FrameworkJob]:
    pytest.importorskip(NEEDS.get(request.param, request.param))
    yield FrameworkJob(job, request.param)
    for folder in job.temporary.glob("pymp-*"):
        shutil.rmtree(folder)  # multiprocessing's own, of loader workers that were killed


@pytest.fixture(scope="session")
def right(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The hash of the weights that a framework's job must end with."""
    base = tmp_path_factory.mktemp("undisturbed")
    return lambda name: undisturbed(name, base / name)


def test_training_is_unchanged_after_kills_a_drain_and_a_second_launch(
    framework: FrameworkJob, right: Callable[[str], str]
) -> None:
    framework.hold.write_text(str(DRAINED_AT))
    first = framework.alone("a", "--max-restarts", "2", kills=",".join(map(str, KILLS)))
    framework.trains(DRAINED_AT, world=2)
    first.signal(signal.SIGUSR2)
    first.wait_for_log("drain: the workers have")
    framework.hold.unlink()
    assert first.exit_code() == 75, first.text
    assert "restarts 2/2" in first.text, first.text
    stopped_at, _ = said(first, "stopped: drain")
    assert DRAINED_AT <= stopped_at <= DRAINED_AT + 2
    second = framework.alone("b")
    assert second.exit_code() == 0, second.text
    assert stopped_at in [line.get("resumed") for line in framework.lines()]
    assert said(second, "done") == (STEPS, right(framework.name))
    found = framework.read_traces()
    assert (found.steps, len(found.uses)) == (STEPS, STEPS * BATCH // SAMPLES)
    assert found.used_exactly_once(SAMPLES)
    # By the kills: what a drain stops at is saved, and nothing of it is done again.
    if framework.keeps_each_step:
        # The step under way; and the one before, if rank 0 was still keeping it when rank 1 died.
        assert len(KILLS) <= found.redone <= 2 * len(KILLS)
    else:
        assert found.redone == sum(step % SAVE_EVERY for step in KILLS)


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
    # Both begin together: who is alone at step 7 would be held there, and not stop for the other.
    meet += ("--rdzv-conf", "last_call_timeout=60")
    resize = "resize: the workers have"
    nodes: dict[str, Node] = {name: framework.start(name, *meet) for name in "ab"}
    framework.trains(7, world=2)
    together = max(line["generation"] for line in framework.lines())
    nodes["b"].kill()
    framework.resumes(generation=together + 1)
    resizes = nodes["a"].text.count(resize)
    nodes["c"] = framework.start("c", *meet)
    wait_until(resize, lambda: nodes["a"].text.count(resize) > resizes)
    framework.hold.unlink()
    framework.trains(8, world=2)
    for name in "ac":
        assert nodes[name].exit_code() == 0, nodes[name].text
    worlds = [line["world_size"] for line in framework.lines() if "step" in line]
    assert {1, 2} == set(worlds)
    found = framework.read_traces()
    assert (found.steps, len(found.uses)) == (STEPS, STEPS * BATCH // SAMPLES)
    # Since the last checkpoint, or the last snapshot that the other node has; none by the resize.
    assert found.redone in ((0, 1, 2) if framework.keeps_each_step else (7 % SAVE_EVERY,))
    assert found.used_exactly_once(SAMPLES)
