"""Classes of a program by their names: named tuples and enums, found again without importing.

A checkpoint that is read may name any class. Only what the program has imported itself is looked
at, without running anything of it, and only a class of the kind that is asked for is taken.
"""

from __future__ import annotations

import enum
import inspect
import sys


def name_of(kind: type) -> str | None:
    """How `kind_named` finds a class; None if it finds it by no name."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    return name if kind_named(name) is kind else None


def kind_named(name: str) -> type | None:
    """The class that a module which is imported has under this name; None if there is none."""
    module, _, path = name.partition(":")
    found: object = sys.modules.get(module)
    for part in path.split("."):
        # Not getattr: a module's own may import, and a class's may run anything.
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) else None


def is_named_tuple(kind: type) -> bool:
    """Whether a class is what `collections.namedtuple` or `typing.NamedTuple` makes."""
    if kind is tuple or not issubclass(kind, tuple):
        return False
    return isinstance(inspect.getattr_static(kind, "_fields", None), tuple)


def is_enum(kind: type) -> bool:
    """Whether a class is an enum."""
    return issubclass(kind, enum.Enum)
