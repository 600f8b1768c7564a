"""Command of a new interpreter that runs a module of elasticlib."""

from __future__ import annotations

import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PROGRAM = (
    "import runpy, sys; sys.path[:] = [*filter(None, sys.path), {root!r}]; "
    "runpy.run_module({module!r}, run_name='__main__')"
)


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of elasticlib as `python -m` does.

    Unlike with `python -m`, a file in the working directory, such as `queue.py`, cannot replace a
    module that the program needs. The workers of a script in another directory do not find such a
    file either.

    Args:
        module: The full name of the module.
        arguments: The arguments of the program.
    """
    return [sys.executable, "-c", _PROGRAM.format(root=_ROOT, module=module), *arguments]
