"""The store in a directory: crashes, other files, and a lock that is not released."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import filelock
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.errors import (
    StoreConnectionError,
    StoreError,
    StoreRejectedError,
    StoreTimeoutError,
)
from elasticlib.stores.file_store import MAX_CHANGE_LOG, FileStore, file_name, may_have_prefix

# For each number N on stdin, a child process changes the key and kills itself before its Nth
# operation on a file. The script prints the exit code of the child.
CRASHING = """
import os, signal, sys
from elasticlib.stores.file_store import FileStore
folder, what = sys.argv[1:]
def change(left):
    store = FileStore(folder)
    store.get("key")
    def hook(event, arguments):
        nonlocal left
        if event in ("open", "os.rename", "os.remove", "os.listdir", "fcntl.flock"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    if what == "delete":
        store.delete("key")
    else:
        store.set("key", b"new" * 1000, ttl=1000.0 if what == "lease" else None)
    os._exit(0)
for line in sys.stdin:
    if (pid := os.fork()) == 0:
        change(int(line))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""

WRITING = """
import sys
from elasticlib.stores.file_store import FileStore
store = FileStore(sys.argv[1])
for number in range(10**6):
    store.set("key", b"%d " % number * 2000)
    print(number, flush=True)
"""


def list_names(folder: Path) -> set[str]:
    return set(os.listdir(folder))


def test_the_folder_is_resolved_when_the_store_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    stores = [FileStore("relative"), FileStore("~/own")]
    monkeypatch.chdir(tmp_path / "other")
    for store in stores:
        with contextlib.closing(store):
            store.set("key", b"value")
    for folder in (tmp_path / "relative", tmp_path / "home" / "own"):
        with contextlib.closing(FileStore(folder)) as store:
            assert store.get("key").value == b"value"
    assert not list((tmp_path / "other").iterdir())


def test_the_constructor_creates_no_directory(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "a" / "b")
    assert list_names(tmp_path) == set()
    assert store.get("key") is None
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("what", ["set", "lease", "delete"])
def test_a_crash_at_any_file_operation_leaves_the_old_value_or_the_new(
    tmp_path: Path, what: str
) -> None:
    old, new = b"old" * 1000, None if what == "delete" else b"new" * 1000
    outcomes = []
    command = [sys.executable, "-c", CRASHING, str(tmp_path), what]
    with (
        FileStore(tmp_path) as store,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        for at in range(1, 100):
            before = store.set("key", old)
            store.set("other", b"other")
            process.stdin.write(b"%d\n" % at)
            process.stdin.flush()
            exit_code = int(process.stdout.readline())
            entry = store.get("key")
            value = entry.value if entry else None
            assert value in (old, new)
            assert [e.value for e in store.list("other").entries] == [b"other"]
            if value == new:
                assert store.list("").version > before.version
                assert store.wait("key", after=before.version, timeout=0.0)
            after = store.set("key", b"next")
            assert after.version > (entry or before).version
            assert list_names(tmp_path) == {"lock", "changes", "k.key", "k.other"}
            outcomes.append(value == new)
            if exit_code == 0:
                break
            assert exit_code == -signal.SIGKILL
    # Processes crashed before and after the change, and no later crash undid the change.
    assert outcomes == sorted(outcomes)
    assert outcomes.count(False) >= 3
    assert outcomes[-1]


def test_a_killed_writer_loses_no_confirmed_write(
    tmp_path: Path,
) -> None:
    with FileStore(tmp_path) as store:
        for turn in (0, 3, 7):
            with subprocess.Popen(
                [sys.executable, "-c", WRITING, str(tmp_path)], stdout=subprocess.PIPE
            ) as writer:
                assert writer.stdout is not None
                lines = [writer.stdout.readline() for _ in range(1 + 3 * turn)]
                writer.kill()
                lines += writer.stdout.readlines()
            confirmed = [int(line) for line in lines if line.endswith(b"\n")]
            entry = store.get("key")
            assert entry is not None
            number = int(entry.value.split()[0])
            assert number in (confirmed[-1], confirmed[-1] + 1)
            assert entry.value == b"%d " % number * 2000
            assert store.set("other", b"").version > entry.version
            assert list_names(tmp_path) == {"lock", "changes", "k.key", "k.other"}


def test_a_lock_that_is_not_released_raises_a_timeout_error(tmp_path: Path) -> None:
    with FileStore(tmp_path, timeout=0.1) as store:
        entry = store.set("key", b"")
        with filelock.FileLock(tmp_path / "lock"), ThreadPoolExecutor(1) as pool:
            for call in (
                lambda: store.set("key", b""),
                lambda: store.list(""),
                lambda: store.delete("key"),
            ):
                with pytest.raises(
                    StoreTimeoutError, match=f"could not get the lock of {tmp_path} within"
                ):
                    pool.submit(call).result()
            # Get, list and wait need no lock.
            assert pool.submit(store.get, "key").result() == entry
            waiting = pool.submit(store.wait, "key", after=entry.version, timeout=0.05)
            assert waiting.result() is False
        store.set("key", b"")


def test_no_lease_expires_while_no_client_can_refresh(tmp_path: Path) -> None:
    ttl = 0.4
    with FileStore(tmp_path) as owner, FileStore(tmp_path) as reader:
        lease = owner.set("lease", b"", ttl=ttl)
        assert reader.wait("lease", after=lease.version, timeout=ttl / 4) is False
        with ThreadPoolExecutor(2) as pool:
            with filelock.FileLock(tmp_path / "lock"):
                refreshing = pool.submit(owner.refresh, "lease", lease.version)
                waiting = pool.submit(reader.wait, "lease", after=lease.version, timeout=5 * ttl)
                # The wait is the duration of the outage. It does not synchronise anything.
                threading.Event().wait(4 * ttl)
            refreshing.result()
            for _ in range(8):
                reader.wait("nothing", after=lease.version, timeout=ttl / 4)
                owner.refresh("lease", lease.version)
            assert waiting.result() is False
        assert reader.get("lease") == lease


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("k.key", lambda data: data[:-1]),
        ("k.key", lambda data: data[:20]),
        ("k.key", lambda _: b""),
        ("k.key", lambda data: data[:-1] + b"!"),
        ("k.key", lambda data: data.replace(b'"version": 1', b'"version": "1"')),
        ("k.key", lambda data: data.replace(b'"key": "key"', b'"key": "other"')),
        ("changes", lambda _: b"hello\n"),
        ("changes", lambda data: data[:-5]),
        ("changes", lambda data: data.replace(b"version 1", b"version 2")),
        ("changes", lambda _: b""),
    ],
)
def test_an_incomplete_file_is_rejected_by_name(
    tmp_path: Path, name: str, damage: Callable[[bytes], bytes]
) -> None:
    with FileStore(tmp_path) as store:
        store.set("key", b"value")
    path = tmp_path / name
    path.write_bytes(damage(path.read_bytes()))
    with FileStore(tmp_path) as store, pytest.raises(StoreRejectedError, match=str(path)):
        store.list("")
    with FileStore(tmp_path) as store, pytest.raises(StoreRejectedError, match=str(path)):
        assert store.get("key") is None or store.delete("key")


