"""Agents together write the newest complete sharded snapshot when a job ends early."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import attrs
import pytest
import sharded_snapshots
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks
from test_final_save import FullDisk, nodes

from elasticlib import CheckpointManager
from elasticlib.checkpoint.boxes import Box, TensorShard
from elasticlib.checkpoint.catalog import DataFile
from elasticlib.checkpoint.final_save import FinalSave, Timeouts
from elasticlib.checkpoint.final_save_plan import (
    COMMIT,
    UNSHARDED,
    AgentReport,
    Finish,
    PartOffer,
    SavePlan,
    SnapshotState,
    Task,
    decode_report,
    encode_report,
    newest_complete,
    next_action,
    offer_part,
)
from elasticlib.checkpoint.snapshot_slots import (
    HEADER_BYTES,
    list_snapshots,
    remove_snapshots,
)
from elasticlib.checkpoint.storage import LocalStorage


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

    def final_save(
        self, node: int, *, is_leaving: bool = True, full: bool = False, **limits: float
    ) -> FinalSave:
        return FinalSave(
            self.memory(node),
            self.infos[node],
            is_leaving=is_leaving,
            storage=LocalStorage(self.checkpoints, FullDisk()) if full else None,
            limits=Timeouts(**limits),
        )

    def run(self, *final_saves: FinalSave) -> list[str]:
        """Run final saves at the same time. Return the problem that each of them reports."""
        with ThreadPoolExecutor() as pool:
            return list(pool.map(lambda final_save: final_save.run(), final_saves))

    def run_both(self) -> list[str]:
        return self.run(self.final_save(0), self.final_save(1))

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
    monkeypatch.setenv("ELASTICLIB_INCARNATION", "first")
    monkeypatch.setenv("ELASTICLIB_GENERATION", "3")
    return Job(tmp_path, ranks)


def lose_part(memory_dir: Path, part: int) -> None:
    refs = [ref for ref in list_snapshots(memory_dir) if ref.header.part == part]
    remove_snapshots(memory_dir, refs)


def replicate(memory_dir: Path, to: Path) -> None:
    """Copy the snapshots of node 0 to another node's memory, as replicas."""
    for ref in list_snapshots(memory_dir):
        shutil.copyfile(memory_dir / ref.file, to / "1" / f"from.0.{Path(ref.file).name[4:]}")


def corrupt_metadata(memory_dir: Path, step: int) -> None:
    """Overwrite the first bytes of the pack of one part."""
    ref = next(ref for ref in list_snapshots(memory_dir) if ref.header.step == step)
    with (memory_dir / ref.file).open("r+b") as file:
        file.seek(HEADER_BYTES)
        file.write(b"\xff" * 16)


def test_agents_write_the_newest_step_that_is_complete(job: Job) -> None:
    # One rank was killed before it made its snapshot of step 3.
    states = job.make_snapshots([3, 3, 2, 3])
    assert job.run_both() == ["", ""]
    assert job.steps() == [2]
    assert not list(job.checkpoints.glob("final-save.*"))
    for world_size in (3, 1):
        assert job.restore(world_size) == (2, states[2])


def test_final_save_is_not_skipped_because_of_a_corrupt_later_checkpoint(job: Job) -> None:
    states = job.make_snapshots([3, 3, 3, 3])
    with CheckpointManager(job.checkpoints) as manager:
        manager.save(9, {"w": torch.ones(10)})
    (path,) = job.checkpoints.glob("step-*/state.*")
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    assert job.run_both() == ["", ""]
    assert job.steps() == [3, 9]
    shutil.rmtree(path.parent)
    assert job.restore(3) == (3, states[3])


def test_node_that_stays_writes_its_parts_for_a_node_that_leaves(job: Job) -> None:
    states = job.make_snapshots([3, 3, 3, 3])
    staying = job.final_save(1, is_leaving=False)
    with ThreadPoolExecutor() as pool:
        result = pool.submit(staying.run)
        assert job.final_save(0).run() == ""
        staying.stop()
        assert result.result(60) == ""
    assert job.restore(3) == (3, states[3])


def test_nothing_is_written_if_no_node_leaves(job: Job) -> None:
    job.make_snapshots([1, 1, 1, 1])
    staying = [job.final_save(node, is_leaving=False, poll_s=0.01) for node in (0, 1)]
    with ThreadPoolExecutor() as pool:
        results = [pool.submit(final_save.run) for final_save in staying]
        assert not wait(results, timeout=0.5).done
        for final_save in staying:
            final_save.stop()
        assert [result.result(60) for result in results] == ["", ""]
    assert not job.checkpoints.exists() or not list(job.checkpoints.glob("*-*"))


