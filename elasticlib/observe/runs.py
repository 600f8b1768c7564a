"""Where the runs of this machine and user are found: one folder of records, bounded in number.

Each agent has a record here, a folder `<run id>_<random>` that names itself by its first line of
events: `events.jsonl` lies in it, or is a link to the one beside the logs that are kept.
"""

from __future__ import annotations

import os
import tempfile
from getpass import getuser
from pathlib import Path

KEPT = 50
"""So many records of runs that are over stay."""
EVENTS = "events.jsonl"


def runs_folder() -> Path:
    """The one of this user, below the folder for temporary files (TMPDIR)."""
    return Path(tempfile.gettempdir()) / f"elasticlib-{_user()}"


def _user() -> str:
    try:
        return getuser()
    except (KeyError, OSError):  # a user id without a name, as in many containers
        return str(os.getuid())
