"""Makes a worker that was forked from the fork server look like a new interpreter.

The worker gets its own environment, stdin and random seeds. What remains different is that torch
has already been imported: a variable that torch reads when it is imported has no effect if the
program sets it, even before its own `import torch`. The fork server records which variables are
read, so no list of names can become outdated, and the worker warns about such an assignment.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from .import_timer import start_import_timer
from .process_setup import Job

# torch sets it when it is imported and whenever it is needed. A script that imports torch later may
# set it first, so it is not passed on from the fork server.
TORCH_MANAGED_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR",)
PREFIXES = ("TORCH", "PYTORCH")  # Modules may read other variables, such as HOME, again later.
# torch's libraries read these when they are loaded, or in C++ when torch.distributed is imported.
READ_BY_LIBRARIES = (
    *("MKL_NUM_THREADS", "OMP_NUM_THREADS"),
    *("TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG"),
)


@contextlib.contextmanager
def record_reads(names: set[str]) -> Iterator[None]:
    """Add the names of the environment variables that Python code reads within the block."""
    environ: Any = os.environ
    encode = environ.encodekey

    def record(name: str) -> Any:
        names.add(name)
        return encode(name)

    environ.encodekey = record
    try:
        yield
    finally:
        environ.encodekey = encode


def become_like_new_interpreter(
    job: Job, at_start: Mapping[str, str], read_variables: Collection[str]
) -> None:
    """Give this process the environment and the state of a new interpreter.

    Args:
        job: the worker's job. `server_environment` are the variables that the agent gave to the
            fork server.
        at_start: the variables that the fork server had when its interpreter was started.
        read_variables: the names of the variables that imported modules have read.
    """
    given = job["server_environment"]
    set_by_modules = {
        name: text
        for name, text in os.environ.items()
        if at_start.get(name) != text and name not in TORCH_MANAGED_VARIABLES
    }
    # In a bare locale, Python sets LC_CTYPE for itself, and a new interpreter would do the same.
    own = {name: text for name, text in at_start.items() if name == "LC_CTYPE"}
    # If PYTHON_EXEC is a script that starts the interpreter, its changes apply to workers too.
    wrapped = {k: text for k, text in at_start.items() if given.get(k) != text and k not in own}
    os.environ.clear()
    os.environ.update({**own, **job["environment"], **wrapped, **set_by_modules})
    for name in given.keys() - at_start.keys():
        os.environ.pop(name, None)
    _rebuild_sys_stdin()
    _reseed_generators()
    _warn_about_late_changes(read_variables)
    start_import_timer()


def _rebuild_sys_stdin() -> None:
    """Replace `sys.stdin` in a worker, because it has the properties of the fork server's stdin."""
    previous = sys.__stdin__
    if previous is None or sys.stdin is not previous:
        return  # An imported module has replaced it.
    raw = io.FileIO(0, closefd=False)
    raw.name = previous.name
    stdin = io.TextIOWrapper(
        io.BufferedReader(raw),
        previous.encoding,
        previous.errors,
        newline="\n",
        write_through=previous.write_through,
    )
    stdin.mode = previous.mode  # type: ignore[misc]
    sys.stdin = sys.__stdin__ = stdin  # type: ignore[misc]


def _reseed_generators() -> None:
    """Give NumPy, torch and multiprocessing new random seeds, as a new interpreter does.

    `random` and OpenSSL reseed themselves after a fork.
    """
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:
        generator.seed()
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)


def _warn_about_late_changes(names: Collection[str]) -> None:
    """Warn once for each variable of torch among `names` that this process gives another value.

    Of the workers of a node, only the first one warns.

    Args:
        names: variables that imported modules have read.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0" or "torch" not in sys.modules:
        return
    watched = {*READ_BY_LIBRARIES, *(name for name in names if name.startswith(PREFIXES))}
    put = os.putenv

    def put_and_warn(name: Any, value: Any, /) -> None:
        put(name, value)
        text = os.fsdecode(name)
        if text in watched and os.environ.get(text) != os.fsdecode(value):
            watched.remove(text)
            warnings.warn(
                f"{text} has no effect here, because this worker was forked from a process in which"
                f" torch has already read it: set it on the command line ({text}=..."
                " elasticrun ...), or use --start-method spawn",
                stacklevel=3,  # the line that has assigned to os.environ
            )

    os.putenv = put_and_warn  # os.environ calls it for each assignment
