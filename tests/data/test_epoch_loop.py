"""A loop over `epochs` that is resumed from any state does the same as an undisturbed one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from elasticlib import CheckpointManager, ElasticBatchSampler, ElasticDistributedSampler
from elasticlib.errors import ConfigError

pytestmark = [
    # The loader forks its workers from a process with threads, which Python 3.12 warns about.
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    # torchdata 0.11 calls functions that torch 2.13 has deprecated.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]
N, BATCH, EPOCHS = 22, 4, 3  # the last batch of an epoch has two samples
DATA: Any = range(N)

Trace = list[Any]


class Job:
    """A rank with a loader of one kind, and the state that it saves."""

    def __init__(
        self, kind: str, world: int = 1, *, rank: int = 0, counts: bool = True, **options: Any
    ) -> None:
        self.sampler = ElasticDistributedSampler(range(N), world, rank, tail="exact")
        self.source: Any = self.sampler
        self.step_size = BATCH * world
        if "batches" in kind:
            self.source = ElasticBatchSampler(self.sampler, BATCH)
            self.step_size = BATCH
            options |= {"batch_sampler": self.source, "collate_fn": torch.tensor}
        else:
            options |= {"batch_size": BATCH, "sampler": self.sampler}
        is_stateful = kind.startswith("stateful")
        self.loader: Any = (StatefulDataLoader if is_stateful else DataLoader)(DATA, **options)
        self.counts = counts
        self.state: dict[str, Any] = {"data": self.loader if is_stateful else self.source}

    def train(self, save: Callable[[Trace], None], epochs: int = EPOCHS) -> Trace:
        """Train to the end. Call `save` after each step and at the end of each epoch."""
        trace: Trace = []
        for epoch, batches in self.source.epochs(epochs, self.loader):
            self.sampler.set_epoch(epoch)  # as a script did before; it changes nothing
            assert len(batches) == len(self.loader)
            for batch in batches:
                trace.append((epoch, batch.tolist()))
                if self.counts:
                    self.sampler.advance(self.step_size)
                save(trace)
            trace.append(f"work at the end of epoch {epoch}")
            save(trace)
        return trace


KINDS = ("sampler", "batches", "stateful sampler", "stateful batches")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "persistent_workers": True}])
def test_a_job_that_resumes_from_any_of_its_states_goes_on_like_an_undisturbed_one(
    kind: str, options: dict[str, Any]
) -> None:
    counts = not kind.startswith("stateful")  # the state of a stateful loader needs no counts
    saves: list[tuple[Trace, dict[str, Any]]] = []

    def save(trace: Trace) -> None:
        saves.append((list(trace), copy.deepcopy(job.state["data"].state_dict())))

    job = Job(kind, counts=counts, **options)
    trace = job.train(save)
    assert len(saves) == len(trace) == EPOCHS * (6 + 1)
    assert len({str(batch) for batch in trace}) == len(trace)  # Each epoch has its own order.
    step = 3 if options else 1  # Each resumed run starts processes.
    for before, state in saves[::step] + saves[-2:]:
        resumed = Job(kind, counts=counts, **options)
        resumed.state["data"].load_state_dict(state)
        assert before + resumed.train(lambda _: None) == trace
    assert Job.train(resumed, lambda _: None) == []  # The same objects are at the end as well.


@pytest.mark.parametrize("kind", ["batches", "stateful batches"])
def test_another_world_size_resumes_at_the_end_of_an_epoch(kind: str) -> None:
    """Neither state repeats or omits the work at the end of the epoch."""
    states: list[dict[str, Any]] = []
    job = Job(kind, 2, rank=1)
    job.train(lambda _: states.append(copy.deepcopy(job.state["data"].state_dict())), epochs=1)
    for state, expected in ((states[-2], ["work at the end of epoch 0"]), (states[-1], [])):
        for rank in range(3):
            resumed = Job(kind, 3, rank=rank)
            resumed.state["data"].load_state_dict(state)
            trace = resumed.train(lambda _: None, epochs=2)
            works = [event for event in trace if isinstance(event, str)]
            assert works == [*expected, "work at the end of epoch 1"]
            assert len(trace) == len(works) + 6


def test_a_finished_command_that_is_run_again_changes_nothing(tmp_path: Any) -> None:
    """The learning rate is multiplied once for each epoch, and nothing is saved again."""

    def command(epochs: int) -> tuple[int, float, int]:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        job, saves = Job("sampler"), 0
        state = {"optimizer": optimizer, "scheduler": scheduler, "sampler": job.sampler}
        with CheckpointManager(tmp_path) as manager:
            step = manager.restore(state).step
            for _, batches in job.sampler.epochs(epochs, job.loader):
                for _ in batches:
                    optimizer.step()
                    job.sampler.advance(BATCH)
                    step += 1
                scheduler.step()
                manager.save(step, state)
                saves += 1
        return step, optimizer.param_groups[0]["lr"], saves

    assert command(2) == (12, 0.25, 2)
    for _ in range(2):
        assert command(2) == (12, 0.25, 0)
    assert command(3) == (18, 0.125, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_that_leaves_the_batches_goes_on_with_the_next_epoch(kind: str) -> None:
    trace = Job(kind).train(lambda _: None)
    job, used = Job(kind), []
    for epoch, batches in job.source.epochs(EPOCHS, job.loader):
        for batch in batches:
            used.append((epoch, batch.tolist()))
            job.sampler.advance(BATCH)
            break
        assert job.sampler.state_dict()["consumed"] == BATCH
    assert used == [trace[0], trace[7], trace[14]]


def test_states_are_right_after_each_epoch_without_counts() -> None:
    """A script that saves only after each epoch need not count. No warning is issued."""
    states: list[dict[str, Any]] = []
    job = Job("sampler", counts=False)
    for _, batches in job.sampler.epochs(EPOCHS, job.loader):
        assert len(list(batches)) == 6
        states.append(job.sampler.state_dict())
    assert [(state["epoch"], state["consumed"]) for state in states] == [(1, 0), (2, 0), (3, 0)]


def test_counts_after_the_last_batch_belong_to_its_epoch() -> None:
    """A script that accumulates gradients can count the rest after the loop over the batches."""
    job = Job("batches")
    for _, batches in job.source.epochs(2, job.loader):
        for step, _ in enumerate(batches):
            if step % 4 == 3:
                job.sampler.advance(4 * BATCH)
        job.sampler.advance(2 * BATCH)
    assert job.sampler.state_dict()["epoch"] == 2
    assert job.sampler.state_dict()["consumed"] == 0


class Stream(IterableDataset[int]):
    """Reads the position when it is iterated, as the recipe of the guide does."""

    def __init__(self, sampler: ElasticDistributedSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[int]:
        position = self.sampler.position
        return iter(range(position.consumed, position.length))


def test_any_iterable_that_starts_at_the_position_is_a_loader() -> None:
    sampler = ElasticDistributedSampler(range(N), 1, 0, shuffle=False, start_index=20)
    used = [
        (epoch, [batch.tolist() for batch in batches])
        for epoch, batches in sampler.epochs(2, DataLoader(Stream(sampler), BATCH))
    ]
    assert used[0] == (0, [[20, 21]])
    assert [len(batches) for _, batches in used] == [1, 6]


def test_a_body_that_does_not_use_its_batches_is_rejected() -> None:
    job = Job("sampler")
    epochs = job.sampler.epochs(2, job.loader)
    next(epochs)
    assert len(list(job.loader)) == 6
    with pytest.raises(ConfigError, match=r"batches of epoch 0 were not used.*not over the loader"):
        next(epochs)


def test_a_body_that_uses_its_batches_twice_is_rejected() -> None:
    job = Job("sampler")
    _, batches = next(job.sampler.epochs(2, job.loader))
    assert len(list(batches)) == 6
    with pytest.raises(ConfigError, match="batches of epoch 0 can be used once"):
        iter(batches)
