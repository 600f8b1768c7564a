"""The pure rules of retention, of the fence, and of manifests."""

from __future__ import annotations

import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.checkpoint.catalog import (
    MAX_STEP,
    DataFile,
    Integrity,
    Manifest,
    Retention,
    UnknownFormatError,
    append_checksum,
    decode_manifest,
    encode_manifest,
    folder_of,
    select_checkpoints,
    step_of,
)
from elasticlib.checkpoint.commit import (
    Fence,
    WriterIdentity,
    acquire_fence,
    commit_denied_reason,
    decode_fence,
    encode_fence,
    orphaned_files,
)
from elasticlib.errors import CheckpointCorruptError

integrities = st.dictionaries(st.integers(0, 40), st.sampled_from(Integrity), max_size=12)
retentions = st.builds(Retention, st.integers(1, 5), st.integers(0, 6))
pins = st.sets(st.integers(0, 40), max_size=5)


@given(integrities, retentions, st.none() | st.integers(0, 40), pins)
def test_selection_keeps_newest_verified_pinned_and_newer_corrupt_checkpoints(
    health: dict[int, Integrity],
    retention: Retention,
    just: int | None,
    pinned: set[int],
) -> None:
    chosen = select_checkpoints(health, retention, just, pinned)
    assert sorted([*chosen.kept, *chosen.deleted]) == sorted(health)
    good = [step for step in health if health[step] is Integrity.VERIFIED]
    usable = sorted(s for s in health if health[s] in (Integrity.VERIFIED, Integrity.UNKNOWN))
    unread = {step for step in health if health[step] is Integrity.UNREADABLE}
    assert unread <= set(chosen.kept)
    if chosen.deleted:
        assert max(good) in chosen.kept
    else:
        assert good or chosen.reason
    assert set(usable[-retention.keep_last :]) <= set(chosen.kept)
    if retention.keep_every:
        assert {step for step in usable if step % retention.keep_every == 0} <= set(chosen.kept)
    assert just not in chosen.deleted
    assert pinned.isdisjoint(chosen.deleted)
    if good:
        damaged = {
            step for step in health if health[step] is Integrity.CORRUPT and step > max(good)
        }
        assert damaged <= set(chosen.kept)
        wanted = {*usable[-retention.keep_last :], max(good), just, *unread, *damaged, *pinned}
        assert all(
            step in wanted or (retention.keep_every and step % retention.keep_every == 0)
            for step in chosen.kept
        )


@given(integrities, retentions, pins)
def test_pruning_again_deletes_nothing_more(
    health: dict[int, Integrity], retention: Retention, pinned: set[int]
) -> None:
    kept = select_checkpoints(health, retention, None, pinned).kept
    again = select_checkpoints({step: health[step] for step in kept}, retention, None, pinned)
    assert again.deleted == ()


writers = st.builds(
    WriterIdentity,
    st.sampled_from("rs"),
    st.sampled_from("lm"),
    st.integers(0, 3),
    st.text("ab", max_size=2),
)


@given(st.lists(writers, max_size=12))
def test_a_writer_that_lost_the_fence_cannot_commit_or_take_it_back(
    claims: list[WriterIdentity],
) -> None:
    fence: Fence | None = None
    latest: dict[str, int] = {}
    for number, one in enumerate(claims):
        writer = attrs.evolve(one, token=str(number))
        answer = acquire_fence(fence, writer)
        if isinstance(answer, str):
            assert fence is not None
            older = writer.generation < latest.get(writer.launch_key, 0)
            assert older or writer.launch_key in fence.revoked_launches
            assert answer
            continue
        assert writer.generation >= latest.get(writer.launch_key, 0)
        if fence is not None:
            assert "took the directory over from" in commit_denied_reason(answer, fence.holder)
            # A writer of the same generation may write at the same time without the fence.
            alike = (writer.launch_key, writer.generation) == (
                fence.holder.launch_key,
                fence.holder.generation,
            )
            assert (
                commit_denied_reason(fence, writer, allow_concurrent_writer=True) == ""
            ) == alike
            assert (acquire_fence(fence, writer, allow_concurrent_writer=True) == fence) == alike
        fence = decode_fence(encode_fence(answer))
        assert fence == answer
        assert not commit_denied_reason(fence, writer)
        latest[writer.launch_key] = writer.generation


def test_a_changed_or_deleted_fence_is_detected() -> None:
    writer = WriterIdentity("r", "l", 1, "t")
    data = encode_fence(Fence(writer, ("q/k",)))
    for at in range(len(data)):
        flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        for wrong in (flipped, data[:at]):
            with pytest.raises(CheckpointCorruptError):
                decode_fence(wrong)
    assert "fence.json was deleted" in commit_denied_reason(None, writer)


def test_orphans_are_files_without_a_manifest_or_a_live_writer() -> None:
    live, dead = "0" * 16, "f" * 16
    names = [
        *(
            "manifest.json",
            "notes.txt",
            f"state.{live}.1.safetensors",
            f"part-00001.{live}.2.safetensors",
        ),
        *(
            f"state.{dead}.1.safetensors",
            f"part-00001.{dead}.2.safetensors",
            ".manifest.json.0123abcd.partial",
        ),
    ]
    named = {"manifest.json", f"state.{dead}.1.safetensors"}
    gone = [f"part-00001.{dead}.2.safetensors", ".manifest.json.0123abcd.partial"]
    sizes = dict.fromkeys(names, 1)
    assert sorted(orphaned_files(sizes, named, live)) == sorted(gone)
    assert len(orphaned_files(sizes, named, "")) == 4


MANIFEST = Manifest(
    step=12,
    files=(DataFile("state.safetensors", 5, 7), DataFile("b", 0, 0)),
    num_parts=2,
    run_id="job \u00e9 1",
    incarnation="l",
    generation=3,
    writer_token="w",
    saved_at=1.5,
    world_size=2,
    is_pinned=True,
)


def test_each_changed_or_missing_byte_of_a_manifest_is_detected() -> None:
    data = encode_manifest(MANIFEST)
    assert decode_manifest(data) == MANIFEST
    for at in range(len(data)):
        for bit in range(8):
            with pytest.raises(CheckpointCorruptError):
                decode_manifest(data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :])
        with pytest.raises(CheckpointCorruptError):
            decode_manifest(data[:at])


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"format": 3}, "format 3"), ({"format": 5}, "format 5"), ({"new": 1}, "the field 'new'")],
)
def test_a_manifest_of_another_format_is_rejected_with_both_formats(
    change: dict[str, int], reason: str
) -> None:
    fields = json.loads(encode_manifest(MANIFEST).rpartition(b"\ncrc32")[0])
    with pytest.raises(UnknownFormatError, match=f"has {reason}, this version reads format 4"):
        decode_manifest(append_checksum(json.dumps({**fields, **change}).encode()))


@given(st.integers(0, MAX_STEP))
def test_names_of_step_directories_are_unique(step: int) -> None:
    assert step_of(folder_of(step)) == step


@pytest.mark.parametrize(
    "name", ["step-1", "step-00000000001", f"step-{2**63}", ".step-0000000001", "step-000000000x"]
)
def test_other_names_are_not_step_directories(name: str) -> None:
    assert step_of(name) is None
