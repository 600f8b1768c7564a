"""Formatting of durations, numbers, lists and tables for people."""

from __future__ import annotations

import math
import re

import pytest

from elasticlib.observe.formatting import (
    format_bytes,
    format_cell,
    format_count,
    format_duration,
    format_list,
    format_number,
    format_percent,
    format_ranges,
    format_table,
    plural,
)
from elasticlib.observe.report.build import seconds_text
from elasticlib.sanitize import escape_control_chars, shorten


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 s"),
        (0.001, "under 0.01 s"),
        (0.344, "0.34 s"),
        (0.996, "1.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (45.0, "45 s"),
        (59.6, "1 min"),
        (125, "2 min 5 s"),
        (3599.7, "1 h"),
        (11520, "3 h 12 min"),
        (86399.9, "1 d"),
        (190800, "2 d 5 h"),
        (8e7, "925 d 22 h"),
        (math.nan, "unknown"),
        (math.inf, "unknown"),
    ],
)
def test_duration_has_two_digits_or_two_units(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected
    assert seconds_text(seconds) == expected.replace(" ", "\u00a0")


def test_only_exactly_1_is_formatted_as_100_percent() -> None:
    parts = (1.0, 0.99999, 0.9812, 0.5, 0.0, None)
    assert [format_percent(part) for part in parts] == [
        *("100 %", "99.9 %", "98.1 %", "50 %", "0 %", "unknown")
    ]


def test_numbers_counts_and_sizes_are_short() -> None:
    assert [format_number(v) for v in (0.0, 0.00012, 2.0456, 123.4, 1234567.0, 2.5e9)] == [
        *("0", "1.20e-04", "2.05", "123", "1,234,567", "2.50e+09")
    ]
    assert [plural(1, "node"), plural(1200, "node"), plural(2, "loss", "losses")] == [
        *("1 node", "1,200 nodes", "2 losses")
    ]
    sizes = (0, 1023, 1024, 1024**2 - 1, 3.2 * 1024**2, 5 * 1024**4)
    assert [format_bytes(v) for v in sizes] == [
        *("0 B", "1023 B", "1.0 KiB", "1.0 MiB", "3.2 MiB", "5.0 TiB")
    ]


def test_ranks_are_formatted_as_ranges_and_long_lists_are_shortened() -> None:
    assert format_ranges([7, 0, 1, 2, 3, 1]) == "0-3, 7"
    assert format_ranges(range(0, 40, 2), 6) == "20 from 0 to 38"
    assert format_list(["a", "b", "c", "d"]) == "a, b, c and 1 more"


def test_columns_of_a_table_are_aligned() -> None:
    rows = [("10.0.0.1", format_cell(None)), ("b", format_cell(1234, format_count))]
    assert format_table(("node", "step"), rows) == [
        *("node      step", "10.0.0.1  -", "b         1,234")
    ]
    assert format_table(("node", "step"), []) == []


@pytest.mark.parametrize("separator", [" ", "\n"])
def test_long_text_is_shortened_between_words(separator: str) -> None:
    text = separator.join(f"word{number:03}" for number in range(200))
    shortened = shorten(text, 800)
    head, tail = shortened.split(f"{separator}[... ")
    assert tail.startswith("801 characters are left out ...]")
    assert set(re.split("[ \n]", head)) | set(tail.split()[6:]) <= set(text.split())
    assert ("\n" in shortened) is ("\n" in text)
    assert shortened.startswith("word000")
    assert shortened.endswith("word199")
    assert shorten(text, len(text)) == text


def test_control_characters_are_escaped() -> None:
    assert (
        escape_control_chars("a\x1b[31mb\x1b[0m\x07\u202ec\r\nd\ud800")
        == "ab\\x07\\u202ec\nd\\ud800"
    )
