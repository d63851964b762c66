"""launch/quickstart.sh with few steps, in an environment that is there."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.programs import launched
from tests.helpers.repository import ROOT

SMALL = {"QUICKSTART_STEPS": "6", "QUICKSTART_WORKERS": "2"}
INSTALLED = """
say() { printf '==> %s\\n' "$*"; }
"""


def test_the_quickstart_trains_compares_and_samples(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "launch").mkdir(parents=True)
    for place in (ROOT, ROOT / "launch"):
        for path in place.iterdir():
            if path.name not in ("launch", "runs", "_environment.sh"):
                (checkout / path.relative_to(ROOT)).symlink_to(path)
    (checkout / "launch/_environment.sh").write_text(INSTALLED)
    (tmp_path / "text.txt").write_text("\n".join(f"def square_{n}(x): return {n} * x * x" for n in range(4000)))
    text = f"data.sources=[{{path: text, data_files: {tmp_path / 'text.txt'}}}]"
    command = ["bash", str(checkout / "launch/quickstart.sh"), text, "data.vocab_size=512", "data.validation_blocks=8"]
    with launched(command, tmp_path / "log", **SMALL) as running:
        code, output = running.finish()
    assert code == 0, output[-8000:]
    said = output[output.index("==> 3/4") :]
    assert "quickstart_zero1" in said
    assert "\ndef " in said[said.index("==> 4/4") :]
    assert (checkout / "runs/quickstart/hf/model.safetensors").exists()
