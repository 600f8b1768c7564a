"""What somebody holds of a state, as a value: restore chooses among these, wherever they lie."""

from __future__ import annotations

import attrs


@attrs.frozen
class Held:
    """A state, or one rank's part of it, as somebody here holds it.

    step: after which the state was taken. kind: what holds it, `memory` or `disk`. name: for the
    one who holds it to find it again, and for people. part, parts: the state is cut up over so
    many ranks, of which this is one's; 0 of 1 is a state that is the same on all ranks. run,
    generation: by which launch of the job, and in which of its generations, it was made. A step
    that was trained twice, before a loss and after it, is two states, and their parts do not fit
    together.
    """

    step: int
    kind: str
    name: str
    part: int = 0
    parts: int = 1
    run: str = ""
    generation: int = 0
