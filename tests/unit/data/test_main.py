"""`sdp data` prepares a corpus beforehand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdp_deepspeed.__main__ import main
from tests.helpers.repository import ROOT


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


SHOWN = """
import logging, sys
from sdp_deepspeed.data.progress import show_log
if len(sys.argv) > 1:
    logging.basicConfig(level=logging.ERROR)
show_log()
show_log()
logging.getLogger("sdp_deepspeed.data.prepare").info("preparing text")
"""


@pytest.mark.parametrize(("arguments", "said"), [([], "data: preparing text\n"), (["own"], "")])
def test_lines_are_shown_once_unless_the_program_has_a_log(arguments: list[str], said: str) -> None:
    command = [sys.executable, "-c", SHOWN, *arguments]
    own = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=own)
    assert run.stderr == said
