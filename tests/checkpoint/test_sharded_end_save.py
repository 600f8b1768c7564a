"""Agents together write the newest complete sharded snapshot when a job ends early."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import sharded_snapshots
import torch
from hypothesis import given
from hypothesis import strategies as st
from managers import step_folder
from ranks import Ranks
from test_end_save import FullDisk, nodes

from elasticlib import CheckpointManager
from elasticlib.checkpoint.end_plan import (
    Commit,
    Done,
    Held,
    Put,
    Timeouts,
    list_parts,
    next_end_step,
)
from elasticlib.checkpoint.end_save import EndSave
from elasticlib.checkpoint.refs import StateRef, folder_name
from elasticlib.checkpoint.snapshot_slots import (
    HEADER_BYTES,
    list_snapshots,
    remove_snapshots,
)
from elasticlib.checkpoint.storage import LocalStorage, claim_name
from elasticlib.testing.waiting import wait_until


class Job:
    """A job of two nodes with two ranks each, whose workers have exited."""

    def __init__(self, directory: Path, ranks: Ranks) -> None:
        self.directory, self.ranks = directory, ranks
        self.checkpoints = directory / "checkpoints"
        self.infos = nodes(2)

    def make_snapshots(self, last_steps: list[int], copies: int = 1) -> dict[int, Any]:
        """Let each rank make snapshots up to its last step. Return the state of each step."""
        function = sharded_snapshots.make_snapshots
        states: list[dict[int, Any]] = self.ranks.run(
            function, 4, self.directory, last_steps, copies
        )
        return states[0]

    def memory(self, node: int) -> Path:
        return self.directory / f"memory{node}"

    def end_save(
        self, node: int, *, is_leaving: bool = True, full: bool = False, **limits: float
    ) -> EndSave:
        return EndSave(
            self.memory(node),
            self.infos[node],
            is_leaving=is_leaving,
            storage=LocalStorage(self.checkpoints, FullDisk()) if full else None,
            limits=Timeouts(**{"settle_s": 1.0, **limits}),
        )

    def run(self, *ends: EndSave) -> list[str]:
        """Run end saves at the same time. Return the problem that each of them reports."""
        with ThreadPoolExecutor() as pool:
            return list(pool.map(lambda end_save: end_save.run(), ends))

    def run_both(self, **limits: float) -> list[str]:
        return self.run(*(self.end_save(node, **limits) for node in (0, 1)))

    def num_files(self, step: int) -> int:
        return len(list(step_folder(self.checkpoints, step).glob("*.safetensors")))

    def steps(self) -> list[int]:
        return CheckpointManager(self.checkpoints).steps()

    def restore(self, world_size: int) -> tuple[int, Any]:
        """Return the step and the state that this many ranks restore from the disk."""
        results: list[tuple[int, Any]] = self.ranks.run(
            sharded_snapshots.restore_from_disk, world_size, self.directory
        )
        return results[0]


@pytest.fixture
def job(tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("ELASTICLIB_INCARNATION", "launch")
    monkeypatch.setenv("ELASTICLIB_GENERATION", "3")
    return Job(tmp_path, ranks)


def lose_part(memory_dir: Path, part: int) -> None:
    refs = [ref for ref in list_snapshots(memory_dir) if ref.part == part]
    remove_snapshots(memory_dir, refs)


def replicate(memory_dir: Path, to: Path) -> None:
    """Copy the snapshots of node 0 to another node's memory, as replicas."""
    for ref in list_snapshots(memory_dir):
        shutil.copyfile(memory_dir / ref.place, to / "1" / f"from.0.{Path(ref.place).name[4:]}")


def corrupt_metadata(memory_dir: Path, step: int) -> None:
    """Overwrite the first bytes of the pack of one part."""
    ref = next(ref for ref in list_snapshots(memory_dir) if ref.step == step)
    with (memory_dir / ref.place).open("r+b") as file:
        file.seek(HEADER_BYTES)
        file.write(b"\xff" * 16)


def test_agents_write_the_newest_step_that_is_complete(job: Job) -> None:
    # One rank was killed before it made its snapshot of step 3.
    states = job.make_snapshots([3, 3, 2, 3])
    ends = [job.end_save(node) for node in (0, 1)]
    assert job.run(*ends) == ["", ""]
    assert [end.saved for end in ends] == [2, 2]
    assert job.steps() == [2]
    for world_size in (3, 1):
        assert job.restore(world_size) == (2, states[2])


