"""The secret of a job's store: given by a variable or by a file."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..errors import ConfigError
from ..stores.authentication import MAX_SECRET_BYTES, SECRET_ENV, check_secret


def read_secret(environment: Mapping[str, str], path: str | None, flag: str) -> bytes | None:
    """Return the secret of the job's store, or None if none is configured.

    Args:
        environment: may contain the secret itself.
        path: the file with the secret, or None.
        flag: the option that named the file, for error messages.

    Raises:
        ConfigError: the environment and the file both give a secret, or the secret is empty or
            cannot be read.
    """
    given = environment.get(SECRET_ENV)
    if given is not None and path is not None:
        raise ConfigError(f"{SECRET_ENV} and {flag} both give a secret: remove one of them")
    if path is not None:
        return _read_secret_file(path, flag)
    if given is None:
        return None
    if not given:
        raise ConfigError(f"{SECRET_ENV} is empty: unset it, or set it to the secret")
    # The bytes of the environment, so that the same secret can be given by a file.
    return check_secret(os.fsencode(given), SECRET_ENV)


def _read_secret_file(path: str, flag: str) -> bytes | None:
    try:
        with open(os.path.expanduser(path), "rb") as file:
            content = file.read(MAX_SECRET_BYTES + 2)
    except OSError as error:
        raise ConfigError(f"{flag} {path!r} cannot be read: {error.strerror}") from error
    return check_secret(content.removesuffix(b"\n"), f"{flag} {path!r}")
