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
_CUT = "\n[... {} characters are left out ...]\n"


def visible(value: str) -> str:
    """The same without a terminal's colours, and with control characters written out."""
    plain = _COLOURS.sub("", value.replace("\r\n", "\n"))
    return _HIDDEN.sub(lambda found: _sign(ord(found[0])), plain)


def visible_line(value: str) -> str:
    """The same in one line, as for a cell of a table."""
    return _BETWEEN.sub(lambda found: _sign(ord(found[0])), visible(value))


def shorten(text: str, limit: int) -> str:
    """The text in about `limit` characters: where it begins and, mostly, how it ends."""
    if len(text) <= limit:
        return text
    head = limit // 4
    tail = limit - head
    return text[:head] + _CUT.format(len(text) - limit) + text[-tail:]


def _sign(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
