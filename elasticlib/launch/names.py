"""What names a job, or one of its launches: short texts that every node and store can encode."""

from __future__ import annotations

from ..errors import ConfigError

LONGEST_NAME = 256


def check_name(said: str, name: str) -> str:
    """The name, if it can be one; said: what gave it.

    Raises:
        ConfigError: names both and the rule.
    """
    try:
        length = len(name.encode())
    except UnicodeEncodeError:  # bytes of the command line that Python had to smuggle in
        raise ConfigError(f"{said} is a name in UTF-8, got {name[:40]!r}") from None
    if not 0 < length <= LONGEST_NAME:
        raise ConfigError(f"{said} is a name of 1 to {LONGEST_NAME} bytes, got {name[:40]!r}")
    return name
