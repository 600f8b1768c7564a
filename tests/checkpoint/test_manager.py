"""CheckpointManager: saves, retention, fencing and restore."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Job
from managers import GatedStorage, create_manager, step_folder

from elasticlib import (
    CheckpointManager,
    ElasticDistributedSampler,
    KeepEvery,
    KeepLast,
    any_of,
)
from elasticlib.checkpoint.catalog import append_checksum
from elasticlib.checkpoint.restore import RestoreResult
from elasticlib.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFencedError,
    ConfigError,
)
from elasticlib.testing.waiting import wait_until


def state(value: int) -> dict[str, Any]:
    return {"w": torch.full((3,), value), "step": value}


def saved(folder: Path, *steps: int, **options: object) -> CheckpointManager:
    manager = CheckpointManager(folder, **options)  # type: ignore[arg-type]
    for step in steps:
        manager.save(step, state(step))
    manager.wait()
    return manager


def test_modules_optimizers_and_samplers_are_restored_at_any_path(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    sampler = ElasticDistributedSampler(range(10), num_replicas=1, rank=0)
    sampler.advance(4)
    complete = {"model": model, "others": [(optimizer, sampler)], 3: OrderedDict(a=torch.ones(2))}
    with CheckpointManager(f"file://{tmp_path}/new/folder") as manager:
        manager.save(7, complete)
        manager.wait()
        loaded = manager.load()
    assert os.listdir(step_folder(tmp_path / "new" / "folder", 7))
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    other.load_state_dict(loaded["model"])
    assert torch.equal(other(torch.ones(2, 3)), model(torch.ones(2, 3)))
    torch.optim.AdamW(other.parameters()).load_state_dict(loaded["others"][0][0])
    assert loaded["others"][0][1] == sampler.state_dict()
    assert isinstance(loaded[3], OrderedDict)


def test_keep_last_and_keep_every_select_the_checkpoints_that_are_kept(tmp_path: Path) -> None:
    keep = any_of(KeepLast(2), KeepEvery(3))
    manager = saved(tmp_path, 1, 2, 4, 6, 7, 9, keep=keep)
    assert manager.steps() == [6, 7, 9]
    assert manager.latest() == 9
    assert manager.load(6)["step"] == 6
    assert manager.verify() == {}
    # Without a restore the order of steps counts, and a step that was just saved stays.
    manager.save(3, state(3))
    manager.save(2, state(2))
    manager.wait()
    assert manager.steps() == [2, 3, 6, 7, 9]
    manager.close()


def test_invalid_steps_and_states_are_rejected(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(CheckpointError, match=r"step.*got -1"):
            manager.save(-1, {})
        with pytest.raises(CheckpointError, match=r"state\['a'\] is an object"):
            manager.save(1, {"a": object()})
        with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
            manager.load()
        with pytest.raises(FileNotFoundError, match="no checkpoint of step 3"):
            manager.load(3)
        assert manager.latest() is None
        assert manager.steps() == []
    with pytest.raises(CheckpointError, match="is closed"):
        manager.save(1, {})
    assert os.listdir(tmp_path) == []


def damaged(data: bytes, every: int) -> list[bytes]:
    """Return versions of a file with a flipped byte or a truncation at each `every`-th byte."""
    places = [*range(0, len(data), every), len(data) - 1]
    flipped = [data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :] for at in places]
    return [*flipped, *(data[:at] for at in places), data + b"\0"]


def test_each_damaged_byte_is_detected_and_the_older_checkpoint_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 1, 2).close()
    (path,) = step_folder(tmp_path, 2).glob("state.*")
    intact = path.read_bytes()
    manager = CheckpointManager(tmp_path)
    for data in damaged(intact, 41):
        path.write_bytes(data)
        assert list(manager.verify()) == [2]
        if len(data) % 50 == 0 or data[0] != intact[0]:
            assert manager.load()["step"] == 1
            assert manager.latest() == 1
            assert re.search("step-0000000002.* is corrupt: ", manager.skipped[2])
            with pytest.raises(CheckpointCorruptError, match=r"step-0000000002\S+ is corrupt: "):
                manager.load(2)
    assert "skipped" in caplog.text
    path.write_bytes(intact)
    assert manager.load()["step"] == 2
    assert manager.skipped == {}


def test_an_intact_checkpoint_before_damaged_ones_is_not_deleted(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3).close()
    for step in (2, 3):
        path = step_folder(tmp_path, step) / "state.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        assert manager.prune().kept == (1, 2, 3)
        assert manager.load()["step"] == 1
        # Damaged checkpoints are kept until a newer intact one exists.
        manager.save(4, state(4)).wait()
        assert manager.steps() == [4]


def damage_data(folder: Path) -> None:
    (path,) = folder.glob("state.*")
    path.write_bytes(path.read_bytes()[:-1] + b"\1")


def truncate_data(folder: Path) -> None:
    (path,) = folder.glob("state.*")
    os.truncate(path, path.stat().st_size - 1)


def damage_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"step"', b'"stop"'))


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "fence.json"
    }


@pytest.mark.parametrize("damage", [damage_data, truncate_data, damage_manifest])
def test_restore_raises_if_there_are_checkpoints_and_none_is_usable(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    saved(tmp_path, 100, 200).close()
    for folder in tmp_path.glob("step-*"):
        damage(folder)
    before = contents(tmp_path)
    with CheckpointManager(tmp_path, keep_last=3) as manager:
        values = state(0)
        with pytest.raises(CheckpointCorruptError) as refused:
            manager.restore(values)
        message = str(refused.value)
        assert message.startswith("there are checkpoints, and none of them can be used: ")
        assert "step-0000000100" in message or "step 100" in message
        assert 'restore(state, if_unusable="start_over")' in message
        for call in (manager.load, manager.latest):
            with pytest.raises(
                CheckpointCorruptError, match=r"none of the checkpoints in .* can be u"
            ):
                call()
        assert contents(tmp_path) == before

        result = manager.restore(values, if_unusable="start_over")
        assert (result.found, len(result.skipped)) == (False, 2)
        assert values["w"].tolist() == [0, 0, 0]
        manager.save(1, state(1)).wait()
        manager.save(2, state(2)).wait()
        assert contents(tmp_path).items() >= before.items()  # until there are three new ones
        assert manager.restore(values).step == 2


def test_restore_rejects_an_unknown_value_of_if_unusable(tmp_path: Path) -> None:
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(ConfigError, match=r"if_unusable must be .*, got 'ignore'"),
    ):
        manager.restore(state(0), if_unusable="ignore")  # type: ignore[arg-type]


def test_save_returns_before_the_write_and_the_next_save_waits(tmp_path: Path) -> None:
    place, tensor = GatedStorage(tmp_path), torch.ones(3)
    with CheckpointManager(place) as manager:
        assert (manager.last_stall_s, manager.last_durable_s) == (0.0, None)
        manager.save(1, {"w": tensor})
        tensor.zero_()
        assert place.is_writing.wait(30)
        assert manager.steps() == []
        assert manager.last_durable_s is None
        second = threading.Thread(target=manager.save, args=(2, {"w": tensor}))
        second.start()
        place.gate.set()
        second.join(30)
        assert not second.is_alive()
        assert manager.load(1)["w"].tolist() == [1, 1, 1]
        manager.wait()
        assert manager.load(2)["w"].tolist() == [0, 0, 0]
        assert manager.last_stall_s > 0
        assert (manager.last_durable_s or 0) > 0


def test_a_failure_in_the_background_is_raised_once_by_the_next_call(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    manager = CheckpointManager(tmp_path / "file" / "folder")
    for call in (manager.wait, lambda: manager.save(2, {}), manager.close):
        manager._is_closed = False
        manager.save(1, {})
        with pytest.raises(CheckpointError, match="Not a directory"):
            call()
    manager.close()


def test_a_forked_process_neither_waits_nor_saves(tmp_path: Path) -> None:
    place = GatedStorage(tmp_path)
    with CheckpointManager(place) as manager:
        manager.save(1, {"a": 1})
        assert place.is_writing.wait(30)
        child = os.fork()
        if not child:
            status = 1
            try:
                manager.wait()
                manager.close()
                manager.save(2, {})
            except CheckpointError as error:
                status = 0 if "was forked from" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        place.gate.set()
    assert manager.steps() == [1]


def place_in(launch: str, generation: int) -> dict[str, object]:
    return {"run": "job", "launch": launch, "generation": generation}


def test_an_older_generation_cannot_commit_and_the_error_names_the_holder(tmp_path: Path) -> None:
    place = GatedStorage(tmp_path)
    old = create_manager(place, place_in("a", 1))
    old.save(5, state(1))
    assert place.is_writing.wait(30)
    with create_manager(tmp_path, place_in("a", 2)) as new:
        new.claim()
        place.gate.set()
        with pytest.raises(
            CheckpointFencedError, match=r"generation 2 of run 'job' .*generation 1"
        ):
            old.wait()
        assert new.steps() == []
        new.save(5, state(2))
        new.wait()
        assert len(os.listdir(step_folder(tmp_path, 5))) == 2
    with pytest.raises(CheckpointFencedError, match=r"generation 2 .*generation 1"):
        create_manager(tmp_path, place_in("a", 1)).claim()
    old.close()
    assert CheckpointManager(tmp_path).load()["step"] == 2


def test_the_newest_launch_keeps_the_fence_of_an_older_one(tmp_path: Path) -> None:
    first = create_manager(tmp_path, place_in("a", 7))
    first.save(1, state(1))
    first.wait()
    with create_manager(tmp_path, place_in("b", 1)) as second:
        second.claim()
        first.save(2, state(2))
        with pytest.raises(CheckpointFencedError, match="generation 1 of run 'job'"):
            first.close()
        with pytest.raises(CheckpointFencedError, match="launch"):
            create_manager(tmp_path, place_in("a", 8)).claim()
        second.save(3, state(3))
    assert CheckpointManager(tmp_path).steps() == [3]  # The second launch has restored nothing.


def test_only_one_of_several_concurrent_writers_can_commit(tmp_path: Path) -> None:
    refused = []
    all_have_claimed = threading.Barrier(3, timeout=60)

    def write(writer: int) -> None:
        manager = CheckpointManager(tmp_path)
        try:
            manager.claim()
            all_have_claimed.wait()
            for step in range(12):
                manager.save(step, state(writer))
            manager.close()
        except CheckpointFencedError:
            refused.append(writer)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(refused) == 2
    with CheckpointManager(tmp_path) as manager:
        assert manager.verify() == {}
        assert manager.load()["step"] in {0, 1, 2} - set(refused)


def test_pruning_does_not_delete_the_files_of_a_live_writer(tmp_path: Path) -> None:
    place = GatedStorage(tmp_path)
    live = CheckpointManager(place)
    live.save(1, state(1))
    assert place.is_writing.wait(30)
    before = sorted(path.name for path in tmp_path.iterdir())
    CheckpointManager(tmp_path, keep_last=1).prune()
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    place.gate.set()
    live.close()
    assert live.verify() == {}
    assert live.steps() == [1]


def test_the_next_writer_deletes_what_an_interrupted_save_has_left(tmp_path: Path) -> None:
    saved(tmp_path, 1).close()
    left = tmp_path / "step-0000000002.0123abcd.1"
    left.mkdir()
    for name in ("state.safetensors", "notes.txt"):
        (left / name).write_bytes(b"half")
    (tmp_path / ".fence.json.0123abcd.partial").write_bytes(b"half")
    (tmp_path / "step-0000000002").mkdir()  # no folder of this library
    saved(tmp_path, 3).close()
    names = sorted(path.name.partition(".")[0] for path in tmp_path.iterdir())
    assert names == ["", "fence", "step-0000000001", "step-0000000002", "step-0000000003"]
    assert not left.exists()


def test_a_writer_that_lost_the_fence_cannot_prune(tmp_path: Path) -> None:
    old = create_manager(tmp_path, place_in("l", 1), keep_last=1)
    new = create_manager(tmp_path, place_in("l", 2), keep_last=9)
    for step in (1, 2):
        old.save(step, state(step), pin=True).wait()
        old.unpin(step)
    new.save(3, state(3), pin=True).wait()
    with pytest.raises(CheckpointFencedError, match=r"pruned.*generation 2"):
        old.prune()
    assert len(list(tmp_path.glob("step-*"))) == 3


def test_only_rank_0_writes(tmp_path: Path) -> None:
    for rank, local_rank, writes in [(0, 0, True), (2, 0, False)]:
        place = {"rank": rank, "local_rank": local_rank, "world": 4}
        folder = tmp_path / str(rank)
        with create_manager(folder, place) as manager:
            assert manager.is_writer is writes
            manager.claim()
            manager.save(1, {})
            if writes:
                manager.wait()
            else:
                with pytest.raises(CheckpointError, match=r"rank 0 was to save step 1 in"):
                    manager.wait(timeout=0.1)
            assert manager.prune().kept == ((1,) if writes else ())
        assert folder.exists() is writes


ENDING = """
import json, os, sys, torch
from elasticlib import CheckpointManager, context
folder, state, step = sys.argv[1], {"a": torch.ones(1_000_000)}, 0
manager = CheckpointManager(folder)
stop = None
while stop is None:
    step += 1
    manager.save(step, state)
    stop = context().should_stop()
