"""Makes an interpreter, fresh or forked, the process of a script, a module or a function.

What runs then finds what `python -u` would have given it, and ends as that would end, but for one
thing: the interpreter is not taken apart. Up to Python 3.13 that kills any thread that then wants
the interpreter by unwinding it, which aborts a process whose C++ threads still let go of their
Python objects, as gloo's do; a job that trained well would be reported as failed.

A function arrives pickled in a file of the user's own, private folder, with what `multiprocessing`
needs to make this interpreter look like the one that sent it; its value goes back the same way.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib.machinery
import importlib.util
import io
import os
import pickle
import pkgutil
import runpy
import signal
import sys
import threading
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import ConfigError, describe
from ..foreign import opened
from . import stack_dump
from .cleanup import stat_fields
from .error_file import install_exception_hooks, record_exception

if TYPE_CHECKING:
    from .spec import Function

ARGUMENTS = 45
"""Where the address of a process's command line stands, of the fields behind its name."""
UNFLUSHED = 120
FLUSH_SECONDS, FLUSH_TURNS = 2.0, 40
_ANY_FILE = io.IOBase.__base__
_INTERRUPTED = -signal.SIGINT


def run_program(error_file: str, kind: str, name: str, *args: str) -> NoReturn:
    """Run it to its end, and end this process; kind is script, module or function."""
    main = _fresh_main()
    try:
        install_exception_hooks(error_file)
        stack_dump.install_dump_handler()
        if kind == "script":
            _run_script(main, name, args)
        elif kind == "module":
            _run_module(name, args)
        else:
            _run_function(name, args[0])
        code = 0
    except BaseException as error:
        record_exception(error)
        code = _tell(error)
    end(code)


def _fresh_main() -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    main.__loader__ = importlib.machinery.BuiltinImporter
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    return main


def _name(*what: str) -> None:
    """Have `ps` and `sys.orig_argv` show what is run here, and not what this process began as.

    The words are written over where the kernel reads them: as many as there were, or setproctitle
    would not find its way from their end to their start.
    """
    sys.orig_argv = [sys.executable, "-u", *what]
    with contextlib.suppress(OSError):
        first, *rest = Path("/proc/self/cmdline").read_bytes().split(b"\0")[:-1]
        start = int(stat_fields(os.getpid())[ARGUMENTS])
        room = sum(map(len, rest))
        text = b" ".join(map(os.fsencode, sys.orig_argv[1:]))[:room].ljust(room)
        if start and ctypes.string_at(start) == first:
            ctypes.memmove(start + len(first) + 1, text + bytes(len(rest)), room + len(rest))


def _look_in(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)


def _run_script(main: types.ModuleType, path: str, args: tuple[str, ...]) -> None:
    sys.argv = [path, *args]
    _name(path, *args)
    if pkgutil.get_importer(path) is not None:
        # A folder or an archive with a __main__ of its own.
        sys.path.insert(0, path)
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    _look_in(os.path.dirname(os.path.realpath(path)))
    path = os.path.abspath(path)
    compiled = path.endswith(".pyc")
    kind = importlib.machinery.SourcelessFileLoader if compiled else _Source
    loader = kind("__main__", path)
    main.__file__ = path
    main.__loader__ = loader
    if sys.version_info < (3, 15):
        main.__dict__["__cached__"] = None
    exec(_code(path, loader), main.__dict__)


_Source = importlib.machinery.SourceFileLoader


def _code(path: str, loader: Any) -> types.CodeType:
    if not isinstance(loader, _Source):
        code: types.CodeType = loader.get_code("__main__")
        return code
    try:
        with open(path, "rb") as file:
            text = file.read()
    except OSError as error:
        why = f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}"
        print(f"{sys.executable}: {why}", file=sys.stderr)
        sys.exit(2)
    return compile(text, path, "exec", dont_inherit=True)


