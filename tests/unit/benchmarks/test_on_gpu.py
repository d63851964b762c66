"""What on_gpu.py makes of pytest's reports and of profiles; tests/launcher/test_on_gpu.py runs it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.on_gpu import read_report
from benchmarks.self_send import OFFSETS, pairs
from benchmarks.worker_step import covered

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


def test_time_in_which_a_kernel_ran_counts_once() -> None:
    assert covered([]) == 0
    assert covered([(5, 7), (0, 2), (1, 3), (1, 2)]) == 5


def test_offsets_on_one_side_and_on_both() -> None:
    assert len(pairs()) == 3 * (len(OFFSETS) - 1) + 1
    assert {(0, 0), (0, 16), (16, 0), (16, 16)} <= set(pairs())
