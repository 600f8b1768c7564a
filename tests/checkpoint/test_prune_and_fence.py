"""The pure rules of lines, retention, the fence, and manifests."""

from __future__ import annotations

import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.checkpoint.catalog import (
    DataFile,
    Manifest,
    UnknownFormatError,
    append_checksum,
    decode_fence,
    decode_manifest,
    encode_fence,
    encode_manifest,
)
from elasticlib.checkpoint.refs import (
    MAX_STEP,
    Branch,
    Fence,
    Integrity,
    KeepEvery,
    KeepLast,
    Line,
    Retention,
    StateRef,
    Writer,
    acquire,
    any_of,
    begin,
    commit_denied_reason,
    folder_name,
    may_delete,
    on_line,
    parse_folder_name,
    position,
)
from elasticlib.errors import CheckpointCorruptError

rules = st.builds(KeepLast, st.integers(1, 5)) | st.builds(
    lambda last, every: any_of(KeepLast(last), KeepEvery(every)),
    st.integers(1, 5),
    st.integers(1, 6),
)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[StateRef], Line]:
    """Draw the checkpoints of a job that has gone back to earlier states, and its line."""
    refs: list[StateRef] = []
    writer = Writer("job", "launch", 1)
    line = begin(None, writer)
    for number in range(draw(st.integers(1, 4))):
        if refs and number:
            writer = attrs.evolve(writer, number=number)
            line = begin(draw(st.sampled_from(refs)), writer)
        first = (line[-2].until or 0) if len(line) > 1 else 0
        for step in range(first + 1, first + 1 + draw(st.integers(1, 4))):
            refs.append(
                StateRef(
                    line[-1].id,
                    step,
                    writer=writer,
                    line=line,
                    place=folder_name(step, line[-1].id, len(refs)),
                    number=len(refs),
                    integrity=draw(st.sampled_from(Integrity)),
                    is_pinned=draw(st.booleans()) and draw(st.booleans()),
                )
            )
    return refs, line


@given(histories(), rules)
def test_what_a_rule_a_pin_or_a_repair_needs_is_never_deleted(
    history: tuple[list[StateRef], Line], keep: Retention
) -> None:
    refs, line = history
    live = on_line(line, refs)
    deleted = may_delete(refs, line, keep)
    kept = [ref for ref in refs if ref not in deleted]
    verified = [ref for ref in live if ref.integrity is Integrity.VERIFIED]
    assert not deleted or verified[0] in kept
    assert not any(ref.is_pinned or ref.integrity is Integrity.UNREADABLE for ref in deleted)
    usable = [ref for ref in live if ref.is_usable]
    assert {ref.place for ref in deleted}.isdisjoint(keep.select(usable))
    for ref in deleted:
        at = position(line, ref)
        if ref.integrity is Integrity.CORRUPT and at is not None:
            assert at < (position(line, verified[0]) or at)
        if at is None:
            branches = {branch.id for branch in ref.line}
            assert sum(other.branch not in branches for other in usable) >= keep.last


@given(histories(), rules)
def test_pruning_again_deletes_nothing_more(
    history: tuple[list[StateRef], Line], keep: Retention
) -> None:
    refs, line = history
    deleted = may_delete(refs, line, keep)
    assert may_delete([ref for ref in refs if ref not in deleted], line, keep) == ()


@given(histories())
def test_a_line_contains_what_it_continues_and_nothing_after_it(
    history: tuple[list[StateRef], Line],
) -> None:
    refs, line = history
    for ref in on_line(line, refs):
        continued = begin(ref, Writer("job", "launch", 2))
        later = {(r.branch, r.step) for r in on_line(line, refs)}
        kept = {(r.branch, r.step) for r in on_line(continued, refs)}
        at = position(line, ref)
        assert at is not None
        assert kept == {
            (r.branch, r.step)
            for r in refs
            if (r.branch, r.step) in later and (position(line, r) or at) <= at
        }


writers = st.builds(
    Writer,
    st.sampled_from("rs"),
    st.sampled_from("lm"),
    st.integers(0, 3),
    is_launched=st.booleans(),
)


