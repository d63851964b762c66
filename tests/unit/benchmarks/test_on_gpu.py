"""What on_gpu.py makes of pytest's reports and of profiles; tests/launcher/test_on_gpu.py runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import on_gpu
from benchmarks.on_gpu import read_report
from benchmarks.self_send import OFFSETS, pairs

REPORT = """<testsuites><testsuite>
<testcase classname="tests.ranks.test_gpu" name="test_a" time="1.5" />
<testcase classname="tests.ranks.test_gpu" name="test_b" time="0.2"><failure>rank 0: why</failure></testcase>
<testcase classname="tests.ranks.test_gpu" name="test_c" time="0"><skipped message="needs a GPU: --gpu" /></testcase>
<testcase classname="" name="tests.ranks.test_d" time="0"><error message="collection">No module</error></testcase>
</testsuite></testsuites>"""


def test_every_test_has_its_outcome_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    found = [(test["name"], test["outcome"], test["why"]) for test in read_report(path)]
    assert found == [
        ("tests.ranks.test_gpu::test_a", "passed", None),
        ("tests.ranks.test_gpu::test_b", "failure", "rank 0: why"),
        ("tests.ranks.test_gpu::test_c", "skipped", "needs a GPU: --gpu"),
        ("::tests.ranks.test_d", "error", "No module"),
    ]
    assert read_report(tmp_path / "none.xml") == []


def test_offsets_on_one_side_and_on_both() -> None:
    assert len(pairs()) == 3 * (len(OFFSETS) - 1) + 1
    assert {(0, 0), (0, 16), (16, 0), (16, 16)} <= set(pairs())


def test_figures_of_another_section_are_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "raw.json"
    output.write_text(json.dumps({"what": "gpu_bandwidth", "results": []}), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", "sizes", "--output", str(output)])
    with pytest.raises(SystemExit, match=r"^error: --output .* has figures of gpu_bandwidth; name another file$"):
        on_gpu.main()
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", "sizes", "--output", str(tmp_path / "new"), "--select", "nothing"])
    with pytest.raises(SystemExit, match=r"^error: --select 'nothing' is in no name such as 'tiny, DDP'"):
        on_gpu.main()
