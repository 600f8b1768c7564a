"""Names the limit of open files where an error may be due to it."""

from __future__ import annotations

import os
import resource

FREE_FILES = 16  # with fewer files left, a library may be unable to open those that it needs


def open_files_hint() -> str:
    """Return the limit of open files with the remedy if this process has nearly reached it, or "".

    Libraries report that no file could be opened in words of their own, such as torch's "Failed to
    init uv loop". What they had opened by then is closed again, so a few files are free.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:  # not even this directory can be opened
        used = limit
    if limit == resource.RLIM_INFINITY or limit - used >= FREE_FILES:
        return ""
    return f"this process may have {limit} open files (ulimit -n), and has {used}: raise the limit"