def test_the_committed_folder_has_only_the_files_that_its_manifest_names(job: Job) -> None:
    states = job.make_snapshots([3, 3, 3, 3])
    assert job.run_both() == ["", ""]
    names = {path.name for path in step_folder(job.checkpoints, 3).iterdir()}
    assert names == {"manifest.json", *(f"part-0000{part}.safetensors" for part in range(4))}
    assert job.restore(3) == (3, states[3])


def test_end_save_is_not_skipped_because_of_a_corrupt_later_checkpoint(job: Job) -> None:
    states = job.make_snapshots([3, 3, 3, 3])
    with CheckpointManager(job.checkpoints) as manager:
        manager.save(9, {"w": torch.ones(10)})
    path = step_folder(job.checkpoints, 9) / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    assert job.run_both() == ["", ""]
    assert job.steps() == [3, 9]
    shutil.rmtree(path.parent)
    assert job.restore(3) == (3, states[3])


def test_node_that_stays_writes_its_parts_for_a_node_that_leaves(job: Job) -> None:
    states = job.make_snapshots([3, 3, 3, 3])
    # A node helps however long it has waited.
    staying = job.end_save(1, is_leaving=False, total_s=0.1, poll_s=0.01)
    with ThreadPoolExecutor() as pool:
        result = pool.submit(staying.run)
        assert not wait([result], timeout=0.5).done
        # Nothing is written before a node leaves.
        assert not job.checkpoints.exists() or not list(job.checkpoints.glob("step-*"))
        assert job.end_save(0).run() == ""
        staying.stop()
        assert result.result(60) == ""
    assert job.restore(3) == (3, states[3])


def test_a_node_that_has_helped_and_then_leaves_waits_for_the_others(job: Job) -> None:
    states = job.make_snapshots([3, 3, 3, 3])
    helping = job.end_save(0, is_leaving=False, poll_s=0.01)
    with ThreadPoolExecutor() as pool:
        helped = pool.submit(helping.run)
        # The agent of node 1 has the directory, and has written no part yet.
        folder = step_folder_of_end(job, 3)
        folder.mkdir(parents=True)
        parts = [folder / f"part-0000{part}.safetensors" for part in (0, 1)]
        wait_until("the parts of node 0", lambda: all(part.exists() for part in parts))
        helping.stop()
        assert helped.result(60) == ""
        leaving = pool.submit(job.end_save(0).run)
        assert not wait([leaving], timeout=0.5).done
        assert job.end_save(1).run() == ""
        assert leaving.result(60) == ""
    assert job.restore(3) == (3, states[3])


def step_folder_of_end(job: Job, step: int) -> Path:
    branch = list_snapshots(job.memory(0))[0].branch
    return job.checkpoints / folder_name(step, branch, "end")


@pytest.mark.parametrize("lost", [None, 0, 1])
def test_one_copy_of_each_element_is_written_for_hsdp(job: Job, lost: int | None) -> None:
    states = job.make_snapshots([3, 3, 3, 3], copies=2)
    if lost is not None:
        shutil.rmtree(job.memory(lost))
    ends = [job.end_save(node) for node in (0, 1) if node != lost]
    assert job.run(*ends) == [""] * len(ends)
    assert job.num_files(3) == 2
    assert job.restore(3) == (3, states[3])


def test_copies_on_two_nodes_complete_a_state_of_which_each_copy_is_incomplete(job: Job) -> None:
    states = job.make_snapshots([3, 3, 3, 3], copies=2)
    lose_part(job.memory(0), 0)
    lose_part(job.memory(1), 3)
    assert job.run_both() == ["", ""]
    assert job.num_files(3) == 2
    assert job.restore(3) == (3, states[3])


def test_each_node_reports_which_part_is_lost(job: Job) -> None:
    job.make_snapshots([3, 3, 3, 3])
    lose_part(job.memory(0), 1)
    reason = "it is incomplete: no node has written part 1 of 4"
    problem = f"the snapshot of step 3 was not written to {job.checkpoints}: {reason}"
    assert job.run_both(peers_s=5.0) == [problem, problem]
    assert not job.steps()


