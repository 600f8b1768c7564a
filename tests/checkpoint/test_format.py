"""The integrity record and the names: pure, so nothing here imports torch."""

from __future__ import annotations

import io
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.checkpoint.format import (
    NO_COMMENT,
    SEAL_BYTES,
    Digest,
    can_be_sealed,
    flaw,
    seal,
)
from elasticlib.checkpoint.names import aside_name, natural_key, target_of


def archive():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("data", bytes(range(256)))
    return buffer.getvalue()


def sealed(data):
    return data[: -len(NO_COMMENT)] + seal(Digest().over(data))


def flaw_of(data):
    at = max(0, len(data) - SEAL_BYTES)
    return flaw(Digest().over(data[:at]).over(NO_COMMENT), data[at:])


def test_a_sealed_archive_is_whole_and_still_an_archive():
    data = sealed(archive())
    assert flaw_of(data) is None
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        assert file.testzip() is None
        assert file.comment == data[-(SEAL_BYTES - 2) :]
        assert file.read("data") == bytes(range(256))


def test_every_flipped_bit_is_detected():
    data = bytearray(sealed(archive()))
    for at in range(len(data)):
        for bit in range(8):
            data[at] ^= 1 << bit
            assert flaw_of(bytes(data)), f"bit {bit} of byte {at} of {len(data)}"
            data[at] ^= 1 << bit


def test_every_cut_is_detected():
    data = sealed(archive())
    for length in range(len(data)):
        assert flaw_of(data[:length]), f"cut to {length} of {len(data)}"


@given(st.binary(min_size=1, max_size=200), st.data())
def test_every_inserted_or_removed_stretch_is_detected(stretch, draw):
    data = sealed(archive())
    at = draw.draw(st.integers(0, len(data)))
    assert flaw_of(data[:at] + stretch + data[at:])
    shorter = data[:at] + data[at + len(stretch) :]
    assert shorter == data or flaw_of(shorter)


def test_each_flaw_is_named():
    data = sealed(archive())
    body, end = data[:-SEAL_BYTES], data[-SEAL_BYTES:]
    assert flaw_of(archive()) == (
        "it does not end in an integrity record: cut short, changed, or not one of ours"
    )
    assert "bytes of archive, there are" in flaw_of(body[1:] + end)
    assert "CRC-32" in flaw_of(b"x" + body[1:] + end)
    assert flaw_of(body + end.replace(b"checkpoint 1", b"checkpoint 2")) == (
        "its record says format 2, this version reads 1"
    )
    assert flaw_of(body + b"\0\0" + end[2:]) == ("the length before its integrity record is wrong")


def test_the_record_has_one_size_whatever_it_sums():
    assert len(seal(Digest(2**64 - 1, 2**32 - 1))) == len(seal(Digest())) == SEAL_BYTES


@given(st.lists(st.binary(max_size=20)))
def test_sums_do_not_depend_on_how_the_bytes_came(parts):
    digest = Digest()
    for part in parts:
        digest = digest.over(part)
    assert digest == Digest().over(b"".join(parts))


def test_only_an_archive_without_a_comment_can_be_sealed():
    assert can_be_sealed(archive())
    assert not can_be_sealed(sealed(archive()))
    assert not can_be_sealed(b"\0" * 40)
    assert not can_be_sealed(b"")


def test_numbers_in_names_sort_as_numbers():
    names = ["step-10.pt", "step-9.pt", "a.pt", "step-9-2.pt", "step-09.pt", "10.pt", "9.pt"]
    assert sorted(names, key=natural_key) == [
        "9.pt", "10.pt", "a.pt", "step-9-2.pt", "step-09.pt", "step-9.pt", "step-10.pt",
    ]  # fmt: skip


@given(st.text(min_size=1), st.integers(0))
def test_a_partial_file_tells_whose_it_is(target, token):
    assert target_of(aside_name(target, token)) == target


@pytest.mark.parametrize("name", ["a.pt", ".a.pt", ".a.partial", "a.0123abcd.partial", ".hidden"])
def test_other_names_are_no_partial_files(name):
    assert target_of(name) is None
