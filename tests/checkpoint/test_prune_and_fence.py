"""What is kept, who may write, and what a manifest says: the rules, whatever there is."""

from __future__ import annotations

import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.checkpoint.commit import (
    Fence,
    Writer,
    claim_fence,
    decode_fence,
    encode_fence,
    leftovers,
    why_not,
)
from elasticlib.checkpoint.folder import (
    MAX_STEP,
    DataFile,
    Health,
    Manifest,
    OtherFormat,
    Retention,
    decode_manifest,
    encode_manifest,
    folder_of,
    select,
    step_of,
    summed,
)
from elasticlib.errors import CheckpointCorrupt

found = st.dictionaries(st.integers(0, 40), st.sampled_from(Health), max_size=12)
retentions = st.builds(Retention, st.integers(1, 5), st.integers(0, 6))
pins = st.sets(st.integers(0, 40), max_size=5)


@given(found, retentions, st.none() | st.integers(0, 40), pins)
def test_the_last_good_one_the_newest_few_the_pinned_and_newer_damaged_ones_always_stay(
    health: dict[int, Health],
    retention: Retention,
    just: int | None,
    pinned: set[int],
) -> None:
    chosen = select(health.items(), retention, just, pinned)
    assert sorted([*chosen.kept, *chosen.deleted]) == sorted(health)
    good = [step for step in health if health[step] is Health.GOOD]
    usable = sorted(s for s in health if health[s] in (Health.GOOD, Health.UNKNOWN))
    unread = {step for step in health if health[step] is Health.UNREAD}
    assert unread <= set(chosen.kept)
    if chosen.deleted:
        assert max(good) in chosen.kept
    else:
        assert good or chosen.reason
    assert set(usable[-retention.last :]) <= set(chosen.kept)
    if retention.every:
        assert {step for step in usable if step % retention.every == 0} <= set(chosen.kept)
    assert just not in chosen.deleted
    assert pinned.isdisjoint(chosen.deleted)
    if good:
        damaged = {step for step in health if health[step] is Health.BAD and step > max(good)}
        assert damaged <= set(chosen.kept)
        wanted = {*usable[-retention.last :], max(good), just, *unread, *damaged, *pinned}
        assert all(
            step in wanted or (retention.every and step % retention.every == 0)
            for step in chosen.kept
        )


@given(found, retentions, pins)
def test_pruning_again_deletes_nothing_more(
    health: dict[int, Health], retention: Retention, pinned: set[int]
) -> None:
    kept = select(health.items(), retention, None, pinned).kept
    again = select([(step, health[step]) for step in kept], retention, None, pinned)
    assert again.deleted == ()


writers = st.builds(
    Writer,
    st.sampled_from("rs"),
    st.sampled_from("lm"),
    st.integers(0, 3),
    st.text("ab", max_size=2),
)


@given(st.lists(writers, max_size=12))
def test_whoever_lost_the_folder_cannot_commit_and_no_older_one_gets_it(
    claims: list[Writer],
) -> None:
    fence: Fence | None = None
    latest: dict[str, int] = {}
    for number, one in enumerate(claims):
        writer = attrs.evolve(one, token=str(number))
        answer = claim_fence(fence, writer)
        if isinstance(answer, str):
            assert fence is not None
            older = writer.generation < latest.get(writer.start, 0)
            assert older or writer.start in fence.lost
            assert answer
            continue
        assert writer.generation >= latest.get(writer.start, 0)
        if fence is not None:
            assert "took the folder over from" in why_not(answer, fence.holder)
            # Who writes beside it may, if of its generation, and takes it from nobody.
            alike = (writer.start, writer.generation) == (
                fence.holder.start,
                fence.holder.generation,
            )
            assert (why_not(fence, writer, beside=True) == "") == alike
            assert (claim_fence(fence, writer, beside=True) == fence) == alike
        fence = decode_fence(encode_fence(answer))
        assert fence == answer
        assert not why_not(fence, writer)
        latest[writer.start] = writer.generation


def test_a_fence_that_was_changed_says_so_and_one_that_is_gone_holds() -> None:
    writer = Writer("r", "l", 1, "t")
    data = encode_fence(Fence(writer, ("q/k",)))
    for at in range(len(data)):
        flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        for wrong in (flipped, data[:at]):
            with pytest.raises(CheckpointCorrupt):
                decode_fence(wrong)
    assert "fence.json is gone" in why_not(None, writer)


def test_only_what_nobody_names_and_no_live_writer_has_is_left_over() -> None:
    live, dead = "0" * 16, "f" * 16
    names = [
        *("manifest.json", "notes.txt", f"state.{live}.1.pack", f"part-00001.{live}.2.pack"),
        *(f"state.{dead}.1.pack", f"part-00001.{dead}.2.pack", ".manifest.json.0123abcd.partial"),
    ]
    named = {"manifest.json", f"state.{dead}.1.pack"}
    gone = [f"part-00001.{dead}.2.pack", ".manifest.json.0123abcd.partial"]
    sizes = dict.fromkeys(names, 1)
    assert sorted(leftovers(sizes, named, live)) == sorted(gone)
    assert len(leftovers(sizes, named, "")) == 4


MANIFEST = Manifest(
    step=12,
    files=(DataFile("state.pack", 5, 7), DataFile("b", 0, 0)),
    parts=2,
    run="job \u00e9 1",
    launch="l",
    generation=3,
    writer="w",
    saved_at=1.5,
    world=2,
    pinned=True,
)


def test_no_changed_or_cut_byte_of_a_manifest_passes() -> None:
    data = encode_manifest(MANIFEST)
    assert decode_manifest(data) == MANIFEST
    for at in range(len(data)):
        for bit in range(8):
            with pytest.raises(CheckpointCorrupt):
                decode_manifest(data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :])
        with pytest.raises(CheckpointCorrupt):
            decode_manifest(data[:at])


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"format": 2}, "format 2"), ({"format": 4}, "format 4"), ({"new": 1}, "the field 'new'")],
)
def test_a_manifest_of_another_format_is_refused_by_name(
    change: dict[str, int], reason: str
) -> None:
    fields = json.loads(encode_manifest(MANIFEST).rpartition(b"\ncrc32")[0])
    with pytest.raises(OtherFormat, match=f"has {reason}, this version reads format 3"):
        decode_manifest(summed(json.dumps({**fields, **change}).encode()))


@given(st.integers(0, MAX_STEP))
def test_a_step_has_one_folder_and_the_folder_one_step(step: int) -> None:
    assert step_of(folder_of(step)) == step


@pytest.mark.parametrize(
    "name", ["step-1", "step-00000000001", f"step-{2**63}", ".step-0000000001", "step-000000000x"]
)
def test_other_names_are_no_steps(name: str) -> None:
    assert step_of(name) is None
