"""What becomes of the streams of a node's workers, as a value, with torchrun's meanings."""

from __future__ import annotations

from string import Template
from typing import Any

import attrs

from .spec import Worker
from .streams import StreamChoice, Streams


@attrs.frozen
class OutputPlan:
    """Streams to write to files, and streams to write to files and show.

    ranks: the local ranks whose output is shown at all, None for all of them. stdout_needles,
    stderr_needles: lines of shown streams of `tee` with one of these in it are written to a file
    of the attempt, too. template: what stands before each shown line of `tee`, with
    `${role_name}`, `${rank}`, `${local_rank}` and `${hostname}` filled in. specs: an object with
    the `reify` of torch's `LogsSpecs`, which says what is written to which file and shown, in place
    of the rest.
    """

    redirect: StreamChoice = attrs.field(factory=StreamChoice)
    tee: StreamChoice = attrs.field(factory=StreamChoice)
    ranks: frozenset[int] | None = None
    stdout_needles: tuple[str, ...] = ()
    stderr_needles: tuple[str, ...] = ()
    template: str | None = None
    specs: Any = None

    @property
    def any(self) -> bool:
        return self.redirect.any or self.tee.any

    def kept(self, local_rank: int) -> Streams:
        """The streams of a worker that have a file."""
        return self.redirect.of(local_rank) | self.tee.of(local_rank)

    def shows(self, local_rank: int) -> bool:
        return self.ranks is None or local_rank in self.ranks

    def needles(self, stream: Streams) -> tuple[bytes, ...]:
        texts = self.stdout_needles if stream is Streams.OUT else self.stderr_needles
        return tuple(text.encode() for text in texts)

    def prefix(self, role: str, worker: Worker, host: str) -> str:
        """What stands before each line of a worker of that host."""
        if self.template is None:
            return f"[{role}{worker.rank}]:"
        return Template(self.template).safe_substitute(
            role_name=role, rank=worker.rank, local_rank=worker.local_rank, hostname=host
        )
