"""A stream of bytes cut into lines under a name, at newlines and at carriage returns alike.

A progress bar ends its lines with a carriage return only, and is shown as it moves. A line that
does not end is cut when it has grown too long, so memory stays bounded.
"""

from __future__ import annotations

LONGEST = 1 << 16


class Lines:
    """Feed it chunks; each answer is what can be shown now, prefixes included."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._half = b""

    def feed(self, chunk: bytes) -> bytes:
        """The lines that are whole with this chunk."""
        text = self._half + chunk
        # A carriage return at the very end may be half of a pair.
        sure = len(text) - text.endswith(b"\r")
        end = 1 + max(text.rfind(b"\n", 0, sure), text.rfind(b"\r", 0, sure))
        shown = [self._prefix + line for line in text[:end].splitlines(keepends=True)]
        self._half = text[end:]
        if len(self._half) > LONGEST:
            shown.append(self.rest())
        return b"".join(shown)

    def rest(self) -> bytes:
        """What is left without an end, ended."""
        half, self._half = self._half, b""
        return self._prefix + half.rstrip(b"\r") + b"\n" if half else b""
