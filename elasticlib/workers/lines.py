"""A stream of bytes cut into lines under a name, at newlines and at carriage returns alike.

A progress bar ends its lines with a carriage return only, and is shown as it moves. A line that
does not end is cut when it has grown too long, so memory stays bounded; so is what is kept of a
stream's end.
"""

from __future__ import annotations

from collections.abc import Iterable

LONGEST = 1 << 16
TAIL_LINES = 30
TAIL_BYTES = 8 * 1024


class Lines:
    """Feed it chunks; each answer is what can be shown now, prefixes included."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._half = b""

    def feed(self, chunk: bytes) -> bytes:
        """The lines that are whole with this chunk."""
        return self.named(self.cut(chunk))

    def rest(self) -> bytes:
        """What is left without an end, ended."""
        return self.named(self.cut_rest())

    def named(self, lines: Iterable[bytes]) -> bytes:
        """Lines with the prefix of each."""
        return b"".join(self._prefix + line for line in lines)

    def cut(self, chunk: bytes) -> list[bytes]:
        """The lines that are whole with this chunk, without prefixes."""
        text = self._half + chunk
        # A carriage return at the very end may be half of a pair.
        sure = len(text) - text.endswith(b"\r")
        end = 1 + max(text.rfind(b"\n", 0, sure), text.rfind(b"\r", 0, sure))
        whole = text[:end].splitlines(keepends=True)
        self._half = text[end:]
        return whole + self.cut_rest() if len(self._half) > LONGEST else whole

    def cut_rest(self) -> list[bytes]:
        half, self._half = self._half, b""
        return [half.rstrip(b"\r") + b"\n"] if half else []


class Tail:
    """The last lines of a stream, whatever its length."""

    def __init__(self) -> None:
        self._end = b""
        self._cut = False

    def feed(self, chunk: bytes) -> None:
        end = self._end + chunk[-TAIL_BYTES:]
        self._cut = self._cut or len(self._end) + len(chunk) > TAIL_BYTES
        self._end = end[-TAIL_BYTES:]

    def text(self) -> str:
        """Whole lines, as a terminal would show them in the end."""
        lines = self._end.split(b"\n")
        if self._cut and len(lines) > 1:
            del lines[0]
        if not lines[-1]:
            del lines[-1]
        shown = (line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines[-TAIL_LINES:])
        return b"\n".join(shown).decode(errors="replace")
