"""Who may ask a run to stop, and what is left of the asking."""

from __future__ import annotations

import os
import signal

import pytest


def test_signals_ask_once_and_leave_no_handler_behind() -> None:
    from sdp_deepspeed.training.stopping import STOP_SIGNALS, StopRequest

    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopRequest() as stop:
        assert not stop.requested
        for number in (*STOP_SIGNALS, *STOP_SIGNALS):
            os.kill(os.getpid(), number)
        assert stop.requested
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_a_launcher_that_is_gone_asks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from sdp_deepspeed.training.stopping import StopRequest

    with StopRequest() as stop:
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert stop.requested