def test_one_copy_of_each_element_is_written_for_hsdp(job: Job) -> None:
    states = job.make_snapshots([3, 3, 3, 3], copies=2)
    shutil.rmtree(job.memory(0))
    assert job.final_save(1).run() == ""
    assert len(list(job.checkpoints.glob("step-*3/part-*"))) == 2
    assert job.restore(3) == (3, states[3])


def test_each_node_reports_which_part_is_lost(job: Job) -> None:
    job.make_snapshots([3, 3, 3, 3])
    lose_part(job.memory(0), 1)
    reason = "it is not complete: no agent holds part 1 of 4"
    problem = f"the snapshot of step 3 was not written to {job.checkpoints}: {reason}"
    assert job.run_both() == [problem, problem]
    assert not job.steps()


def test_copies_on_two_nodes_complete_a_state_of_which_each_copy_is_incomplete(job: Job) -> None:
    states = job.make_snapshots([3, 3, 3, 3], copies=2)
    lose_part(job.memory(0), 0)
    lose_part(job.memory(1), 3)
    assert job.run_both() == ["", ""]
    assert len(list(job.checkpoints.glob("step-*3/part-*"))) == 2
    assert job.restore(3) == (3, states[3])


def test_replicas_of_a_lost_node_are_written(job: Job) -> None:
    states = job.make_snapshots([3, 3, 3, 3])
    replicate(job.memory(0), job.memory(1))
    shutil.rmtree(job.memory(0))
    assert job.final_save(1, settle_s=0.2).run() == ""
    assert job.restore(3) == (3, states[3])


def test_replicas_are_not_written_if_their_owner_writes(job: Job) -> None:
    states = job.make_snapshots([3, 3, 3, 3])
    replicate(job.memory(0), job.memory(1))
    assert job.run_both() == ["", ""]
    assert len(list(job.checkpoints.glob("step-*3/part-*"))) == 4
    assert job.restore(3) == (3, states[3])


def test_older_complete_step_is_written_if_the_rest_of_the_newest_is_never_reported(
    job: Job,
) -> None:
    states = job.make_snapshots([3, 3, 3, 3], copies=2)
    third = [ref for ref in list_snapshots(job.memory(0)) if ref.header.step == 3]
    remove_snapshots(job.memory(0), [ref for ref in third if ref.header.part == 1])
    # The copies on the other node would complete step 3, but its agent is killed.
    final_save = job.final_save(0, settle_s=1.0)
    assert (final_save.run(), final_save.saved) == ("", 2)
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


def test_each_node_reports_why_another_node_could_not_write(job: Job) -> None:
    job.make_snapshots([3, 3, 3, 3])
    problems = job.run(job.final_save(0, full=True), job.final_save(1))
    assert ["No space left on device" in problem for problem in problems] == [True, True]
    assert not job.steps()
    # The next launch deletes the data files that were not committed.
    with CheckpointManager(job.checkpoints) as manager:
        manager.save(4, {"w": torch.zeros(1)})
    assert not list(job.checkpoints.glob("step-*3"))


# -- which state is written ------------------------------------------------------------------------

LEFT, RIGHT, ALL = (0, 4), (4, 4), (0, 8)


def offer_parts(
    state: SnapshotState, ranges: dict[int, tuple[int, int]]
) -> tuple[list[PartOffer], dict[str, list[TensorShard]]]:
    """Return offers of parts of a tensor with 8 elements, and their chunks by share.

    Args:
        ranges: the first element and the number of elements by part.
    """
    chunks = {
        part: [TensorShard("w", "float32", (8,), Box((begin,), (size,)))]
        for part, (begin, size) in ranges.items()
    }
    offers = [offer_part(state, part, chunks[part]) for part in ranges]
    return offers, {offer.share: chunks[offer.part] for offer in offers}


def no_chunks(share: str) -> list[TensorShard]:
    raise AssertionError(f"the chunks of {share} are not needed")


def test_newest_complete_state_is_chosen() -> None:
    old, new = SnapshotState(3, 5, 2, True), SnapshotState(3, 6, 2, True)
    offers, _ = offer_parts(old, {0: LEFT, 1: RIGHT})
    plan = SavePlan(old, tuple(offer.share for offer in offers))
    assert newest_complete(offers, no_chunks) == plan
    half, _ = offer_parts(new, {0: LEFT})
    assert newest_complete([*offers, *half], no_chunks) == plan
    both, _ = offer_parts(new, {0: LEFT, 1: RIGHT})
    assert newest_complete([*offers, *both], no_chunks) == SavePlan(new, plan.shares)
    # A later generation went back to an earlier step.
    later = SnapshotState(4, 3, 2, True)
    again, _ = offer_parts(later, {0: LEFT, 1: RIGHT})
    assert newest_complete([*both, *again], no_chunks) == SavePlan(later, plan.shares)
    assert isinstance(newest_complete(half, no_chunks), str)
    assert isinstance(newest_complete([], no_chunks), str)


