"""Report of a run: one self-contained HTML page, also shown by notebooks."""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import secrets
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import attrs

from ...errors import ConfigError
from ...sanitize import escape_control_chars
from ..formatting import NO_STEPS_TEXT, plural
from ..history import History
from ..history_reader import RunName, read_history
from .build import MAX_TEXT, seconds_text, template_values, truncate

GENERATOR = "elasticlib report"  # distinguishes a report from other pages
MAX_HEAD_BYTES = 1024  # the name of the generator is in this part of a report


@attrs.frozen
class Report:
    """A page that shows what a run did and what it lost: timeline, steps, recoveries, failures.

    The page is one text that loads no other file. A notebook shows the report by itself.
    """

    history: History

    def html(self) -> str:
        """Return the page as HTML.

        Raises:
            ConfigError: jinja2 is not installed.
        """
        return _render(self.history, standalone=True)

    def save(self, path: RunName) -> Path:
        """Write the page to a file, which is replaced in one step if it is a report.

        Args:
            path: the file; a link is followed, and a pipe or terminal is written to.

        Returns:
            The absolute path of the file.

        Raises:
            ConfigError: the file exists and is no report, or jinja2 is not installed.
            OSError: the file cannot be written.
        """
        given, target = Path(os.path.abspath(path)), Path(os.path.realpath(path))
        text = self.html().encode()
        if target.exists() and not target.is_file():
            with open(target, "wb") as file:
                file.write(text)
            return given
        if target.is_file() and not _is_report(target):
            raise ConfigError(f"{given} exists and is no report: choose another file")
        # The name cannot be guessed, so no other user can create a link there.
        temporary = target.with_name(f".{target.name[:200]}.{secrets.token_hex(8)}")
        try:
            with open(temporary, "xb") as file:
                file.write(text)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        return given

    def _repr_html_(self) -> str:
        return _render(self.history, standalone=False)


def build_report(run: RunName | Iterable[RunName] = "") -> Report:
    """Return the report of a run, which may still be running.

    Args:
        run: id or path of one run; several paths, such as files fetched from other nodes, are read
            as one run. Default: the newest running job, or else the newest job. See `read_history`.

    Raises:
        RunNotFoundError: there is no such run.
        ConfigError: its events cannot be read.
    """
    return Report(read_history(run))


def _is_report(path: Path) -> bool:
    with open(path, "rb") as file:
        head = file.read(MAX_HEAD_BYTES)
    return not head or GENERATOR.encode() in head


def _render(history: History, *, standalone: bool) -> str:
    values = template_values(history)
    html: str = _template().render(values, standalone=standalone)
    return html.strip() + "\n"


@functools.cache
def _template() -> Any:
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError as error:
        raise ConfigError("the report needs jinja2: pip install jinja2") from error

    def file_text(name: str) -> str:
        return resources.files(__package__).joinpath(name).read_text("utf-8")

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Reasons and names originate from workers; control characters in them are made visible.
        finalize=lambda value: escape_control_chars(value) if type(value) is str else value,
    )
    environment.filters.update(
        number=lambda value: f"{value:.2f}".rstrip("0").rstrip("."),
        seconds=seconds_text,
        plural=plural,
        shorten=lambda text: truncate(text, MAX_TEXT),
    )
    script = file_text("script.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals.update(
        generator=GENERATOR,
        style=Markup(file_text("style.css")),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        no_steps_text=NO_STEPS_TEXT,
    )
    return environment.from_string(file_text("template.html"))