@given(st.lists(st.tuples(writers, st.booleans()), max_size=12))
def test_a_writer_that_lost_the_fence_cannot_commit_or_take_it_back(
    claims: list[tuple[Writer, bool]],
) -> None:
    fence: Fence | None = None
    for number, (one, force) in enumerate(claims):
        writer = attrs.evolve(one, number=number)
        line = begin(None, writer)
        state = StateRef(writer.branch, 1, line=line)
        answer = acquire(fence, writer, line, force=force)
        if isinstance(answer, str):
            assert fence is not None
            holder = fence.writer
            is_older = writer.generation < holder.generation
            is_kept = holder.is_launched and not (writer.is_launched or force)
            if writer.launch == holder.launch:
                assert is_older
            else:
                assert writer.launch in fence.revoked or is_kept
            continue
        if fence is not None:
            assert answer.epoch == fence.epoch + 1
            lost = StateRef(fence.writer.branch, 1)
            assert commit_denied_reason(answer, fence.writer, lost, is_agent=False)
        fence = decode_fence(encode_fence(answer))
        assert fence == answer
        assert not commit_denied_reason(fence, writer, state, is_agent=False)


def test_a_changed_or_deleted_fence_is_detected() -> None:
    writer = Writer("r", "l", 1)
    data = encode_fence(Fence(writer, begin(None, writer), ("q/k",)))
    for at in range(len(data)):
        flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        for wrong in (flipped, data[:at]):
            with pytest.raises(CheckpointCorruptError):
                decode_fence(wrong)
    reason = commit_denied_reason(None, writer, StateRef(writer.branch, 1), is_agent=False)
    assert "fence.json was deleted" in reason


def test_an_agent_commits_states_of_its_line_and_a_worker_only_its_branch() -> None:
    writer = Writer("r", "l", 1)
    old = StateRef(writer.branch, 5, line=begin(None, writer))
    after = attrs.evolve(writer, number=1)
    fence = Fence(after, begin(old, after))
    for step, is_agent, is_allowed in [(5, True, True), (5, False, False), (6, True, False)]:
        ref = attrs.evolve(old, step=step)
        assert (not commit_denied_reason(fence, after, ref, is_agent=is_agent)) == is_allowed


MANIFEST = Manifest(
    step=12,
    branch="0123abcd",
    line=(Branch("ffff0000", 10), Branch("0123abcd")),
    files=(DataFile("state.safetensors", 5, 7), DataFile("b", 0, 0)),
    parts=2,
    writer=Writer("job \u00e9 1", "l", 3, 2, True, "w"),
    epoch=4,
    saved_at=1.5,
    world_size=2,
    metrics={"loss": 0.5},
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
    [({"format": 4}, "format 4"), ({"format": 6}, "format 6"), ({"new": 1}, "the field 'new'")],
)
def test_a_manifest_of_another_format_is_rejected_with_both_formats(
    change: dict[str, int], reason: str
) -> None:
    fields = json.loads(encode_manifest(MANIFEST).rpartition(b"\ncrc32")[0])
    with pytest.raises(UnknownFormatError, match=f"has {reason}, this version reads format 5"):
        decode_manifest(append_checksum(json.dumps({**fields, **change}).encode()))


@given(st.integers(0, MAX_STEP), st.integers(0, 10**18 - 1) | st.just("end"))
def test_the_name_of_a_folder_has_the_identity_of_its_state(step: int, number: int | str) -> None:
    ref = parse_folder_name(folder_name(step, "0123abcd", number))
    assert ref is not None
    assert (ref.step, ref.branch) == (step, "0123abcd")
    assert ref.number == (MAX_STEP if number == "end" else number)


@pytest.mark.parametrize(
    "name",
    [
        *("step-1", "step-0000000001", f"step-{2**63}.0123abcd.1", ".step-0000000001.0123abcd.1"),
        *("step-000000000x.0123abcd.1", "step-0000000001.0123ABCD.1", "step-0000000001.0123abcd.x"),
    ],
)
def test_other_names_are_not_folders_of_checkpoints(name: str) -> None:
    assert parse_folder_name(name) is None
