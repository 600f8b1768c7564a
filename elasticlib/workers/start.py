"""Becomes a Python script or module in this fresh interpreter, with the hooks in place.

`python -u start.py ERROR_FILE [-m] NAME ARGS...`. The script sees what `python -u NAME ARGS...`
would show it: `__main__`, `sys.argv`, `sys.path`.
"""

from __future__ import annotations

import os
import runpy
import sys
import zipfile
from importlib.machinery import SourceFileLoader


def _load_hooks() -> object:
    """Ours, wherever the agent's elasticlib is, without a trace in the script's path."""
    before = list(sys.path)
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
    from elasticlib.workers import hooks

    sys.path[:] = before
    return hooks


def _run_script(path: str) -> None:
    if zipfile.is_zipfile(path):
        sys.path[0] = path
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    _first_path(os.path.dirname(os.path.realpath(path)))
    main, loader = sys.modules["__main__"], SourceFileLoader("__main__", path)
    for name in [name for name in vars(main) if not name.startswith("__")]:
        delattr(main, name)
    main.__file__, main.__doc__, main.__loader__ = path, None, loader
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main))


def _first_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
        sys.path[0] = folder


def main(arguments: list[str]) -> None:
    error_file, *program = arguments
    hooks = _load_hooks()
    module = program[0] == "-m"
    sys.argv = program[1:] if module else program
    hooks.install(error_file)  # type: ignore[attr-defined]
    try:
        if module:
            _first_path(os.getcwd())
            runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined]
        else:
            _run_script(sys.argv[0])
    except BaseException as error:
        hooks.record(error)  # type: ignore[attr-defined]
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