def test_each_node_reports_its_own_error_or_which_part_is_missing(job: Job) -> None:
    job.make_snapshots([3, 3, 3, 3])
    full, other = job.run(job.end_save(0, full=True), job.end_save(1, peers_s=5.0))
    assert "No space left on device" in full
    assert "no node has written parts 0, 1 of 4" in other
    assert not job.steps()
    # The next writer deletes the data files that were not committed.
    with CheckpointManager(job.checkpoints) as manager:
        manager.save(4, {"w": torch.zeros(1)})
    assert not list(job.checkpoints.glob("*.end"))


def test_replicas_of_a_lost_node_are_written(job: Job) -> None:
    states = job.make_snapshots([3, 3, 3, 3])
    replicate(job.memory(0), job.memory(1))
    shutil.rmtree(job.memory(0))
    assert job.end_save(1).run() == ""
    assert job.restore(3) == (3, states[3])


def test_replicas_are_not_written_if_their_owner_writes(job: Job) -> None:
    states = job.make_snapshots([3, 3, 3, 3])
    replicate(job.memory(0), job.memory(1))
    assert job.run_both() == ["", ""]
    assert job.num_files(3) == 4
    assert job.restore(3) == (3, states[3])


def test_older_complete_step_is_written_if_the_rest_of_the_newest_never_comes(job: Job) -> None:
    states = job.make_snapshots([3, 3, 3, 3], copies=2)
    third = [ref for ref in list_snapshots(job.memory(0)) if ref.step == 3]
    remove_snapshots(job.memory(0), [ref for ref in third if ref.part == 1])
    # The copies on the other node would complete step 3, but its agent is killed.
    end = job.end_save(0)
    assert (end.run(), end.saved) == ("", 2)
    assert job.restore(3) == (2, states[2])


def test_a_state_is_enough_that_was_written_before_the_newest_one(job: Job) -> None:
    states = job.make_snapshots([2, 2, 2, 2])
    assert job.run_both() == ["", ""]
    # Only one rank made a snapshot of step 3 before the job failed.
    job.make_snapshots([0, 0, 3, 0])
    ends = [job.end_save(node) for node in (0, 1)]
    assert job.run(*ends) == ["", ""]
    assert [end.saved for end in ends] == [2, 2]
    assert job.restore(3) == (2, states[2])


def test_older_step_is_written_instead_of_an_unreadable_snapshot(job: Job) -> None:
    states = job.make_snapshots([3, 3, 3, 3])
    corrupt_metadata(job.memory(0), 3)
    assert job.run_both() == ["", ""]
    assert job.restore(3) == (2, states[2])


def test_replica_is_written_instead_of_an_unreadable_snapshot(job: Job) -> None:
    states = job.make_snapshots([3, 3, 3, 3])
    replicate(job.memory(0), job.memory(1))
    corrupt_metadata(job.memory(0), 3)
    assert job.run_both() == ["", ""]
    assert job.restore(3) == (3, states[3])


# -- what an agent does next -----------------------------------------------------------------------


