"""Text of others, such as an exception's, made fit to stand in a line or on a page of ours."""

from __future__ import annotations

import re

_COLOURS = re.compile("\x1b\\[[0-9;]*m")
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufeff\ufffe\uffff"
    # What turns the direction of the text around it, and breaks lines.
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)

_BETWEEN = re.compile("[\t\n]")


def visible(value: str) -> str:
    """The same without a terminal's colours, and with control characters written out."""
    plain = _COLOURS.sub("", value.replace("\r\n", "\n"))
    return _HIDDEN.sub(lambda found: _sign(ord(found[0])), plain)


def visible_line(value: str) -> str:
    """The same in one line, as for a cell of a table."""
    return _BETWEEN.sub(lambda found: _sign(ord(found[0])), visible(value))


def shorten(text: str, limit: int) -> str:
    """The text in about `limit` characters: where it begins and, mostly, how it ends, in whole
    lines or words. One line stays one."""
    if len(text) <= limit:
        return text
    at, between = limit // 4, "\n" if "\n" in text else " "
    # Between two lines or words, unless they are so long that little would be left.
    head, tail = text[:at].rpartition(between)[0], text[at - limit :].partition(between)[2]
    if not head or len(tail) < limit // 2:
        head, tail = text[:at], text[at - limit :]
    cut = f"[... {len(text) - len(head) - len(tail)} characters are left out ...]"
    return between.join((head, cut, tail))


def _sign(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