assert manager.latest() == step, (manager.latest(), step)
assert manager.restore(dict(state)).step == step
manager.save(step + 1, state)
names = ("TORCHELASTIC_RUN_ID", "ELASTICLIB_INCARNATION", "ELASTICLIB_GENERATION")
print("stopped at", json.dumps([step, *(os.environ[name] for name in names)]), flush=True)
raise SystemError("an error of the script's own")
"""


def test_a_stop_and_the_exit_of_the_process_wait_for_saves(job: Job, tmp_path: Path) -> None:
    (tmp_path / "ending.py").write_text(ENDING)
    command = (sys.executable, "-m", "elasticlib.launch", "--standalone", "--max-restarts", "0")
    node = job.start("a", *command, str(tmp_path / "ending.py"), str(tmp_path / "kept"))
    manager = CheckpointManager(tmp_path / "kept")
    wait_until("a checkpoint", manager.latest)
    node.signal(signal.SIGTERM)
    node.exit_code()
    assert "an error of the script's own" in node.text
    step, *writer = json.loads(node.wait_for_log(r"stopped at (\[.*\])")[1])
    assert manager.latest() == step + 1
    path = step_folder(tmp_path / "kept", step + 1) / "manifest.json"
    found = json.loads(path.read_text().splitlines()[0])["writer"]
    assert [found["run"], found["incarnation"], str(found["generation"])] == writer
    [events] = job.events()
    [restored] = [event.data for event in events if event.kind == "state.restored"]
    assert (restored["step"], restored["source"]) == (step, "disk")
    assert [event.data["step"] for event in events if event.kind == "checkpoint.saved"][-1] >= step


def test_an_unchecked_failure_is_logged_at_exit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")

    def interrupted() -> None:
        with CheckpointManager(tmp_path / "file") as manager:
            manager.save(1, {})
            raise KeyboardInterrupt

    with caplog.at_level(logging.ERROR), pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "a checkpoint was not saved" in caplog.text


def test_the_result_of_restore_describes_the_step_and_its_source(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    nothing = manager.restore(state(5))
    assert (bool(nothing), nothing.found, nothing.step, nothing.source) == (False, False, 0, "")
    assert str(nothing) == "nothing to restore"
    # Step 0 is restored like any other step.
    saved(tmp_path, 0, 7, 9).close()
    (path,) = step_folder(tmp_path, 9).glob("state.*")
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    values, manager = state(5), CheckpointManager(tmp_path)
    seven = manager.restore(values)
    assert (seven.found, seven.step, seven.source, values["step"]) == (True, 7, "disk", 7)
    assert str(seven).startswith("step 7 from the disk; skipped: rank 0's step 9 (disk, ")
    assert repr(seven) == f"<RestoreResult: {seven}>"
    zero = manager.restore(values, step=0)
    assert (bool(zero), zero.step, str(zero)) == (True, 0, "step 0 from the disk")
    assert zero == RestoreResult(0, "disk") != nothing
    assert len({zero, RestoreResult(0, "disk")}) == 1


@pytest.mark.parametrize(
    "misuse",
    [
        *(lambda r: r == 7, lambda r: r != 0, lambda r: r > 0, lambda r: r >= 3),
        *(lambda r: r + 1, lambda r: 1 + r, lambda r: r - 1, lambda r: r % 100, lambda r: -r),
        *(lambda r: range(r), lambda r: int(r), lambda r: float(r), lambda r: 7 in [r]),
    ],
)
def test_using_the_result_of_restore_as_a_number_raises(
    misuse: Callable[[Any], object],
) -> None:
    with pytest.raises(TypeError, match=r"a RestoreResult, not a number: use its \.step"):
        misuse(RestoreResult(7, "disk"))


def test_restore_of_a_given_step(tmp_path: Path) -> None:
    saved(tmp_path, 3, 6, 9).close()
    values = state(5)
    with CheckpointManager(tmp_path) as manager:
        assert manager.restore(values, 6).step == 6
        assert (values["step"], values["w"].tolist()) == (6, [6, 6, 6])
        with pytest.raises(FileNotFoundError, match=r"no step 5 in .*; there are 3, 6, 9$"):
            manager.restore(values, step=5)
        with pytest.raises(CheckpointError, match="step must be an int"):
            manager.restore(values, step=-1)
        (path,) = step_folder(tmp_path, 3).glob("state.*")
        path.write_bytes(b"\1")
        with pytest.raises(
            CheckpointError, match=r"step 3 cannot be restored.*step-0000000003\S+ is cor"
        ):
            manager.restore(values, step=3)
        assert (values["step"], values["w"].tolist()) == (6, [6, 6, 6])
        # An unreadable checkpoint does not affect readable ones.
        manifest = step_folder(tmp_path, 9) / "manifest.json"
        manifest.write_bytes(append_checksum(b'{"format":999}'))
        with pytest.raises(CheckpointError, match="this version reads"):
            manager.restore(values)
        assert manager.restore(values, step=6).step == 6
    with pytest.raises(FileNotFoundError, match="there is no other step"):
        CheckpointManager(tmp_path / "empty").restore(values, step=1)
