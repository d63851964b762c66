"""`sdp data` prepares a corpus beforehand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sdp_deepspeed.__main__ import main


def test_it_prepares_and_tells_mistakes_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("".join(f"paragraph number {i}\n\n" for i in range(200)))
    settings = {
        "source": "files",
        "path": str(tmp_path / "text.txt"),
        "text_documents": "paragraph",
        "vocab_size": 300,
        "cache_dir": str(tmp_path / "cache"),
    }
    (tmp_path / "data.json").write_text(json.dumps(settings))
    assert main(["data", str(tmp_path / "data.json")]) == 0
    output = capsys.readouterr()
    assert "tokens to train on" in output.out
    assert "100%" in output.err, "a bar"
    assert "tokens/s=" in output.err
    (tmp_path / "data.json").write_text(json.dumps(settings | {"path": str(tmp_path / "absent.txt")}))
    assert main(["data", str(tmp_path / "data.json")]) == 2
    said = capsys.readouterr().err
    assert "no file found" in said
    assert said.count("\n") == 1
    (tmp_path / "data.json").write_text("[]")
    assert main(["data", str(tmp_path / "data.json")]) == 2
    assert "holds a list: expected a JSON object" in capsys.readouterr().err
