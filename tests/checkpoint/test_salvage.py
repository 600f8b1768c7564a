"""Agents write sharded snapshots at the end: the newest step that all of them together hold, each
its parts, and one of them commits; whoever of them vanishes in between."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import attrs
import left_snapshots
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks
from test_persist import Full, nodes

from elasticlib import CheckpointManager, MemoryStore
from elasticlib.checkpoint import persist, snapshot_slots
from elasticlib.checkpoint.boxes import Box, TensorShard
from elasticlib.checkpoint.persist import (
    COMMIT,
    Board,
    LastWrites,
    Over,
    Piece,
    Said,
    SnapshotState,
    WritePlan,
    in_doubt,
    kinds_in,
    newest_whole,
    next_move,
    piece_of,
)
from elasticlib.checkpoint.place import LocalPlace
from elasticlib.clock import monotonic


class Job:
    """Two nodes of two ranks each, whose workers have ended."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder, self.ranks = folder, ranks
        self.infos = nodes(2, MemoryStore())

    def leaves(self, last: list[int], copies: int = 1) -> dict[int, Any]:
        found = self.ranks.run(left_snapshots.leave_snapshots, 4, self.folder, last, copies)
        states: dict[int, Any] = found[0]
        return states

    def memory(self, node: int) -> Path:
        return self.folder / f"memory{node}"

    def finish(self, *numbers: int, leaves: tuple[bool, ...] = (True, True)) -> list[str]:
        """What these agents say at their end."""
        said = ["?"] * len(numbers)
        writes = [
            LastWrites(self.memory(node), self.infos[node], MemoryStore, leaves=leaves[node])
            for node in numbers
        ]

        def finish(at: int) -> None:
            said[at] = writes[at].run()

        threads = [threading.Thread(target=finish, args=(at,)) for at in range(len(numbers))]
        for thread in threads:
            thread.start()
        for at, thread in enumerate(threads):
            if leaves[at]:
                thread.join(100)
        for write in writes:
            write.stop()
        for thread in threads:
            thread.join(100)
        return said

    def restored(self, world: int) -> tuple[int, Any]:
        found: tuple[int, Any] = self.ranks.run(left_snapshots.restored, world, self.folder)[0]
        return found


