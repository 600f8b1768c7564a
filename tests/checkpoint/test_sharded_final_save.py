"""Agents write sharded snapshots together when a job ends early: the newest step of which their
memories contain every element."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import attrs
import left_snapshots
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks
from test_final_save import Full, nodes

from elasticlib import CheckpointManager
from elasticlib.checkpoint import memory
from elasticlib.checkpoint.cover import Chunk
from elasticlib.checkpoint.final_save import (
    UNSHARDED,
    AgentReport,
    Claim,
    Commit,
    FinalSave,
    Finish,
    JobView,
    PartOffer,
    SavePlan,
    SnapshotState,
    Timeouts,
    Write,
    decode_report,
    encode_report,
    newest_complete,
    next_action,
    offer_part,
)
from elasticlib.checkpoint.folder import DataFile
from elasticlib.checkpoint.place import LocalPlace


class Job:
    """A job of two nodes with two ranks each, whose workers have ended."""

    def __init__(self, directory: Path, ranks: Ranks) -> None:
        self.directory, self.ranks = directory, ranks
        self.checkpoints = directory / "checkpoints"
        self.infos = nodes(2)

    def leave_snapshots(self, last_steps: list[int], copies: int = 1) -> dict[int, Any]:
        """Let each rank make snapshots up to its last step. Return the state of each step."""
        function = left_snapshots.leave_snapshots
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
            storage=LocalPlace(self.checkpoints, Full()) if full else None,
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
            left_snapshots.restored, world_size, self.directory
        )
        return results[0]


@pytest.fixture
def job(tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("ELASTICLIB_INCARNATION", "first")
    monkeypatch.setenv("ELASTICLIB_GENERATION", "3")
    return Job(tmp_path, ranks)


def lose_part(memory_dir: Path, part: int) -> None:
    refs = [ref for ref in memory.look(memory_dir) if ref.record.part == part]
    memory.remove(memory_dir, refs)


def replicate(memory_dir: Path, to: Path) -> None:
    """Copy the snapshots of node 0 to another node's memory, as replicas."""
    for ref in memory.look(memory_dir):
        shutil.copyfile(memory_dir / ref.file, to / "1" / f"from.0.{Path(ref.file).name[4:]}")


def corrupt(memory_dir: Path, step: int, at: int) -> None:
    ref = next(ref for ref in memory.look(memory_dir) if ref.record.step == step)
    data = bytearray((memory_dir / ref.file).read_bytes())
    data[at] ^= 1
    (memory_dir / ref.file).write_bytes(data)


def test_agents_write_the_newest_step_that_is_complete(job: Job) -> None:
    # One rank was killed before it made its snapshot of step 3.
    states = job.leave_snapshots([3, 3, 2, 3])
    assert job.run_both() == ["", ""]
    assert job.steps() == [2]
    assert not list(job.checkpoints.glob("final-save.*"))
    for world_size in (3, 1):
        assert job.restore(world_size) == (2, states[2])


def test_final_save_is_not_skipped_because_of_a_corrupt_later_checkpoint(job: Job) -> None:
    states = job.leave_snapshots([3, 3, 3, 3])
    with CheckpointManager(job.checkpoints) as manager:
        manager.save(9, {"w": torch.ones(10)})
    (path,) = job.checkpoints.glob("step-*/state.*")
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    assert job.run_both() == ["", ""]
    assert job.steps() == [3, 9]
    shutil.rmtree(path.parent)
    assert job.restore(3) == (3, states[3])


def test_node_that_stays_writes_its_parts_for_a_node_that_leaves(job: Job) -> None:
    states = job.leave_snapshots([3, 3, 3, 3])
    staying = job.final_save(1, is_leaving=False)
    with ThreadPoolExecutor() as pool:
        result = pool.submit(staying.run)
        assert job.final_save(0).run() == ""
        staying.stop()
        assert result.result(60) == ""
    assert job.restore(3) == (3, states[3])


def test_nothing_is_written_if_no_node_leaves(job: Job) -> None:
    job.leave_snapshots([1, 1, 1, 1])
    staying = [job.final_save(node, is_leaving=False, poll_s=0.01) for node in (0, 1)]
    with ThreadPoolExecutor() as pool:
        results = [pool.submit(final_save.run) for final_save in staying]
        assert not wait(results, timeout=0.5).done
        for final_save in staying:
            final_save.stop()
        assert [result.result(60) for result in results] == ["", ""]
    assert not job.checkpoints.exists() or not list(job.checkpoints.glob("*-*"))


def test_one_copy_of_each_element_is_written_for_hsdp(job: Job) -> None:
    states = job.leave_snapshots([3, 3, 3, 3], copies=2)
    shutil.rmtree(job.memory(0))
    assert job.final_save(1).run() == ""
    assert len(list(job.checkpoints.glob("step-*3/part-*"))) == 2
    assert job.restore(3) == (3, states[3])