def test_keys_without_the_file_of_changes_are_rejected(tmp_path: Path) -> None:
    with FileStore(tmp_path) as store:
        store.set("key", b"value")
        (tmp_path / "changes").unlink()
        with pytest.raises(StoreRejectedError, match="went back from version 1 to 0"):
            store.set("key", b"")
    refused = pytest.raises(StoreRejectedError, match=r"holds k\.key, but no file changes")
    with FileStore(tmp_path) as store, refused:
        store.set("key", b"")


def test_other_files_in_the_directory_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "README").write_text("mine")
    with FileStore(tmp_path) as store:
        entry = store.set("README", b"")
        assert store.list("").entries == (entry,)
    assert (tmp_path / "README").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "message"), [("file/store", "Not a directory"), ("file", "File exists")]
)
def test_a_directory_that_cannot_be_created_is_rejected_with_the_remedy(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "file").write_text("")
    refused = f"{tmp_path}/{name} cannot be used: .*{message}.*choose a folder"
    with FileStore(tmp_path / name) as store:
        with pytest.raises(StoreRejectedError, match=refused):
            store.get("key")
        with pytest.raises(StoreRejectedError, match=refused):
            store.set("key", b"")


def test_errors_of_a_directory_that_was_written_to_are_temporary(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store") as store:
        entry = store.set("key", b"")
        (tmp_path / "store").rename(tmp_path / "away")
        (tmp_path / "store").write_text("")
        with pytest.raises(StoreConnectionError, match=f"{tmp_path}/store: .*Not a directory"):
            store.get("key")
        (tmp_path / "store").unlink()
        (tmp_path / "away").rename(tmp_path / "store")
        assert store.get("key") == entry


@pytest.mark.parametrize("call", ["get", "set", "list", "wait"])
def test_a_deleted_store_is_not_an_empty_store(tmp_path: Path, call: str) -> None:
    with FileStore(tmp_path / "store") as store:
        version = store.set("key", b"").version
        shutil.rmtree(tmp_path / "store")
        calls: dict[str, Callable[[], object]] = {
            "get": lambda: store.get("key"),
            "set": lambda: store.set("key", b""),
            "list": lambda: store.list(""),
            "wait": lambda: store.wait("", after=version, timeout=0.0),
        }
        with pytest.raises((StoreRejectedError, StoreConnectionError), match=f"{tmp_path}/store"):
            calls[call]()
    with FileStore(tmp_path / "store") as again:
        assert again.list("").entries == ()


def test_values_outlive_their_writers(tmp_path: Path) -> None:
    with FileStore(tmp_path) as store:
        entry = store.set("key", b"value")
        store.delete(store.set("gone", b"").key)
    with FileStore(tmp_path) as store:
        assert store.get("key") == entry
        assert store.set("key", b"").version == entry.version + 3


def test_a_process_that_was_stopped_gets_an_error_for_its_expired_lease(tmp_path: Path) -> None:
    holding = (
        "import sys\nfrom elasticlib.stores.file_store import FileStore\n"
        "from elasticlib.errors import LeaseLostError\n"
        "store = FileStore(sys.argv[1])\nlease = store.set('lease', b'', ttl=0.3)\n"
        "print('held', flush=True)\nsys.stdin.readline()\n"
        "try:\n    store.refresh('lease', lease.version)\n"
        "except LeaseLostError as error:\n    print(error, flush=True)\n"
    )
    with (
        FileStore(tmp_path) as reader,
        subprocess.Popen(
            [sys.executable, "-c", holding, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as owner,
    ):
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        version = reader.list("").version
        owner.send_signal(signal.SIGSTOP)
        assert reader.wait("lease", after=version, timeout=10.0) is True
        owner.send_signal(signal.SIGCONT)
        out, _ = owner.communicate("\n", timeout=100)
    assert out == "the lease on 'lease' written at version 1 is lost: the key is gone\n"


@given(st.text(max_size=300), st.text(max_size=100))
def test_a_file_name_that_excludes_a_prefix_is_never_wrong(prefix: str, rest: str) -> None:
    key = (prefix + rest).encode(errors="ignore").decode()
    prefix = prefix.encode(errors="ignore").decode()
    name = file_name(key)
    assert may_have_prefix(name, prefix)
    assert len(name) <= 255
    assert not set(name) & set('/\\:*?"<>|\0 ')
    assert name == name.lower()


def test_a_wait_for_a_version_older_than_the_log_returns_true(tmp_path: Path) -> None:
    with FileStore(tmp_path) as writer, FileStore(tmp_path) as reader:
        rare = writer.set("rare", b"").version
        for _ in range(MAX_CHANGE_LOG):
            writer.set("often", b"")
        assert reader.wait("rare", after=rare - 1, timeout=0.0) is True
        assert reader.wait("rare", after=rare, timeout=0.0) is False
        assert reader.wait("often", after=rare + MAX_CHANGE_LOG - 1, timeout=0.0) is True
        assert reader.wait("often", after=rare + MAX_CHANGE_LOG, timeout=0.0) is False


def test_symbolic_links_in_the_directory_are_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    for name in ("aside", "lock", "changes", "k.key"):
        victim.write_text("precious")
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).symlink_to(victim)
        with FileStore(folder, timeout=5.0) as store, contextlib.suppress(StoreError):
            store.set("key", b"value")
            store.get("key")
        assert victim.read_text() == "precious", name


def test_a_named_pipe_instead_of_a_file_is_rejected_and_blocks_no_reader(
    tmp_path: Path,
) -> None:
    with FileStore(tmp_path, timeout=5.0) as store:
        store.set("other", b"")
        os.mkfifo(tmp_path / "k.key")
        with pytest.raises(StoreRejectedError, match=r"k\.key is not a file of a FileStore"):
            store.get("key")
        os.unlink(tmp_path / "changes")
        os.mkfifo(tmp_path / "changes")
        with pytest.raises(StoreRejectedError, match="changes is not a file of a FileStore"):
            store.list("other")


def test_the_temporary_file_of_a_crashed_writer_is_removed(tmp_path: Path) -> None:
    (tmp_path / "aside").write_bytes(b"half a reco")
    with FileStore(tmp_path, timeout=5.0) as store:
        store.set("key", b"value")
    assert not (tmp_path / "aside").exists()
