"""The inbox for signals gives the signals back as far as possible."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from elasticlib.signal_inbox import SignalInbox


def test_signal_with_a_handler_of_a_c_library_gets_its_default_action(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    install = signal.signal

    def install_over_c_handler(number: int, handler: Any) -> Any:
        """Act as if the interpreter had found a handler at its start that is no Python object."""
        previous = install(number, handler)
        return None if previous is before else previous

    monkeypatch.setattr(signal, "signal", install_over_c_handler)
    try:
        with SignalInbox().captured([signal.SIGUSR2]):
            assert callable(signal.getsignal(signal.SIGUSR2))
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    finally:
        install(signal.SIGUSR2, before)