def test_each_node_reports_which_part_is_lost(job: Job) -> None:
    job.leave_snapshots([3, 3, 3, 3])
    lose_part(job.memory(0), 1)
    reason = "it is not complete: no agent holds part 1 of 4"
    problem = f"the snapshot of step 3 was not written to {job.checkpoints}: {reason}"
    assert job.run_both() == [problem, problem]
    assert not job.steps()


def test_copies_on_two_nodes_complete_a_state_of_which_each_copy_is_incomplete(job: Job) -> None:
    states = job.leave_snapshots([3, 3, 3, 3], copies=2)
    lose_part(job.memory(0), 0)
    lose_part(job.memory(1), 3)
    assert job.run_both() == ["", ""]
    assert len(list(job.checkpoints.glob("step-*3/part-*"))) == 2
    assert job.restore(3) == (3, states[3])


def test_replicas_of_a_lost_node_are_written(job: Job) -> None:
    states = job.leave_snapshots([3, 3, 3, 3])
    replicate(job.memory(0), job.memory(1))
    shutil.rmtree(job.memory(0))
    assert job.final_save(1, replica_s=0.2).run() == ""
    assert job.restore(3) == (3, states[3])


def test_replicas_are_not_written_if_their_owner_writes(job: Job) -> None:
    states = job.leave_snapshots([3, 3, 3, 3])
    replicate(job.memory(0), job.memory(1))
    assert job.run_both() == ["", ""]
    assert len(list(job.checkpoints.glob("step-*3/part-*"))) == 4
    assert job.restore(3) == (3, states[3])


def test_older_complete_step_is_written_if_the_rest_of_the_newest_is_never_reported(
    job: Job,
) -> None:
    states = job.leave_snapshots([3, 3, 3, 3], copies=2)
    third = [ref for ref in memory.look(job.memory(0)) if ref.record.step == 3]
    memory.remove(job.memory(0), [ref for ref in third if ref.record.part == 1])
    # The copies on the other node would complete step 3, but its agent is killed.
    final_save = job.final_save(0, settle_s=1.0)
    assert (final_save.run(), final_save.saved) == ("", 2)
    assert job.restore(3) == (2, states[2])


@pytest.mark.parametrize("at", [memory.RECORD_BYTES + 200, -1])
def test_older_step_is_written_instead_of_a_corrupt_snapshot(job: Job, at: int) -> None:
    states = job.leave_snapshots([3, 3, 3, 3])
    corrupt(job.memory(0), 3, at)
    assert job.run_both() == ["", ""]
    assert job.restore(3) == (2, states[2])


def test_replica_is_written_instead_of_a_corrupt_snapshot(job: Job) -> None:
    states = job.leave_snapshots([3, 3, 3, 3])
    replicate(job.memory(0), job.memory(1))
    corrupt(job.memory(0), 3, -1)
    assert job.run_both() == ["", ""]
    assert job.restore(3) == (3, states[3])


def test_each_node_reports_why_another_node_could_not_write(job: Job) -> None:
    job.leave_snapshots([3, 3, 3, 3])
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
) -> tuple[list[PartOffer], dict[str, list[Chunk]]]:
    """Return offers of parts of a tensor with 8 elements, and their chunks by share.

    Args:
        ranges: the first element and the number of elements by part.
    """
    chunks = {
        part: [Chunk("w", "float32", (8,), ((begin,), (size,)))]
        for part, (begin, size) in ranges.items()
    }
    offers = [offer_part(state, part, chunks[part]) for part in ranges]
    return offers, {offer.share: chunks[offer.part] for offer in offers}


def no_chunks(share: str) -> list[Chunk]:
    raise AssertionError(f"the chunks of {share} are not needed")


def test_newest_complete_state_is_chosen() -> None:
    old, new = SnapshotState(3, 5, 2, True), SnapshotState(3, 6, 2, True)
    offers, chunks = offer_parts(old, {0: LEFT, 1: RIGHT})
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
    assert str(newest_complete(overlapping, chunks.get)).endswith("2 of the 8 elements of w")
    whole, chunks = offer_parts(state, {0: ALL})
    assert newest_complete(whole, chunks.get) == SavePlan(state, (whole[0].share,))


# -- what an agent does next -----------------------------------------------------------------------

STATE = SnapshotState(1, 5, 2, True)


def view_of(reports: dict[str, AgentReport], **fields: Any) -> JobView:
    """Return what agent "a" sees."""
    return JobView(**{"agent": "a", "num_agents": len(reports), "reports": reports, **fields})


def act(view: JobView) -> Write | Commit | Finish | None:
    return next_action(view, lambda _: None, Timeouts())


def test_replica_is_left_to_its_owner_as_long_as_the_owner_can_write() -> None:
    offers, _ = offer_parts(STATE, {0: LEFT, 1: RIGHT})
    replica = attrs.evolve(offers[1], is_replica=True)
    mine = AgentReport((attrs.evolve(offers[0], file=DataFile("0", 1, 1)), replica))
    owner = AgentReport((offers[1],))
    assert act(view_of({"a": mine, "b": owner})) is None
    assert act(view_of({"a": mine, "b": owner}, lost={"b"})) == Write(replica)
    assert act(view_of({"a": mine, "b": attrs.evolve(owner, can_write=False)})) == Write(replica)
    # The owner may report within the next seconds.
    assert act(view_of({"a": mine}, num_agents=2)) is None
    assert act(view_of({"a": mine}, num_agents=2, waited_s=3.0)) == Write(replica)


