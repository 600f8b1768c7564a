"""Medians, spread and ratios are what they are called, and are said in words of their size."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "benchmarks"))

import by_turns
from figures import Found, Row, Samples, cells, from_plain, in_markdown, said, to_plain

OF_TEN = Samples("s", (2.0, 1.0, 4.0), 7, "not within 20 s")


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (0.0, "s", "0 ns"),
        (2.71828, "s", "2.7 s"),
        (14.4, "s", "14 s"),
        (123.0, "s", "120 s"),
        (0.0996, "s", "0.10 s"),
        (0.05, "s", "50 ms"),
        (0.00203, "s", "2.0 ms"),
        (0.0000002, "s", "0.20 µs"),
        (55e-9, "s", "55 ns"),
        (46 * 2**20, "bytes", "46 MiB"),
        (0, "bytes", "0 bytes"),
        (0.0034, "of a core", "0.34 % of a core"),
        (0.00004, "of a core", "0.0040 % of a core"),
        (1.41, "a second", "1.4 a second"),
        (12345, "operations", "12,000 operations"),
    ],
)
def test_a_quantity_has_two_digits_and_a_unit_of_its_size(
    value: float, unit: str, words: str
) -> None:
    assert said(value, unit) == words


def test_what_did_not_come_through_is_counted_and_is_in_no_median() -> None:
    assert str(OF_TEN) == "2.0 s; 7 of 10 not within 20 s"
    assert (OF_TEN.spread, OF_TEN.count) == ("1.0 to 4.0 s", "10, 7 failed")
    never = Samples("s", failed=2, why="not within 20 s")
    assert (str(never), never.spread, never.count) == ("not within 20 s", "", "2")


def test_a_spread_over_two_units_says_both() -> None:
    assert Samples("s", (0.05, 0.5)).spread == "50 ms to 0.50 s"


def test_a_ratio_is_ours_to_theirs_of_medians_or_of_rounds() -> None:
    mine, theirs = Samples("s", (1.0, 2.0, 9.0)), Samples("s", (2.0, 10.0, 3.0))
    assert Row("a", "a", mine, theirs, "torch").ratio == "0.67"
    assert Row("a", "a", mine, theirs, "torch", paired=True).ratio == "0.50"


def test_there_is_no_ratio_to_what_is_not_there() -> None:
    mine, none = Samples("s", (1.0,)), Samples("s", failed=1, why="not within 20 s")
    assert [Row("a", "a", mine, theirs).ratio for theirs in (None, none)] == ["", ""]
    assert Row("a", "a", mine, Samples("bytes", (0.0,))).ratio == ""


def test_rows_of_different_lengths_in_pairs_are_a_mistake() -> None:
    with pytest.raises(ValueError):
        _ = Row("a", "a", Samples("s", (1.0, 2.0)), Samples("s", (1.0,)), paired=True).ratio


def test_what_is_written_is_what_is_read() -> None:
    theirs = Samples("s", (1.25,))
    found = Found([Row("a", "A", OF_TEN, theirs, "torch"), Row("b", "B", theirs)], ["a note"])
    assert from_plain(json.loads(json.dumps(to_plain(found)))) == found
    with pytest.raises(KeyError):
        found["c"]


def test_a_table_has_a_cell_for_each_head_in_every_row() -> None:
    rows = [Row("a", "A", OF_TEN, OF_TEN, "torch"), Row("b", "B", OF_TEN)]
    rows.append(Row("c", "C", OF_TEN, Samples("s", why="not tried"), "torch"))
    assert len({len(cells(row)) for row in rows}) == 1
    assert len({line.count("|") for line in in_markdown(rows).splitlines()}) == 1


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        ([2.0, 2.1, 2.2, 2.3, 2.4], "slower"),
        ([0.5, 0.5, 0.6, 0.6, 9.0], "faster"),
        ([1.2, 1.3, 1.4, 1.9, 2.0], "same"),
        ([9.0, 9.0], "too few turns"),
    ],
)
def test_beyond_noise_is_where_the_quartiles_of_two_sides_do_not_overlap(
    after: list[float], verdict: str
) -> None:
    row = by_turns.Row("a", "s", [1.0, 1.1, 1.2, 1.3, 1.4], after)
    assert row.verdict() == verdict
    assert next(line for line in by_turns.table({"a": row}) if verdict in line)
