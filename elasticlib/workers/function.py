"""A function as a worker: how it gets there, and how its value comes back.

It arrives pickled in a file of the user's own, private folder, with what `multiprocessing` needs
to make this interpreter look like the one that sent it; its value goes back the same way.
"""

from __future__ import annotations

import io
import multiprocessing.process
import multiprocessing.spawn
import os
import pickle
from pathlib import Path
from types import FunctionType
from typing import Any

from ..errors import ConfigError, describe
from ..foreign import opened
from .spec import Function


def pickled(function: Function) -> bytes:
    """The function and its arguments, as another interpreter can read them, and as often as the
    workers are started.

    Raises:
        ConfigError: they cannot be sent to another process.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL)
    try:
        pickler.dump((function.target, function.args))
    except Exception as error:
        # Whatever an argument's own __reduce__ raises, the cause is the same to the caller.
        raise ConfigError(
            f"cannot send {function.target!r} to a worker: {describe(error)}; "
            "it and its arguments must be picklable (a function at the top level of a module)"
        ) from error
    if pickler.of_main and not _main_is_found():
        raise ConfigError(
            f"cannot send {function.target!r} to a worker: {', '.join(pickler.of_main)} of a "
            "notebook or a prompt cannot be found from another process: put it into a module of "
            "its own, and import it from there"
        )
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Plain pickling, all by value: multiprocessing's, and torch's, would hand over descriptors
    once, to children of their own."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.of_main: list[str] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType | type) and obj.__module__ == "__main__":
            self.of_main.append(obj.__qualname__)
        return NotImplemented


def _preparation() -> dict[str, Any]:
    return multiprocessing.spawn.get_preparation_data("elasticlib worker")


def _main_is_found() -> bool:
    """Whether a worker can make this process's main module for itself."""
    told = _preparation()
    return "init_main_from_name" in told or os.path.isfile(told.get("init_main_from_path", ""))


def write_payload(path: Path, function: Function) -> None:
    """Raises ConfigError when the function cannot be sent to another process."""
    preparation = _preparation()
    # Only what concerns the interpreter: the rest describes multiprocessing's own children.
    for name in ("authkey", "log_to_stderr", "log_level", "start_method"):
        preparation.pop(name, None)
    path.write_bytes(pickle.dumps((preparation, pickled(function))))


def read_result(path: Path) -> tuple[Any, str]:
    """The value that the function returned (None without one), and why it is unreadable."""
    try:
        with opened(path) as handle, open(handle, "rb", closefd=False) as file:
            return pickle.load(file), ""
    except FileNotFoundError:
        return None, ""
    except Exception as error:
        # A value's own code runs here, and may raise anything.
        return None, f"{type(error).__name__}: {error}"


def check_not_importing() -> None:
    """Raises ConfigError in a worker that is still importing what its function is of."""
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        raise ConfigError(
            "a worker imports the file of the function that it is to call, and that file launches "
            "a job again: put the launch under `if __name__ == '__main__':`"
        )


def main(payload: str, result: str) -> int:
    """In the worker: call it, and leave its value; what it raises goes on."""
    preparation, work = pickle.loads(Path(payload).read_bytes())
    process = multiprocessing.process.current_process()
    process._inheriting = True  # type: ignore[attr-defined]  # as multiprocessing's own children
    try:
        multiprocessing.spawn.prepare(preparation)
        target, args = pickle.loads(work)
    finally:
        del process._inheriting  # type: ignore[attr-defined]
    value = target(*args)
    aside = Path(f"{result}.part")
    aside.write_bytes(pickle.dumps(value))
    aside.rename(result)
    return 0
