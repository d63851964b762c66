"""A user's mistake is told once and without a traceback; a bug of ours keeps its own."""

from __future__ import annotations

import pytest

from sdp_deepspeed.command_parser import USER_ERROR_EXIT_CODE
from sdp_deepspeed.training.user_errors import exit_on_user_error


def test_other_ranks_let_rank_0_speak(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    waited: list[float] = []
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr("time.sleep", waited.append)
    with pytest.raises(SystemExit) as end, exit_on_user_error(KeyError):
        raise KeyError("a host's own error")
    assert end.value.code == USER_ERROR_EXIT_CODE
    assert waited
    assert "error on rank 3: " in capsys.readouterr().err


def test_our_own_bugs_keep_their_traceback() -> None:
    with pytest.raises(KeyError), exit_on_user_error():
        raise KeyError("bug")