@pytest.fixture
def job(tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("ELASTICLIB_INCARNATION", "first")
    monkeypatch.setenv("ELASTICLIB_GENERATION", "3")
    return Job(tmp_path, ranks)


def test_agents_write_the_newest_step_that_all_hold_and_any_number_of_ranks_reads_it(
    job: Job,
) -> None:
    # One rank was killed before it had kept step 3.
    states = job.leaves([3, 3, 2, 3])
    assert job.finish(0, 1) == ["", ""]
    assert CheckpointManager(job.folder / "checkpoints").steps() == [2]
    for world in (3, 1):
        assert job.restored(world) == (2, states[2])


def test_final_save_is_not_skipped_because_of_a_damaged_later_checkpoint(job: Job) -> None:
    states = job.leaves([3, 3, 3, 3])
    with CheckpointManager(job.folder / "checkpoints") as manager:
        manager.save(9, {"w": torch.ones(10)})
    (path,) = (job.folder / "checkpoints").glob("*/state.*")
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    assert job.finish(0, 1) == ["", ""]
    assert CheckpointManager(job.folder / "checkpoints").steps() == [3, 9]
    shutil.rmtree(path.parent)
    assert job.restored(3) == (3, states[3])


def test_a_node_that_stays_writes_its_parts_for_one_that_leaves(job: Job) -> None:
    states = job.leaves([3, 3, 3, 3])
    said = job.finish(0, 1, leaves=(True, False))
    assert said[0] == ""
    assert job.restored(3) == (3, states[3])


def test_nobody_writes_where_no_node_leaves(job: Job) -> None:
    job.leaves([1, 1, 1, 1])
    assert job.finish(0, 1, leaves=(False, False)) == ["", ""]
    assert not CheckpointManager(job.folder / "checkpoints").steps()


def test_of_hsdps_copies_one_node_is_enough_and_each_element_is_written_once(job: Job) -> None:
    states = job.leaves([3, 3, 3, 3], copies=2)
    shutil.rmtree(job.memory(0))
    assert job.finish(1) == [""]
    assert len(list((job.folder / "checkpoints").glob("step-*3/part-*"))) == 2
    assert job.restored(3) == (3, states[3])


def test_what_is_lost_is_told_by_each_node(job: Job) -> None:
    job.leaves([3, 3, 3, 3])
    lose(job.memory(0), 1)
    where = job.folder / "checkpoints"
    why = "it is incomplete: no rank has part 1 of 4"
    said = f"the snapshot of step 3 was not written to {where}: {why}"
    assert job.finish(0, 1) == [said, said]
    assert not CheckpointManager(where).steps()


def lose(memory_of: Path, part: int) -> None:
    snapshot_slots.remove_snapshots(
        memory_of,
        [one for one in snapshot_slots.list_snapshots(memory_of) if one.header.part == part],
    )


def test_nodes_tell_each_other_which_elements_they_hold_where_some_of_both_copies_are_lost(
    job: Job,
) -> None:
    states = job.leaves([3, 3, 3, 3], copies=2)
    lose(job.memory(0), 0)
    lose(job.memory(1), 3)
    assert job.finish(0, 1) == ["", ""]
    assert len(list((job.folder / "checkpoints").glob("step-*3/part-*"))) == 2
    assert job.restored(3) == (3, states[3])


def test_replicas_of_a_node_that_is_gone_are_written_for_it(job: Job) -> None:
    states = job.leaves([3, 3, 3, 3])
    replicate(job.memory(0), job.memory(1))
    shutil.rmtree(job.memory(0))
    assert job.finish(1) == [""]
    assert job.restored(3) == (3, states[3])


def test_nodes_in_doubt_whether_the_newest_step_is_whole_write_an_older_one_in_the_end(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = job.leaves([3, 3, 3, 3], copies=2)
    third = [one for one in snapshot_slots.list_snapshots(job.memory(0)) if one.header.step == 3]
    snapshot_slots.remove_snapshots(job.memory(0), [one for one in third if one.header.part == 1])
    [kind] = kinds_in(job.memory(0))
    [mine] = [piece for piece, _ in kind.held if piece.state.step == 3]
    # The other node has said that it holds the rest, and is gone before it says which tensors'.
    other = attrs.evolve(mine, part=2, share="f" * 32, elements=mine.total)
    Board(MemoryStore, job.infos[1]).put(f"held/{kind.key}/1", [attrs.astuple(other)])
    monkeypatch.setattr(persist, "AGREE_SECONDS", 2.0)
    began = monotonic()
    assert job.finish(0) == [""]
    assert monotonic() - began > 2.0
    assert job.restored(3) == (2, states[2])


def replicate(memory_of: Path, to: Path) -> None:
    """What a node of rank 0 has as replicas in another's memory."""
    for one in snapshot_slots.list_snapshots(memory_of):
        shutil.copyfile(memory_of / one.file, to / "1" / f"from.0.{Path(one.file).name[4:]}")


@pytest.mark.long
def test_who_cannot_write_its_parts_is_heard_by_the_others_which_say_so(job: Job) -> None:
    job.leaves([3, 3, 3, 3])
    full = LocalPlace(job.folder / "checkpoints", Full())
    writes = [
        LastWrites(job.memory(0), job.infos[0], MemoryStore, place=full),
        LastWrites(job.memory(1), job.infos[1], MemoryStore),
    ]
    said = ["?", "?"]

    def finish(at: int) -> None:
        said[at] = writes[at].run()

    threads = [threading.Thread(target=finish, args=(at,)) for at in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert ["No space left on device" in one for one in said] == [True, True]
    assert not CheckpointManager(job.folder / "checkpoints").steps()
    # Another launch clears up what was written in vain.
    with CheckpointManager(job.folder / "checkpoints") as manager:
        manager.save(4, {"w": torch.zeros(1)})
    assert not list((job.folder / "checkpoints").glob("step-*3"))


# -- pure ------------------------------------------------------------------------------------------


def pieces(state: SnapshotState, cuts: dict[int, tuple[int, int]]) -> tuple[list[Piece], Any]:
    """Parts of a tensor of 8 elements: from which of them, and how many."""
    chunks = {
        p: [TensorShard("w", "float32", (8,), Box((at,), (n,)))] for p, (at, n) in cuts.items()
    }
    made = [piece_of(state, part, chunks[part]) for part in cuts]
    return made, {one.share: chunks[one.part] for one in made}


LEFT, RIGHT, ALL = (0, 4), (4, 4), (0, 8)


def test_the_newest_state_is_taken_that_is_covered() -> None:
    old, new = SnapshotState(3, 5, 2, True), SnapshotState(3, 6, 2, True)
    held, rows = pieces(old, {0: LEFT, 1: RIGHT})
    both = newest_whole(held, {})
    assert both == WritePlan(old, tuple(one.share for one in held))
    half, more = pieces(new, {0: LEFT})
    assert newest_whole([*held, *half], rows | more) == both
    whole, more = pieces(new, {0: LEFT, 1: RIGHT})
    assert newest_whole([*held, *whole], {}) == WritePlan(new, both.shares)
    # A later generation has gone back behind what an earlier one has left.
    later = SnapshotState(4, 3, 2, True)
    again, _ = pieces(later, {0: LEFT, 1: RIGHT})
    assert newest_whole([*whole, *again], {}) == WritePlan(later, both.shares)
    assert isinstance(newest_whole(half, more), str)
    assert isinstance(newest_whole([], {}), str)


def test_copies_count_once_and_rows_are_asked_for_where_they_decide_alone() -> None:
    state = SnapshotState(1, 7, 4, True)
    held, rows = pieces(state, {0: LEFT, 1: RIGHT, 2: LEFT, 3: RIGHT})
    assert len({one.share for one in held}) == 2
    assert newest_whole(held, {}) == WritePlan(state, (held[0].share, held[1].share))
    assert not in_doubt(held)
    # With two of the ranks gone their copies are enough, which the rows say.
    left = held[1:3]
    assert isinstance(newest_whole(left, {}), str)
    assert in_doubt(left) == rows.keys()
    assert newest_whole(left, rows) == WritePlan(state, (held[1].share, held[0].share))
    # And with more gone nothing can be.
    assert not in_doubt([held[0], held[2]])
    # Where elements overlap, the number of them does not say whether all are there.
    twice, rows = pieces(state, {0: (0, 4), 1: (2, 4)})
    assert in_doubt(twice) == rows.keys()
    assert str(newest_whole(twice, rows)).endswith("so 2 of the 8 elements of w are missing")
    [one], row = pieces(state, {0: ALL})
    assert newest_whole([one], row) == WritePlan(state, (one.share,))


class Fleet:
    """Nodes that play a plan over one board, in any order, until none has anything to do."""

    def __init__(self, held: list[set[str]], shares: tuple[str, ...]) -> None:
        self.held, self.shares = held, shares
        self.board: dict[str, Said] = {}
        self.version = 0
        self.failed: list[set[str]] = [set() for _ in held]
        self.alive = [True] * len(held)
        self.written: list[str] = []

    def say(self, key: str, **value: Any) -> None:
        self.version += 1
        self.board[key] = Said(json.loads(json.dumps(value)), self.version, 0.0)

    def pass_time(self) -> None:
        """What the living are at is said again; the dead fall silent."""
        for key, said in self.board.items():
            by = said.value.get("by")
            silent = by is not None and not self.alive[by]
            age = 1000.0 if silent or "failed" in said.value else 0.0
            self.board[key] = Said(said.value, said.version, age)

    def move(self, node: int, outcome: str) -> bool:
        """Whether the node had something to do. outcome: what becomes of it."""
        moved = next_move(self.shares, self.board, sorted(self.held[node]), self.failed[node], True)
        if not isinstance(moved, str):
            return False
        self.say(moved, by=node)
        if outcome == "dies":
            self.alive[node] = False
        elif outcome == "fails":
            self.failed[node].add(moved)
            self.say(moved, failed="full")
        elif moved == COMMIT:
            assert all(self.board[share].file for share in self.shares)
            self.say(COMMIT, done=True)
        else:
            self.written.append(moved)
            self.say(moved, file=["part", 1, 1])
        return True


@given(st.data())
def test_a_plan_is_carried_out_if_each_share_has_a_node_that_lives_and_can_write(
    data: st.DataObject,
) -> None:
    shares = tuple("abc"[: data.draw(st.integers(1, 3))])
    count = data.draw(st.integers(1, 4))
    held = [data.draw(st.sets(st.sampled_from(shares))) for _ in range(count)]
    fleet = Fleet(held, shares)
    # One node does all that it begins, whatever the others come to.
    steady = data.draw(st.integers(0, count - 1))
    for _ in range(200):
        node = data.draw(st.integers(0, count - 1))
        outcome = data.draw(st.sampled_from(["works", "works", "dies", "fails"]))
        if fleet.alive[node] and not fleet.move(node, "works" if node == steady else outcome):
            fleet.pass_time()
            if not any(fleet.move(n, "works") for n in range(count) if fleet.alive[n]):
                break
    done = COMMIT in fleet.board and bool(fleet.board[COMMIT].value.get("done"))
    able = all(
        any(
            share in held[node] and fleet.alive[node] and share not in fleet.failed[node]
            for node in range(count)
        )
        or (share in fleet.board and fleet.board[share].file)
        for share in shares
    )
    assert done is able
    for node in range(count):
        move = next_move(shares, fleet.board, sorted(held[node]), fleet.failed[node], True)
        assert not done or move == Over()
