"""Raises an exception at every line of a call, as a signal handler may: one line in each run."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import elasticlib

PACKAGE = elasticlib.__path__[0]


def interrupt() -> None:
    """Raise KeyboardInterrupt, as the usual handler of SIGINT."""
    raise KeyboardInterrupt


class Interrupter:
    """Interrupts a call again and again, each time at a line where it has not interrupted before.

    Only the thread that calls `interrupt` is traced, because Python runs signal handlers in the
    main thread only. Typical use, where each run leaves what the next one starts from:

        interrupter = Interrupter("checkpoint/")
        while interrupter.interrupt(lambda: manager.save(next(steps), state)):
            ...  # check what the interrupted call has left

    Args:
        *paths: beginnings of the paths of the traced files: absolute, or relative to the package
            elasticlib. All of elasticlib by default.
        handler: is called at the line, as a signal handler that may raise or return. By default it
            raises KeyboardInterrupt.
        visits: interrupt this many visits of a line within one run (each in a run of its own).
        opcodes: interrupt at every bytecode instruction instead of every line. This is stricter
            than CPython, which runs signal handlers at calls and at jumps backward only.
    """

    def __init__(
        self,
        *paths: str,
        handler: Callable[[], object] = interrupt,
        visits: int = 1,
        opcodes: bool = False,
    ) -> None:
        self._paths = tuple(p if p.startswith("/") else f"{PACKAGE}/{p}" for p in paths or ("",))
        self._handler, self._visits, self._opcodes = handler, visits, opcodes
        self._done: set[tuple[Any, ...]] = set()
        self._visited: Counter[tuple[Any, ...]] = Counter()
        self._has_interrupted = False
        self._raised: BaseException | None = None
        self.where: list[str] = []
        """The places at which it has interrupted, in this order."""

    def interrupt(self, call: Callable[[], object]) -> bool:
        """Run `call` and interrupt it at its first new line. Return whether there was one.

        An exception of the handler is caught here. The code under test may also handle it or raise
        another one from it; every other exception passes. Python collects no garbage meanwhile,
        because finalizers of objects of earlier calls would be interrupted, and their exceptions
        lost.
        """
        self._visited.clear()
        self._has_interrupted, self._raised = False, None
        before = sys.gettrace()
        gc.disable()
        sys.settrace(self._enter)
        try:
            call()
        except BaseException as error:
            if not self._is_from_handler(error):
                raise
        finally:
            sys.settrace(before)
            gc.enable()
            self._raised = None  # its traceback would keep the frames of the call alive
        return self._has_interrupted

    def _is_from_handler(self, error: BaseException | None) -> bool:
        """Return True if the handler raised the exception or is the context of the exception."""
        while error is not None and error is not self._raised:
            error = error.__cause__ or error.__context__
        return error is not None

    def _enter(self, frame: FrameType, _event: str, _: object) -> Any:
        if self._has_interrupted or not frame.f_code.co_filename.startswith(self._paths):
            return None
        frame.f_trace_opcodes = self._opcodes
        return self._trace

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not self._has_interrupted and event == ("opcode" if self._opcodes else "line"):
            place = (frame.f_code, frame.f_lasti if self._opcodes else frame.f_lineno)
            self._visited[place] += 1
            key = (*place, self._visited[place])
            if self._visited[place] <= self._visits and key not in self._done:
                self._done.add(key)
                code = frame.f_code
                name = f"{code.co_filename}:{frame.f_lineno} {code.co_name}"
                self.where.append(f"{name}+{frame.f_lasti}" if self._opcodes else name)
                self._has_interrupted = True
                try:
                    self._handler()
                except BaseException as error:
                    self._raised = error
                    raise
        return self._trace
