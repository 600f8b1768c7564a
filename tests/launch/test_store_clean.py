"""The command `elasticlib store clean`: which keys it deletes, and which it never touches."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from elasticlib.clock import format_utc, wall
from elasticlib.launch.cli import main
from elasticlib.options import RendezvousSettings
from elasticlib.rendezvous.ended_jobs import delete_job, find_ended_jobs
from elasticlib.rendezvous.membership import (
    JobEnd,
    JobPhase,
    Leader,
    Membership,
    NodeRecord,
    form_generation,
)
from elasticlib.rendezvous.rank_assignment import shard_members
from elasticlib.rendezvous.store_layout import (
    JOBS_PREFIX,
    StoreKeys,
    encode,
    encode_shard,
    encode_state,
)
from elasticlib.stores.file_store import FileStore
from elasticlib.stores.interface import Store

NODES = tuple(NodeRecord(f"id{n}", f"host{n}", "", 1) for n in range(3))


def write_job(store: Store, run_id: str, *, ended_hours_ago: float | None) -> StoreKeys:
    """Write the keys of a job without live nodes, and return them."""
    keys, waiting = StoreKeys(run_id), Membership(RendezvousSettings(1, 3), "run")
    job = form_generation(waiting, NODES, charged=False, nonce="m")
    if ended_hours_ago is not None:
        ended_at = format_utc(wall() - ended_hours_ago * 3600)
        job = attrs.evolve(job, phase=JobPhase.SUCCEEDED, job_end=JobEnd("host0", ended_at))
    for number, rows in shard_members(job).items():
        store.set(keys.shard(job.membership_id, number), encode_shard(rows))
    for node in NODES:
        store.set(keys.finished(job.membership_id, node.id), b"")
    store.set(keys.leader_status, b"{}")
    store.set(keys.job_name, b"")
    store.set(f"{keys.observers}answer/0123456789abcdef/id0", b"left")
    store.set(keys.state, encode_state(job))
    return keys


def run_ids(store: Store) -> set[str]:
    """Return the jobs of which the store has any key."""
    names = (e.key.removeprefix(JOBS_PREFIX).removeprefix("?") for e in store.list("").entries)
    return {name.partition("/")[0] for name in names}


def clean(directory: Path, *flags: str, run_id: str = "") -> int:
    return main(["store", "clean", f"file:{directory}/{run_id}", *flags])


def test_all_keys_of_ended_jobs_are_deleted_and_those_of_other_jobs_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FileStore(str(tmp_path)) as store:
        write_job(store, "ended", ended_hours_ago=30)
        write_job(store, "with/slash", ended_hours_ago=25)
        write_job(store, "recent", ended_hours_ago=2)
        write_job(store, "without-nodes", ended_hours_ago=None)
        alive = write_job(store, "a-node-is-alive", ended_hours_ago=30)
        store.set(alive.node("id0"), b"no record", ttl=60.0)
        led = write_job(store, "has-a-leader", ended_hours_ago=30)
        store.set(led.leader, encode(Leader("id0", "nonce", "")), ttl=60.0)
        foreign = write_job(store, "of-another-version", ended_hours_ago=30)
        store.set(foreign.state, b'{"format": 999}')
        assert clean(tmp_path, "--dry-run") == 0
        assert "would delete ended (succeeded at " in capsys.readouterr().out
        assert "ended" in run_ids(store)
        assert clean(tmp_path) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split(" (")[0] for line in lines] == ["deleted ended", "deleted with/slash"]
        assert run_ids(store) == {
            *("recent", "without-nodes", "a-node-is-alive", "has-a-leader", "of-another-version")
        }
        assert clean(tmp_path, "--min-age", "1", run_id="other") == 0
        assert "recent" in run_ids(store)
        assert clean(tmp_path, "--min-age", "1", run_id="recent") == 0
        assert "recent" not in run_ids(store)


def test_a_run_that_uses_the_id_again_keeps_its_state(tmp_path: Path) -> None:
    with FileStore(str(tmp_path)) as store:
        keys = write_job(store, "job", ended_hours_ago=30)
        (ended,) = find_ended_jobs(store.list(""))
        new = store.set(keys.state, encode_state(Membership(RendezvousSettings(1, 3), "new run")))
        assert not delete_job(store, ended)
        assert [entry.version for entry in store.list("").entries] == [new.version]
        assert not store.list("?").entries


def test_invalid_arguments_are_errors_that_name_the_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        clean(tmp_path, "--min-age", "-1")
    assert exited.value.code == 2
    assert "must be a number of hours from 0, got '-1'" in capsys.readouterr().err
    assert clean(tmp_path / "none") == 1
    assert "does not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["store"])
    assert "--bind is required" in capsys.readouterr().err
