"""The system's errors, told with the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdp_deepspeed.checkpoint.storage.errors import translated_write_errors, translating_os_errors


def test_an_error_of_the_system_names_the_file(tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    with pytest.raises(RuntimeError, match=f"^checkpoint: No such file or directory: {lost}$"):
        translating_os_errors(lost.read_text)()
    assert translating_os_errors(lambda: 3)() == 3


def test_an_error_without_a_file() -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(RuntimeError, match=r"^checkpoint: No space left on device$"):
        translating_os_errors(fail)()


def test_what_was_not_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f"cannot write {tmp_path}: Is a directory; earlier checkpoints are intact"):  # noqa: SIM117
        with translated_write_errors(tmp_path):
            tmp_path.write_text("")
