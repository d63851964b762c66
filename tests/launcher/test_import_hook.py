"""The import hook, as a user meets it: whatever the order of imports, configs with the block and no others are ours."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.helpers.programs import ended
from tests.helpers.repository import ROOT

OURS, PLAIN = "SubnetworkEngine SubnetworkOptimizer", "DeepSpeedEngine DeepSpeedZeroOptimizer"
EXPECTED = {
    "block": OURS,
    "plain": PLAIN,
    "switched off": PLAIN,
    "path": OURS,
    "args": OURS,
    "near miss": "ValueError: .*subnetworks_data_parallel.*subnetwork_data_parallel",
    "hybrid": "ValueError: .*hybrid",
    "pipeline": "ValueError: .*[Pp]ipeline",
    "no optimizer": "AssertionError: zero stage 1 requires an optimizer",
    "plain after all": PLAIN,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Of one script for each order of imports, side by side."""
    orders = ("sdp_deepspeed", "deepspeed")
    folders = {order: tmp_path_factory.mktemp(order) for order in orders}
    running = {
        order: subprocess.Popen(
            [sys.executable, str(ROOT / "tests/helpers/import_hook_user.py"), str(folder), order],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for order, folder in folders.items()
    }
    for order, process in running.items():
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, f"{order} first:\n{output[-4000:]}"
    return {order: json.loads((folder / "results.json").read_text()) for order, folder in folders.items()}


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("first", ["sdp_deepspeed", "deepspeed"])
def test_who_builds_the_engine(results: dict[str, dict[str, str]], first: str, name: str) -> None:
    found = results[first][name]
    assert re.match(EXPECTED[name], found, re.DOTALL), found


def test_without_deepspeed_the_import_error_is_its_own() -> None:
    """The hook must not turn a missing DeepSpeed into something else."""
    code = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name == "deepspeed":
            raise ModuleNotFoundError("No module named 'deepspeed'", name=name)
sys.meta_path.insert(0, Hide())
import sdp_deepspeed
from sdp_deepspeed.config import parse
try:
    import deepspeed
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert ended([sys.executable, "-c", code]).stdout == "deepspeed\n"
