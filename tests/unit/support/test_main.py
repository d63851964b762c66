"""`sdp support` prints the matrix, or writes it into a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdp_deepspeed.__main__ import main
from sdp_deepspeed.support.matrix import BEGIN, END, markdown


def test_it_prints_or_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["support"]) == 0
    assert capsys.readouterr().out == markdown() + "\n"
    path = tmp_path / "notes.md"
    path.write_text(f"{BEGIN}\n{END}\n")
    assert main(["support", str(path)]) == 0
    assert capsys.readouterr().out == ""
    assert markdown() in path.read_text()


def test_a_file_without_markers_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.md").touch()
    assert main(["support", str(tmp_path / "notes.md")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'notes.md'} needs a line")