def _run_module(name: str, args: tuple[str, ...]) -> None:
    sys.argv = ["-m", *args]
    _name("-m", name, *args)
    _look_in(os.getcwd())
    if _is_missing(name):
        # As runpy says it, but with a cause that tells that no restart would help.
        record_exception(ModuleNotFoundError(f"No module named {name}"))
        print(f"{sys.executable}: No module named {name}", file=sys.stderr)
        sys.exit(1)
    # What the interpreter itself calls for -m.
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _is_missing(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except ImportError:
        return "." not in name
    except Exception:
        return False


def _run_function(payload: str, result: str) -> None:
    from multiprocessing.process import current_process
    from multiprocessing.spawn import prepare

    _look_in(os.getcwd())
    preparation, work = pickle.loads(Path(payload).read_bytes())
    process: Any = current_process()
    process._inheriting = True  # as multiprocessing's own children
    try:
        prepare(preparation)
        target, args = pickle.loads(work)
    finally:
        del process._inheriting
    name = getattr(target, "__qualname__", "function")
    _name(name)
    value = target(*args)
    aside = Path(f"{result}.part")
    aside.write_bytes(_pickled_value(value, name))
    aside.rename(result)


def _pickled_value(value: object, name: str) -> bytes:
    """Pickle what the function of this name returned.

    Raises:
        TypeError: part of the value cannot be pickled; the message names that part.
    """
    try:
        return pickle.dumps(value)
    except Exception as error:
        path, part = _find_unpicklable(value, "value", set())
        kind = f"{type(part).__module__}.{type(part).__qualname__}"
        raise TypeError(
            f"cannot pickle what {name} returned on rank {os.environ.get('RANK')}: "
            f"{path} of type {kind} ({describe(error)}): "
            "return plain data, or save it to a file and return its path"
        ) from error


def _find_unpicklable(value: object, path: str, seen: set[int]) -> tuple[str, object]:
    """Return the path and the value of the innermost part that cannot be pickled.

    `value` cannot be pickled as a whole. The items of sets have no path, so a set is returned as a
    whole. `seen` holds the ids of the objects on the way, because a value may contain itself.
    """
    seen.add(id(value))
    for step, part in _parts_of(value):
        if id(part) in seen:
            continue
        try:
            pickle.dumps(part)
        except Exception:
            return _find_unpicklable(part, path + step, seen)
    return path, value


def _parts_of(value: object) -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    return [(f".{name}", part) for name, part in getattr(value, "__dict__", {}).items()]


# -- the end ----------------------------------------------------------------------------------


def _tell(error: BaseException) -> int:
    """Show what the program raised as the interpreter would; returns the exit code."""
    if isinstance(error, SystemExit):
        return _exit_code(error.code)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit as told:
        return _exit_code(told.code)
    except BaseException as broken:
        _tell_both(broken, error)
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _tell_both(broken: BaseException, error: BaseException) -> None:
    """A hook that failed, and what it was to show: without our frames, each by itself."""
    trace = broken.__traceback__
    broken.__traceback__ = None if trace is None else trace.tb_next
    broken.__context__ = None
    print("Error in sys.excepthook:", file=sys.stderr)
    sys.__excepthook__(type(broken), broken, broken.__traceback__)
    print("\nOriginal exception was:", file=sys.stderr)
    sys.__excepthook__(type(error), error, error.__traceback__)


def _exit_code(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        # What does not fit into a C long is -1 there.
        return code & 0xFF if -(2**63) <= code < 2**63 else 0xFF
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    print(code, file=sys.stderr)
    return 1


def end(code: int) -> NoReturn:
    """End this process as a program that is through; -SIGINT for an interrupt."""
    # An interrupt while threads are waited for is shown, and ends the waiting.
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    if not _flush_streams():
        code = UNFLUSHED
    _let_go()
    if not _flush_streams():
        code = UNFLUSHED
    # A thread that goes on may hold what these take, and nobody waits for it any more.
    flushing = threading.Thread(target=_flush_files, daemon=True)
    flushing.start()
    # In many short turns: in one, a machine that stands still would leave it none.
    for _ in range(FLUSH_TURNS):
        flushing.join(FLUSH_SECONDS / FLUSH_TURNS)
    if code == _INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code if code >= 0 else 128 - code)


def _flush_streams() -> bool:
    """Whether what was printed is out; a stream that the program closed has nothing left."""
    whole = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception:
            whole = whole and stream is sys.stderr
    return whole


def _let_go() -> None:
    """What the program's own objects do when they are deleted, and files left open."""
    if len(sys._current_frames()) > 1:
        return  # threads go on, and are not to find their names taken from them
    _keep_ddp()
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
    main = sys.modules["__main__"].__dict__
    # In the interpreter's order: names with one underscore first.
    for private in (True, False):
        for name in list(main):
            if name != "__builtins__" and (name[:1] == "_" and name[1:2] != "_") is private:
                main[name] = None
    gc.collect()


_KEPT: list[object] = []


def _keep_ddp() -> None:
    """torch's DDP, as it goes, waits for a thread of its group and holds the interpreter the while;
    where that thread wants the interpreter too, neither ever goes on."""
    if "torch.nn.parallel.distributed" in sys.modules:
        _KEPT.extend(
            thing
            for thing in gc.get_objects()
            if any(kind.__name__ == "DistributedDataParallel" for kind in type(thing).__mro__)
        )


def _flush_files() -> None:
    """Of the interpreter's files, and of C's."""
    # Text before the buffers that it goes into.
    # By their types alone: some objects say more than that when they are asked.
    left = [thing for thing in gc.get_objects() if _ANY_FILE in type(thing).__mro__]
    for thing in sorted(left, key=lambda thing: not isinstance(thing, io.TextIOBase)):
        with contextlib.suppress(Exception):
            if not thing.closed and thing.writable():
                thing.flush()
    ctypes.CDLL(None).fflush(None)


# -- a function, at the agent's end ----------------------------------------------------------------


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
        if isinstance(obj, types.FunctionType | type) and obj.__module__ == "__main__":
            self.of_main.append(obj.__qualname__)
        return NotImplemented


def _preparation() -> dict[str, Any]:
    from multiprocessing.spawn import get_preparation_data

    return get_preparation_data("elasticlib worker")


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
    from multiprocessing.process import current_process

    if getattr(current_process(), "_inheriting", False):
        raise ConfigError(
            "a worker imports the file of the function that it is to call, and that file launches "
            "a job again: put the launch under `if __name__ == '__main__':`"
        )
