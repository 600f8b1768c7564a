"""Sanitizing of text from elsewhere, such as the message of an exception, before it is shown."""

from __future__ import annotations

import re

_COLORS = re.compile("\x1b\\[[0-9;]*m")
_CONTROL_CHARS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufeff\ufffe\uffff"
    # These characters change the direction of the text around them, or break lines.
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)
_TABS_AND_NEWLINES = re.compile("[\t\n]")


def escape_control_chars(text: str) -> str:
    """Return the text without terminal colors and with control characters as escape sequences.

    Tabs and newlines stay as they are.
    """
    plain = _COLORS.sub("", text.replace("\r\n", "\n"))
    return _CONTROL_CHARS.sub(lambda match: _escape(ord(match[0])), plain)


def escape_to_one_line(text: str) -> str:
    """Return the text as `escape_control_chars` does, with tabs and newlines escaped as well."""
    return _TABS_AND_NEWLINES.sub(lambda match: _escape(ord(match[0])), escape_control_chars(text))


def shorten(text: str, limit: int) -> str:
    """Return about `limit` characters of the text: a quarter from its start, the rest from its end.

    A note replaces the middle. The text is cut between lines or, if it has one line, between words,
    unless these are so long that little of the text would remain.
    """
    if len(text) <= limit:
        return text
    at, separator = limit // 4, "\n" if "\n" in text else " "
    head, tail = text[:at].rpartition(separator)[0], text[at - limit :].partition(separator)[2]
    if not head or len(tail) < limit // 2:
        # The lines or words are so long that little of the text would remain.
        head, tail = text[:at], text[at - limit :]
    note = f"[... {len(text) - len(head) - len(tail)} characters are left out ...]"
    return separator.join((head, note, tail))


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
