"""Warning for environment variables that a program sets after imported modules have read them.

A worker that is forked from the fork server has already imported torch. So a variable that torch
reads when it is imported has no effect if the program sets it, even before its own `import torch`.
The fork server records which variables are read, so no list of names can become outdated.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Collection, Iterator
from typing import Any

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


def warn_about_late_changes(names: Collection[str]) -> None:
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
