"""The secret that the nodes of a job share, from the environment or from a file.

One place gives it, or none does: a place that is named and gives nothing is an error, never a
store that is open to all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..errors import ConfigError
from ..stores.secret import LONGEST, VARIABLE, check_secret


def read_secret(environment: Mapping[str, str], path: str | None, flag: str) -> bytes | None:
    """The secret, or None where there is none; `flag` is what named the file.

    Raises:
        ConfigError: two places give one, or the one that is named gives none.
    """
    given = environment.get(VARIABLE)
    if given is not None and path is not None:
        raise ConfigError(f"{VARIABLE} and {flag} both give a secret: unset one of them")
    if path is not None:
        return _read_file(path, flag)
    if given is None:
        return None
    if not given:
        raise ConfigError(f"{VARIABLE} is empty: unset it, or put a secret there")
    # The bytes as the system handed them over, as they would stand in a file.
    return check_secret(os.fsencode(given), VARIABLE)


def _read_file(path: str, flag: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            content = file.read(LONGEST + 2)
    except OSError as error:
        raise ConfigError(f"{flag} {path!r} cannot be read: {error.strerror}") from error
    return check_secret(content.removesuffix(b"\n"), f"{flag} {path!r}")