def test_copies_complete_a_state_and_chunks_are_loaded_only_if_parts_are_missing() -> None:
    state = SnapshotState(1, 7, 4, True)
    offers, chunks = offer_parts(state, {0: LEFT, 1: RIGHT, 2: LEFT, 3: RIGHT})
    assert len({offer.share for offer in offers}) == 2
    plan = SavePlan(state, (offers[0].share, offers[1].share))
    assert newest_complete(offers, no_chunks) == plan
    copies = offers[1:3]
    assert newest_complete(copies, chunks.get) == SavePlan(state, plan.shares[::-1])
    assert isinstance(newest_complete(copies, lambda _: None), str)
    assert isinstance(newest_complete([offers[0], offers[2]], no_chunks), str)
    # The number of elements is sufficient, but some of them are in both parts.
    overlapping, chunks = offer_parts(state, {0: (0, 4), 1: (2, 4)})
    assert "2 of the 8 elements of w" in str(newest_complete(overlapping, chunks.get))
    whole, chunks = offer_parts(state, {0: ALL})
    assert newest_complete(whole, chunks.get) == SavePlan(state, (whole[0].share,))


def test_state_is_not_complete_without_a_pipeline_stage() -> None:
    state, chunks = SnapshotState(1, 7, 4, True), {}
    for part in range(4):
        mesh = "0-1" if part < 2 else "2-3"
        chunks[part] = [TensorShard("w", "float32", (8,), Box(*((0,), (8,))), mesh=mesh)]
    offers = [offer_part(state, part, chunks[part]) for part in range(4)]
    shares = {offer.share: chunks[offer.part] for offer in offers}
    # The stages have different tensors of the same name, and each has two copies.
    assert newest_complete(offers[::2], shares.get) == SavePlan(state, tuple(shares))
    assert "of ranks 2, 3 are unknown" in str(newest_complete(offers[:2], shares.get))


# -- what an agent does next -----------------------------------------------------------------------

STATE = SnapshotState(1, 5, 2, True)


def act(
    reports: dict[str, AgentReport], *, is_settled: bool = True, has_all_reports: bool = True
) -> Task | Finish | None:
    """Return what agent "a" does."""
    return next_action(
        "a",
        reports,
        lambda _: None,
        is_settled=is_settled,
        has_all_reports=has_all_reports,
    )


def test_replica_is_left_to_its_owner_as_long_as_the_owner_can_write() -> None:
    own, other = offers_of(STATE)
    replica = attrs.evolve(other, is_replica=True)
    mine = AgentReport((attrs.evolve(own, file=DataFile("0", 1, 1)), replica))
    task = Task(STATE, replica.share)
    assert act({"a": mine, "b": AgentReport((other,))}) is None
    assert act({"a": mine, "b": AgentReport((other,), can_write=False)}) == task
    # The owner may report within the next seconds.
    assert act({"a": mine}, is_settled=False, has_all_reports=False) is None
    assert act({"a": mine}, has_all_reports=False) == task


def test_agent_waits_for_late_agents_only_if_they_can_make_a_difference() -> None:
    old_state = attrs.evolve(STATE, step=4)
    new, old = offers_of(STATE), offers_of(old_state)
    complete = {"a": AgentReport(tuple(new))}
    first = Task(STATE, new[0].share)
    assert act(complete, is_settled=False, has_all_reports=False) == first
    partial = {"a": AgentReport((new[0], *old))}
    assert act(partial, is_settled=False, has_all_reports=False) is None
    assert act(partial, has_all_reports=False) == Task(old_state, old[0].share)
    incomplete = {"a": AgentReport((new[0],))}
    assert act(incomplete, has_all_reports=False) is None
    assert isinstance(act(incomplete), Finish)
    # An agent that cannot write waits only a short time for another one that can.
    failed = {"a": AgentReport((new[0],), can_write=False, problem="the disk is full")}
    assert act(failed, is_settled=False, has_all_reports=False) is None
    assert act(failed, has_all_reports=False) == Finish(problem="the disk is full")