class Fleet:
    """Agents that act in any order in the folders of two states, and may fail or die."""

    def __init__(self, holdings: list[dict[tuple[int, int], int]], num_parts: int) -> None:
        """Create one agent for each mapping of a step and a part to the number of its copy."""
        self.holdings, self.num_parts, self.limits = holdings, num_parts, Timeouts()
        self.folders: dict[int, dict[str, int]] = {5: {}, 6: {}}  # names, with the size 1
        self.dead_claims: set[str] = set()
        self.committed: set[int] = set()
        self.quiet_s = 0.0
        self.tasks: dict[int, tuple[int, str]] = {}  # by agent: the step and the file
        self.ended: dict[int, str] = {}  # by agent: the problem
        self.problems: dict[int, str] = {}  # of agents whose disk has failed
        self.dead: set[int] = set()

    def states(self, agent: int) -> list[Held]:
        held = []
        for step in (6, 5):
            parts = {part: copy for (s, part), copy in self.holdings[agent].items() if s == step}
            stalled = self.dead_claims if self.quiet_s >= self.limits.stall_s else set()
            numbers = range(self.num_parts)
            files, free = list_parts(self.folders[step], numbers, stalled)
            missing = "lacks a part" if len(files) < self.num_parts else ""
            refs = tuple(
                StateRef("0", step, parts=self.num_parts, part=part, copy=copy)
                for part, copy in parts.items()
            )
            if refs:
                is_saved = any(saved >= step for saved in self.committed)
                held.append(Held(refs, files, free, missing, is_saved=is_saved))
        return held

    def start(self, agent: int) -> bool:
        """Let an idle agent do something. Return whether it does."""
        problem = self.problems.get(agent, "")
        match next_end_step(self.states(agent), self.quiet_s, self.limits, problem):
            case None:
                return False
            case Done(problem):
                self.ended[agent] = problem
            case Commit(held):
                step = held.refs[0].step
                assert len(held.files) == self.num_parts
                self.committed.add(step)
                self.quiet_s = 0.0
            case Put(ref, name):
                assert self.folders[ref.step].keys().isdisjoint({name, claim_name(name)})
                self.folders[ref.step][claim_name(name)] = 1
                self.tasks[agent] = (ref.step, name)
                self.quiet_s = 0.0
        return True

    def end(self, agent: int, outcome: str) -> None:
        """Let an agent complete its file, fail or die."""
        step, name = self.tasks.pop(agent)
        if outcome == "die":
            self.dead.add(agent)
            self.dead_claims.add(claim_name(name))
            return
        del self.folders[step][claim_name(name)]
        if outcome == "fail":
            self.problems[agent] = "full"
        else:
            self.folders[step][name] = 1
        self.quiet_s = 0.0

    def run_to_the_end(self) -> None:
        """Let all agents that have not died act until they end. No more writing fails."""
        for _ in range(100):
            for agent in tuple(self.tasks):
                self.end(agent, "complete")
            if True not in [self.start(agent) for agent in self.idle]:
                self.quiet_s += 5.0
        assert not self.idle, "an agent never ends"

    @property
    def idle(self) -> list[int]:
        agents = set(range(len(self.holdings)))
        return sorted(agents - self.dead - self.ended.keys() - self.tasks.keys())


def test_the_part_of_a_dead_agent_is_written_again_although_an_older_state_is_saved() -> None:
    fleet = Fleet([{(5, 0): 0}, {(6, 0): 0}, {(5, 0): 0, (6, 0): 0}], num_parts=1)
    assert fleet.start(0)
    assert fleet.start(1)
    fleet.end(0, "complete")
    fleet.end(1, "die")
    fleet.run_to_the_end()
    assert fleet.committed == {5, 6}


@given(st.data())
def test_the_newest_state_whose_parts_have_agents_that_can_write_is_committed(
    data: st.DataObject,
) -> None:
    num_parts = data.draw(st.integers(1, 3))
    keys = st.tuples(st.sampled_from((5, 6)), st.integers(0, num_parts - 1))
    holdings = st.dictionaries(keys, st.integers(0, 2))
    fleet = Fleet(data.draw(st.lists(holdings, min_size=1, max_size=4)), num_parts)
    steady = data.draw(st.sets(st.sampled_from(range(len(fleet.holdings)))))
    for _ in range(100):
        if fleet.idle and data.draw(st.booleans()):
            fleet.start(data.draw(st.sampled_from(fleet.idle)))
        elif fleet.tasks:
            agent = data.draw(st.sampled_from(sorted(fleet.tasks)))
            outcome = data.draw(st.sampled_from(("complete", "die", "fail")))
            fleet.end(agent, "complete" if agent in steady else outcome)
        else:
            break
    fleet.run_to_the_end()
    held = {step: {p for a in steady for s, p in fleet.holdings[a] if s == step} for step in (5, 6)}
    possible = [step for step, parts in held.items() if len(parts) == num_parts]
    assert max(fleet.committed, default=0) >= max(possible, default=0)
    for agent in steady:
        newest = max((step for step, _ in fleet.holdings[agent]), default=0)
        is_lost = newest and not any(s in fleet.committed for s, _ in fleet.holdings[agent])
        is_lost = is_lost and max(fleet.committed, default=0) < newest
        assert bool(fleet.ended[agent]) == bool(is_lost)
