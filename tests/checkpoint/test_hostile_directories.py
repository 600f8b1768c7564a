"""Checkpoint directories with malformed files, without write permission, or on a full disk."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from managers import step_folder
from ranks import Ranks

from elasticlib import CheckpointManager, latest_checkpoint, load_checkpoint, save_checkpoint
from elasticlib.checkpoint.catalog import MANIFEST_NAME, append_checksum
from elasticlib.checkpoint.commit import Selection
from elasticlib.checkpoint.snapshot_slots import list_snapshots
from elasticlib.checkpoint.storage import MAX_SMALL_FILE_BYTES
from elasticlib.errors import CheckpointError
from elasticlib.launch.cli import main
from elasticlib.testing.waiting import wait_until


def state(value: float, size: int = 3) -> dict[str, Any]:
    return {"w": torch.full((size,), float(value))}


def save(folder: Path, *steps: int) -> None:
    with CheckpointManager(folder) as manager:
        manager.restore(state(0))
        for step in steps:
            manager.save(step, state(step))


def restore(folder: Path) -> tuple[int, float, tuple[str, ...]]:
    """Return the step and value that a start restores, and the reasons for skipped steps."""
    live = state(0)
    with CheckpointManager(folder) as manager:
        what = manager.restore(live)
        assert {float(value) for value in live["w"]} == {float(live["w"][0])}
        return what.step, float(live["w"][0]), what.skipped


# -- manifests ---------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], object]


def _file(**fields: object) -> Change:
    return lambda manifest: manifest["files"][0].update(fields)


def _of(**fields: object) -> Change:
    return lambda manifest: manifest.update(fields)


def _writer(**fields: object) -> Change:
    return lambda manifest: manifest["writer"].update(fields)


WRONG: dict[str, Change] = {
    "a size in words": _file(size="large"),
    "a size below nothing": _file(size=-5),
    "a size and a half": _file(size=1.5),
    "a size that is true": _file(size=True),
    "a sum in words": _file(checksum="ffffffff"),
    "a sum of 40 bits": _file(checksum=1 << 39),
    "a name that is a number": _file(name=7),
    "a name outside": _file(name="../fence.json"),
    "a name in a folder": _file(name="a/b"),
    "no name": _file(name=""),
    "its own name": _file(name=MANIFEST_NAME),
    "a name with a NUL": _file(name="a\0b"),
    "a name twice": lambda manifest: manifest.update(files=manifest["files"] * 2, parts=2),
    "files that are a number": _of(files=3),
    "files that are numbers": _of(files=[3]),
    "no files": _of(files=[]),
    "parts in words": _of(parts="two"),
    "parts below none": _of(parts=-1),
    "a step in words": _of(step="2"),
    "a run that is a list": _writer(run=[1]),
    "a launch that is none": _writer(incarnation=None),
    "a generation in words": _writer(generation="1"),
    "a writer that is a number": _of(writer=1),
    "a writer with an unknown field": _writer(token="1"),
    "a line that is empty": _of(line=[]),
    "a line of numbers": _of(line=[1]),
    "a line of another branch": lambda manifest: manifest["line"][-1].update(id="0"),
    "a branch twice": lambda manifest: manifest.update(line=manifest["line"] * 2),
    "a metric in words": _of(metrics={"loss": "low"}),
    "a metric that is none": _of(metrics={"loss": float("nan")}),
    "a time in words": _of(saved_at="today"),
    "a time that is none": _of(saved_at=float("nan")),
    "a time without end": _of(saved_at=1e300),
    "a world in words": _of(world_size="two"),
    "a world below none": _of(world_size=-1),
    "a format in words": _of(format="one"),
    "no format": lambda manifest: manifest.pop("format"),
    "no step": lambda manifest: manifest.pop("step"),
}
BODIES: dict[str, bytes] = {
    "a list": b"[]",
    "a number": b"7",
    "no JSON": b"{",
    "not even text": b"\xff\xfe",
    "deep brackets": b"[" * 200_000 + b"]" * 200_000,
    "deep in a field": b'{"format":1,"files":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
    "a long number": b'{"format":1,"step":' + b"9" * 10_000 + b"}",
}


def create_invalid_manifest(name: str, before: bytes) -> bytes:
    """Return an invalid manifest with a correct checksum."""
    if name in BODIES:
        return append_checksum(BODIES[name])
    fields = json.loads(before.rpartition(b"\ncrc32")[0])
    WRONG[name](fields)
    return append_checksum(json.dumps(fields).encode())


@pytest.mark.parametrize("name", [*WRONG, *BODIES])
def test_an_invalid_manifest_with_a_correct_checksum_is_skipped_with_its_reason(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 1, 2)
    path = step_folder(tmp_path, 2) / MANIFEST_NAME
    path.write_bytes(create_invalid_manifest(name, path.read_bytes()))
    step, value, (reason,) = restore(tmp_path)
    assert (step, value) == (1, 1.0)
    assert re.search("step-0000000002.* is corrupt: its manifest", reason)
    manager = CheckpointManager(tmp_path)
    assert (manager.latest(), manager.steps(), list(manager.verify())) == (1, [1], [2])
    assert float(manager.load()["w"][0]) == 1.0
    for flags, status in (([], 0), (["--verify"], 1)):
        assert main(["checkpoints", str(tmp_path), *flags]) == status
        assert "corrupt: its manifest" in capsys.readouterr().out
    # The invalid manifest does not prevent a later save.
    save(tmp_path, 2, 3)
    assert CheckpointManager(tmp_path).steps() == [1, 2, 3]


def run_as_other_user(act: Callable[[], object], user: int = 65534, group: int = 65534) -> Any:
    """Return what `act` returns in a child process of another user, or its CheckpointError's text.

    The child is a fork, because the other user may not be able to start this interpreter.
    """

    def act_as_other_user() -> object:
        os.setgroups([])
        os.setgid(group)
        os.setuid(user)
        return act()

    return run_in_child(act_as_other_user)


def run_in_child(act: Callable[[], object]) -> Any:
    """Return what `act` returns in a child process, or its CheckpointError's text.

    The result is "nothing for a minute" if `act` does not return.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)
            try:
                result = act()
            except CheckpointError as error:
                result = str(error)
            os.write(writer, json.dumps(result).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    try:
        ready, _, _ = select.select([reader], [], [], 60)
        return json.loads(os.read(reader, 1 << 16) or b"null") if ready else "nothing for a minute"
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def read_and_save(folder: Path) -> list[Any]:
    """Return the results of all functions that read the directory, and of a save after them."""
    live = state(0)
    with CheckpointManager(folder) as manager:
        what = manager.restore(live)
        results: list[Any] = [what.step, float(live["w"][0]), what.skipped]
        results += [manager.latest(), float(manager.load()["w"][0]), manager.steps()]
        results.append(sorted(manager.verify()))
        manager.save(3, live)
        manager.wait()
        return [*results, manager.steps()]


def extend_to_4_tib(path: Path) -> None:
    path.unlink()
    path.touch()
    os.truncate(path, 4 << 40)


def test_a_manifest_of_4_tib_is_skipped_with_its_reason(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    extend_to_4_tib(step_folder(tmp_path, 2) / MANIFEST_NAME)
    step, value, (reason,), *rest = read_and_save(tmp_path)
    assert (step, value) == (1, 1.0)
    assert re.search("step-0000000002.* is corrupt: ", reason)
    assert "manifest.json" in reason
    assert rest == [1, 1.0, [1], [2], [1, 3]]


def test_a_fence_of_4_tib_is_replaced_when_the_folder_is_claimed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    extend_to_4_tib(tmp_path / "fence.json")
    assert read_and_save(tmp_path) == [1, 1.0, (), 1, 1.0, [1], [], [1, 3]]
    assert (tmp_path / "fence.json").stat().st_size < MAX_SMALL_FILE_BYTES


@pytest.mark.parametrize("replace", [os.mkfifo, os.mkdir])
def test_a_pipe_or_directory_in_the_place_of_a_file_blocks_nothing(
    tmp_path: Path, replace: Callable[[Path], None]
) -> None:
    save(tmp_path / "a", 1, 2)
    save(tmp_path / "b", 1, 2)
    (data,) = step_folder(tmp_path / "a", 2).glob("*.safetensors")
    for path in (data, step_folder(tmp_path / "b", 2) / MANIFEST_NAME):
        path.unlink()
        replace(path)
        folder = path.parent.parent
        step, value, (reason,), *rest = run_in_child(lambda folder=folder: read_and_save(folder))
        assert (step, value, rest) == (1, 1.0, [1, 1.0, [1], [2], [1, 3]])
        assert re.search("step-0000000002.* is corrupt: ", reason)
        assert path.name in reason
    files = tmp_path / "files"
    save_checkpoint(files / "1.pt", state(1))
    replace(files / "2.pt")
    assert run_in_child(lambda: str(latest_checkpoint(files))) == str(files / "1.pt")


def test_a_fence_that_is_a_pipe_is_replaced_when_the_folder_is_claimed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    fence = tmp_path / "fence.json"
    fence.unlink()
    os.mkfifo(fence)
    assert run_in_child(lambda: read_and_save(tmp_path)) == [1, 1.0, [], 1, 1.0, [1], [], [1, 3]]
    assert fence.is_file()


def test_nothing_is_deleted_behind_a_link_that_an_operator_has_left(tmp_path: Path) -> None:
    folder, archive = tmp_path / "checkpoints", tmp_path / "archive"
    save(folder, 1, 2)
    name = step_folder(folder, 1).name
    (folder / name).rename(archive)
    (folder / name).symlink_to(archive)
    (archive / ".manifest.json.00000000.partial").touch()  # a save that was interrupted
    before = sorted(os.listdir(archive))
    with CheckpointManager(folder, keep_last=1) as manager:
        assert manager.restore(state(0)).step == 2
        manager.save(3, state(3))
        manager.wait()
        assert manager.steps() == [1, 3]
        assert manager.prune() == Selection((1, 3), ())
        assert float(manager.load(1)["w"][0]) == 1.0
    assert step_folder(folder, 1).readlink() == archive
    assert sorted(os.listdir(archive)) == before


@pytest.mark.parametrize("is_in_manifest", [True, False])
def test_a_data_file_that_was_extended_to_4_tib_is_skipped(
    tmp_path: Path, is_in_manifest: bool
) -> None:
    save(tmp_path, 1, 2)
    (pack,) = step_folder(tmp_path, 2).glob("*.safetensors")
    os.truncate(pack, 4 << 40)
    path = step_folder(tmp_path, 2) / MANIFEST_NAME
    if is_in_manifest:
        fields = json.loads(path.read_bytes().rpartition(b"\ncrc32")[0])
        fields["files"][0]["size"] = 4 << 40
        path.write_bytes(append_checksum(json.dumps(fields).encode()))
    step, value, (reason,) = restore(tmp_path)
    assert (step, value) == (1, 1.0)
    assert re.search("step-0000000002.* is corrupt: ", reason)
    manager = CheckpointManager(tmp_path)
    assert manager.latest() == 1
    assert float(manager.load()["w"][0]) == 1.0
    with pytest.raises(CheckpointError, match=r"000002\S+ is corrupt"):
        manager.load(2)
    assert list(manager.verify()) == [2]


# -- a directory without write permission ----------------------------------------------------------

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def share(folder: Path) -> None:
    """Let other users write to the directory, and enter its parents."""
    folder.chmod(0o777)
    for parent in folder.parents:
        if parent.stat().st_mode & 0o001:
            return
        parent.chmod(parent.stat().st_mode | 0o011)


@pytest.fixture
def shared_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    share(folder)
    return folder


def read_without_permission(folder: Path) -> list[object]:
    live = state(0)
    with CheckpointManager(folder) as manager:
        results: list[object] = [
            manager.restore(live).step,
            float(live["w"][0]),
            manager.latest(),
        ]
        results += [manager.steps(), manager.verify(), float(manager.load()["w"][0])]
        for act in (manager.claim, lambda: manager.save(3, live)):
            try:
                act()
                manager.wait()
            except CheckpointError as error:
                results.append("Permission denied" in str(error))
    results.append(main(["checkpoints", str(folder), "--verify"]))
    return results


@needs_root
def test_a_read_only_directory_can_be_read_and_a_save_reports_the_error(
    shared_folder: Path,
) -> None:
    save(shared_folder, 1, 2)
    shared_folder.chmod(0o755)
    before = sorted(os.listdir(shared_folder))
    results = run_as_other_user(lambda: read_without_permission(shared_folder))
    assert results == [2, 2.0, 2, [1, 2], {}, 2.0, True, True, 0]
    assert sorted(os.listdir(shared_folder)) == before
    empty = shared_folder.parent / "empty"
    empty.mkdir(mode=0o755)
    assert run_as_other_user(lambda: restore(empty)) == [0, 0.0, []]
    reason = run_as_other_user(lambda: save(empty, 1))
    assert "empty could not be claimed: " in reason
    assert "Permission denied" in reason


@needs_root
def test_each_user_of_a_group_can_save_in_a_directory_of_the_group(shared_folder: Path) -> None:
    group = 54_321
    os.chown(shared_folder, -1, group)
    shared_folder.chmod(0o2775)

    def save_and_list(step: int) -> list[int]:
        os.umask(0o002)
        save(shared_folder, step)
        return CheckpointManager(shared_folder).steps()

    for user, steps in ((54_321, [1]), (54_322, [1, 2]), (54_321, [1, 2, 3])):
        act = partial(save_and_list, steps[-1])
        assert run_as_other_user(act, user, group) == steps
    strangers = run_as_other_user(lambda: save_and_list(4), 54_323, 54_323)
    assert "Permission denied" in strangers


# -- names of directories --------------------------------------------------------------------------


@pytest.mark.parametrize("name", [b"caf\xe9", b"/".join(["日".encode() * 80] * 12)])
def test_a_directory_can_have_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: bytes
) -> None:
    era = tmp_path / "memory" / "1"
    era.mkdir(parents=True)
    monkeypatch.setenv("ELASTICLIB_SNAPSHOTS", str(era))
    monkeypatch.setenv("ELASTICLIB_GENERATION", "1")
    monkeypatch.setenv("ELASTICLIB_INCARNATION", "launch")
    folder = tmp_path / os.fsdecode(name)
    save(folder, 1)
    with CheckpointManager(folder) as manager:
        assert manager.restore(state(0)).step == 1
        assert manager.snapshot(2, state(2))
    (stored,) = list_snapshots(era.parent)
    assert stored.folder == str(folder)
    assert restore(folder) == (2, 2.0, ())
    empty = tmp_path / "other" / "1"
    empty.mkdir(parents=True)
    monkeypatch.setenv("ELASTICLIB_SNAPSHOTS", str(empty))
    assert restore(folder) == (1, 1.0, ())
    save_checkpoint(folder / "1.pt", state(1))
    assert latest_checkpoint(folder) == folder / "1.pt"


def test_a_path_is_resolved_when_the_manager_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    managers = [CheckpointManager(path) for path in ("relative", "~/own", "file://~/own2")]
    monkeypatch.chdir(tmp_path / "other")
    for manager in managers:
        manager.save(1, state(1)).wait()
        manager.close()
    assert [restore(tmp_path / path)[0] for path in ("relative", "home/own", "home/own2")] == [
        1
    ] * 3
    save_checkpoint("~/files/1.pt", 1)
    assert latest_checkpoint("~/files") == tmp_path / "home" / "files" / "1.pt"
    assert load_checkpoint("~/files/1.pt") == 1
    assert not list((tmp_path / "other").iterdir())


# -- a full disk -------------------------------------------------------------------------------


def fill_disk(disk: Path) -> Path:
    """Write a file until the disk is full, and return the file."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(512)):
            pass
    return filler


def test_a_start_on_a_full_disk_restores_from_memory_or_disk(
    small_disk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    era = tmp_path / "memory" / "1"
    era.mkdir(parents=True)
    monkeypatch.setenv("ELASTICLIB_SNAPSHOTS", str(era))
    monkeypatch.setenv("ELASTICLIB_INCARNATION", "launch")
    monkeypatch.setenv("ELASTICLIB_GENERATION", "1")
    with CheckpointManager(small_disk) as manager:
        assert not manager.restore(state(0))
        manager.save(1, state(1))
        assert manager.snapshot(2, state(2))
    filler = fill_disk(small_disk)
    # Each start has the same result.
    for _ in range(3):
        assert restore(small_disk) == (2, 2.0, ())
    # The first snapshot acquires the directory, which fails, and says what this means.
    with CheckpointManager(small_disk) as manager:
        assert manager.restore(state(0)).step == 2
        assert manager.snapshot(3, state(3))
        wait_until("the warning", lambda: "No space left on device" in caplog.text)
        assert "the next start continues what was saved before" in caplog.text
    assert restore(small_disk) == (3, 3.0, ())
    shutil.rmtree(era)
    era.mkdir()
    assert restore(small_disk) == (1, 1.0, ())
    with CheckpointManager(small_disk) as manager:
        assert manager.restore(state(0)).step == 1
        manager.save(3, state(3))
        with pytest.raises(CheckpointError, match="No space left on device"):
            manager.wait()
        filler.unlink()
        manager.save(4, state(4))
        manager.wait()
        assert manager.steps() == [1, 4]


# -- pruning during a job ----------------------------------------------------------------------

PRUNINGS = 4


def save_repeatedly(folder: Path, stop_file: Path) -> int:
    with CheckpointManager(folder, keep_last=2) as manager:
        count = 0
        while not stop_file.exists():
            count += 1
            # The steps repeat, so the job also saves steps that are being pruned.
            manager.save(count % 7, state(count))
    return count


def test_concurrent_pruning_never_fails_a_job_that_saves(ranks: Ranks, tmp_path: Path) -> None:
    folder, stop_file = tmp_path / "checkpoints", tmp_path / "enough"
    folder.mkdir()
    other_manager = CheckpointManager(folder, keep_last=1)
    pruned = 0
    with ThreadPoolExecutor(1) as executor:
        job = executor.submit(ranks.run, save_repeatedly, 1, folder, stop_file, backend="")
        while pruned < PRUNINGS and not job.done():
            pruned += bool(other_manager.prune().deleted)
        stop_file.touch()
        (num_saves,) = job.result()
    assert pruned == PRUNINGS
    assert CheckpointManager(folder).verify() == {}
    assert restore(folder)[1] >= num_saves - 7
