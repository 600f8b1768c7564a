"""The report of a run, as an object: a page to keep, and what a notebook shows of it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path

import attrs

from ...errors import ConfigError
from ..history import History
from ..reading import Name, read_history
from .page import GENERATOR, fragment, page

HEAD = 512
"""So many bytes of a report show that it is one."""


@attrs.frozen
class Report:
    """What a run did, what it lost and why, on one page: a timeline of its nodes, its steps and
    speed, each recovery by phase, failures, nodes and settings. A notebook shows it by itself."""

    history: History

    def html(self) -> str:
        """The page: one text that needs no other file, no network and no script."""
        return page(self.history)

    def save(self, path: Name) -> Path:
        """Write the page to a file and return the absolute path of the file.

        The page is written to a temporary name first, so that a reader never sees half of it.

        Raises:
            ConfigError: a file is there that is no report; it stays as it is.
            OSError: it cannot be written.
        """
        given, wanted = Path(os.path.abspath(path)), Path(os.path.realpath(path))
        text = self.html().encode()
        if wanted.exists() and not wanted.is_file():
            with open(wanted, "wb") as there:  # a pipe or a terminal
                there.write(text)
            return given
        if wanted.is_file() and not _is_report(wanted):
            raise ConfigError(f"{given} is there, and is no report: it is not overwritten")
        # Nobody can guess the name, and what is there is not opened, be it a file or a link.
        aside = wanted.with_name(f".{wanted.name[:200]}.{secrets.token_hex(8)}")
        try:
            with open(aside, "xb") as file:
                file.write(text)
            os.replace(aside, wanted)
        finally:
            aside.unlink(missing_ok=True)
        return given

    def _repr_html_(self) -> str:
        return fragment(self.history)


def _is_report(path: Path) -> bool:
    with open(path, "rb") as file:
        head = file.read(HEAD)
    return not head or GENERATOR.encode() in head


def report(run: Name | Iterable[Name] = "") -> Report:
    """The report of a run, over or not, from its agents' events; what `run` may be, and what is
    raised, is `elasticlib.read_history`'s."""
    return Report(read_history(run))
