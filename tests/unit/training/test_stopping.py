"""Who may ask a run to stop, and what is left of the asking."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

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


def test_one_rank_alone_agrees_with_itself(tmp_path: Path) -> None:
    import torch
    import torch.distributed as dist

    from sdp_deepspeed.training.stopping import StepOutcome, reduce_outcome

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        for stop_requested, failed in itertools.product((False, True), repeat=2):
            outcome = reduce_outcome(torch.tensor(1.5), stop_requested=stop_requested, failed=failed)
            assert outcome == StepOutcome(1.5, stop_requested, failed)
    finally:
        dist.destroy_process_group()
