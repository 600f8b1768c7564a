"""The program that a command line names: the flags that have a meaning only together with it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..constants import SPAWN
from ..errors import ConfigError
from ..workers.spec import Command, Entrypoint, Module, Script
from .layers import Layer, is_on, parse


class Program(NamedTuple):
    """The entry point, and the options of workers that belong to it, by the path of the field."""

    entrypoint: Entrypoint
    values: Mapping[str, Any]
    settings: Layer  # without those that are ignored
    warnings: tuple[str, ...]


def read_program(settings: Layer, name: str, args: tuple[str, ...]) -> Program:
    """Return the program of the workers.

    Args:
        settings: the merged settings.
        name: the script, module or program.
        args: its arguments.

    Raises:
        ConfigError: the settings contradict each other, or there is no such program.
    """
    settings, warnings = dict(settings), []
    if is_on(settings, "run_path") and is_on(settings, "no_python"):
        reason = f"{settings['run_path'].origin} takes precedence"
        warnings.append(settings.pop("no_python").ignored(reason))
    no_python, run_path = is_on(settings, "no_python"), is_on(settings, "run_path")
    values: dict[str, Any] = {}
    method = parse("start_method", settings.get("start_method"))
    if method is not None:
        if no_python and method != SPAWN:
            raise ConfigError(f"--start-method {method} requires Python: remove --no-python")
        values["workers.start_method"] = method
    python = settings.get("PYTHON_EXEC")
    if python is not None and not no_python and not run_path:
        values["workers.python"] = shutil.which(python.text)
        if values["workers.python"] is None:
            raise ConfigError(
                f"PYTHON_EXEC must be an interpreter on this machine, got {python.text!r}"
            )
    is_module = is_on(settings, "module")
    for flag, is_given in (("--no-python", no_python), ("--run-path", run_path)):
        if is_module and is_given:
            raise ConfigError(f"-m and {flag} are mutually exclusive")
    entrypoint = _entrypoint(name, args, is_module=is_module, is_command=no_python)
    return Program(entrypoint, values, settings, tuple(warnings))


def _entrypoint(
    name: str, args: tuple[str, ...], *, is_module: bool, is_command: bool
) -> Entrypoint:
    if not name:
        raise ConfigError("the name of the training script must not be empty")
    if is_module:
        return Module(name, args)
    if is_command:
        return Command(name, args)
    script = Script(name, args)  # rejects what each worker could not read
    _check_script(name)
    return script


def _check_script(path: str) -> None:
    if any(map(os.path.isfile, (path, os.path.join(path, "__main__.py")))):
        return
    remedy = "use -m to run a module or --no-python to run another program"
    if os.path.exists(path):
        raise ConfigError(
            f"a script must be a regular file or a directory with a __main__.py, got {path!r}; "
            f"{remedy}"
        )
    hint = f" (did you mean {path}.py?)" if os.path.isfile(f"{path}.py") else ""
    raise ConfigError(f"script {path!r} not found in {os.getcwd()}{hint}; {remedy}")