def offers_of(state: SnapshotState) -> list[PartOffer]:
    return offer_parts(state, {0: LEFT, 1: RIGHT})[0]


def test_report_is_decoded_as_it_was_encoded_and_never_from_a_part_of_its_bytes() -> None:
    written = attrs.evolve(offers_of(STATE)[0], file=DataFile("part", 3, 4))
    report = AgentReport(
        (written, PartOffer(STATE, 1)), Task(STATE, UNSHARDED), (STATE,), problem="full"
    )
    data = encode_report(report)
    assert decode_report(data) == report
    assert decode_report(encode_report(AgentReport())) == AgentReport()
    for size in range(len(data)):
        assert decode_report(data[:size]) is None


class Fleet:
    """Agents that act on each other's reports in any order, and may fail or die."""

    def __init__(self, holdings: list[dict[str, bool]], shares: str) -> None:
        """Create one agent for each mapping of a share to whether it is a replica."""
        state = SnapshotState(1, 5, len(shares), True)
        self.shares = set(shares)
        self.num_commits = 0
        self.dead: set[str] = set()
        self.reports = {
            str(number): AgentReport(
                tuple(
                    PartOffer(state, shares.index(share), share, is_replica=is_replica)
                    for share, is_replica in sorted(holding.items(), key=lambda item: item[1])
                )
            )
            for number, holding in enumerate(holdings)
        }

    def act(self, agent: str) -> Task | Finish | None:
        reports = {
            other: attrs.evolve(report, can_write=False, task=None)
            if other in self.dead
            else report
            for other, report in self.reports.items()
        }
        return next_action(agent, reports, lambda _: None, is_settled=True, has_all_reports=True)

    def start(self, agent: str) -> bool:
        """Let an idle agent start a task. Return whether there is one."""
        task = self.act(agent)
        if not isinstance(task, Task):
            return False
        for other, report in self.reports.items():
            assert other in self.dead or report.task != task
        self.reports[agent] = attrs.evolve(self.reports[agent], task=task)
        return True

    def end(self, agent: str, outcome: str) -> None:
        """Let an agent complete its task, fail or die."""
        report = self.reports[agent]
        task = report.task
        assert task is not None
        report = attrs.evolve(report, task=None)
        if outcome == "die":
            self.dead.add(agent)
            return
        if outcome == "fail":
            report = attrs.evolve(report, can_write=False, problem="full")
        elif task.share == COMMIT:
            offers = [offer for each in self.reports.values() for offer in each.offers]
            assert {offer.share for offer in offers if offer.file} == self.shares
            self.num_commits += 1
            report = attrs.evolve(report, committed=(task.state,))
        else:
            file = DataFile(task.share, 1, 1)
            written = [attrs.evolve(o, file=file) if task.is_for(o) else o for o in report.offers]
            report = attrs.evolve(report, offers=tuple(written))
        self.reports[agent] = report


@given(st.data())
def test_state_is_committed_once_if_every_part_is_written_or_has_an_agent_that_can_write(
    data: st.DataObject,
) -> None:
    shares = "abc"[: data.draw(st.integers(1, 3))]
    holdings = st.dictionaries(st.sampled_from(shares), st.booleans())
    fleet = Fleet(data.draw(st.lists(holdings, min_size=1, max_size=4)), shares)
    # One agent completes all that it starts.
    steady = data.draw(st.sampled_from(sorted(fleet.reports)))
    for _ in range(200):
        alive = sorted(fleet.reports.keys() - fleet.dead)
        busy = [agent for agent in alive if fleet.reports[agent].task]
        idle = [agent for agent in alive if agent not in busy]
        if idle and data.draw(st.booleans()) and fleet.start(data.draw(st.sampled_from(idle))):
            continue
        if busy:
            agent = data.draw(st.sampled_from(busy))
            outcome = data.draw(st.sampled_from(("complete", "complete", "die", "fail")))
            fleet.end(agent, "complete" if agent == steady else outcome)
        elif not any(fleet.start(agent) for agent in idle):
            break
    reports = fleet.reports
    able = {agent for agent in reports.keys() - fleet.dead if reports[agent].can_write}
    offers = [(agent, offer) for agent in reports for offer in reports[agent].offers]
    usable = {offer.share for agent, offer in offers if agent in able or offer.file}
    is_possible = usable == fleet.shares
    assert fleet.num_commits == is_possible
    for agent in reports.keys() - fleet.dead:
        action = fleet.act(agent)
        assert isinstance(action, Finish)
        assert (action.step == 5) is is_possible
        assert bool(action.problem) is not is_possible