def test_agent_waits_for_late_agents_only_if_they_can_make_a_difference() -> None:
    old = [attrs.evolve(offer, state=attrs.evolve(STATE, step=4)) for offer in offers_of(STATE)]
    new = offers_of(STATE)
    assert act(view_of({"a": AgentReport(tuple(new))}, num_agents=2)) == Write(new[0])
    partial = {"a": AgentReport((new[0], *old))}
    assert act(view_of(partial, num_agents=2)) is None
    assert act(view_of(partial, num_agents=2, waited_s=5.0)) == Write(old[0])
    assert act(view_of(partial)) == Write(old[0])
    incomplete = {"a": AgentReport((new[0],))}
    assert act(view_of(incomplete, num_agents=2, waited_s=59.0)) is None
    assert isinstance(act(view_of(incomplete, num_agents=2, waited_s=60.0)), Finish)
    assert isinstance(act(view_of(incomplete)), Finish)


def offers_of(state: SnapshotState) -> list[PartOffer]:
    return offer_parts(state, {0: LEFT, 1: RIGHT})[0]


def test_report_is_decoded_as_it_was_encoded_and_never_from_a_part_of_its_bytes() -> None:
    written = attrs.evolve(offers_of(STATE)[0], file=DataFile("part", 3, 4))
    report = AgentReport(
        (written, PartOffer(STATE, 1)), Claim(STATE, UNSHARDED), (STATE,), problem="full"
    )
    data = encode_report(report)
    assert decode_report(data) == report
    assert decode_report(encode_report(AgentReport())) == AgentReport()
    for size in range(len(data)):
        assert decode_report(data[:size]) is None


class Fleet:
    """Agents that act on each other's reports in any order, and may fail or die."""

    def __init__(self, held: list[dict[str, bool]], shares: str) -> None:
        state = SnapshotState(1, 5, len(shares), True)
        self.shares, self.state = shares, state
        self.commits = 0
        self.dead: set[str] = set()
        self.reports = {
            str(number): AgentReport(
                tuple(
                    PartOffer(state, shares.index(share), share, is_replica=is_replica)
                    for share, is_replica in sorted(held_shares.items(), key=lambda item: item[1])
                )
            )
            for number, held_shares in enumerate(held)
        }

    def act(self, agent: str) -> Write | Commit | Finish | None:
        view = JobView(agent, len(self.reports), self.reports, self.dead, 1000.0)
        return next_action(view, lambda _: None, Timeouts())

    def begin(self, agent: str) -> bool:
        """Let an agent that has no task claim one. Return whether there was one."""
        action = self.act(agent)
        if not isinstance(action, Write | Commit):
            return False
        for other, report in self.reports.items():
            assert other in self.dead or report.claim != action.claim
        self.reports[agent] = attrs.evolve(self.reports[agent], claim=action.claim)
        return True

    def end(self, agent: str, outcome: str) -> None:
        """Let an agent complete its task, fail or die."""
        report = self.reports[agent]
        claim = report.claim
        assert claim is not None
        report = attrs.evolve(report, claim=None)
        if outcome == "die":
            self.dead.add(agent)
            return
        if outcome == "fail":
            report = attrs.evolve(report, can_write=False, problem="full")
        elif claim.share == "commit":
            assert {o.share for r in self.reports.values() for o in r.offers if o.file} == {
                *self.shares
            }
            self.commits += 1
            report = attrs.evolve(report, committed=(claim.state,))
        else:
            file = DataFile(claim.share, 1, 1)
            offers = (attrs.evolve(o, file=file) if claim.is_for(o) else o for o in report.offers)
            report = attrs.evolve(report, offers=tuple(offers))
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
        busy = [agent for agent in alive if fleet.reports[agent].claim]
        idle = [agent for agent in alive if agent not in busy]
        if idle and data.draw(st.booleans()) and fleet.begin(data.draw(st.sampled_from(idle))):
            continue
        if busy:
            agent = data.draw(st.sampled_from(busy))
            outcomes = ["complete"] if agent == steady else ["complete", "complete", "die", "fail"]
            fleet.end(agent, data.draw(st.sampled_from(outcomes)))
        elif not any(fleet.begin(agent) for agent in idle):
            break
    able = [
        report
        for agent, report in fleet.reports.items()
        if agent not in fleet.dead and report.can_write
    ]
    offers = [offer for report in able for offer in report.offers]
    offers += [o for report in fleet.reports.values() for o in report.offers if o.file]
    is_possible = {offer.share for offer in offers} == set(shares)
    assert fleet.commits == is_possible
    for agent in fleet.reports.keys() - fleet.dead:
        action = fleet.act(agent)
        assert isinstance(action, Finish)
        assert (action.step == 5) is is_possible
        assert bool(action.problem) is not is_possible
