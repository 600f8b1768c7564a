"""What counts, and is kept in a state, is a plain integer: also where it came as a tensor."""

from __future__ import annotations

import operator
from typing import SupportsIndex

from .errors import ConfigError


def whole(name: str, value: SupportsIndex) -> int:
    """The plain int that an integer of any kind stands for: numpy's, or a tensor with one element.

    Raises:
        ConfigError: it is no integer, as 32.0 is not; names both.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(
            f"{name} is {value!r}, must be an integer: round it, by // or int(), before"
        ) from None
