"""The first thing that an interpreter of ours runs: `start.py ERROR_FILE KIND NAME ARGS...`.

Run by its path, so that it works wherever the worker's own paths lead; it leaves `sys.path` as
it would be for no program at all, and imports only the standard library and two modules of ours.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(_HERE))


def main() -> None:
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    sys.path.insert(0, _ROOT)
    from elasticlib.workers import become, template

    sys.path.remove(_ROOT)
    error_file, kind, name, *args = sys.argv[1:]
    if kind == "template":
        become.become(*template.serve(int(name), args[0], args[1:]))
    become.become(error_file, kind, name, *args)


if __name__ == "__main__":
    main()
