"""What `on_gpu.py values` makes of pytest's report; tests/launcher/test_on_gpu.py runs the program."""

from __future__ import annotations

from pathlib import Path

from benchmarks.on_gpu import read_report

REPORT = """<testsuites><testsuite>
<testcase classname="tests.ranks.test_gpu" name="test_a" time="1.5" />
<testcase classname="tests.ranks.test_gpu" name="test_b" time="0.2"><failure>E  AssertionError: rank 0 of 2:
E    Traceback
E      File "somewhere.py"
E    ValueError: why
E  assert 'rank 0 of 2' is None</failure></testcase>
<testcase classname="tests.ranks.test_gpu" name="test_c" time="0"><skipped message="needs a GPU: --gpu" /></testcase>
<testcase classname="" name="tests.ranks.test_d" time="0"><error message="collection">No module</error></testcase>
</testsuite></testsuites>"""


def test_every_test_has_its_outcome_and_error(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    found = [(test["name"], test["outcome"], test["why"]) for test in read_report(path)]
    assert found == [
        ("tests.ranks.test_gpu::test_a", "passed", None),
        ("tests.ranks.test_gpu::test_b", "failure", "ValueError: why"),
        ("tests.ranks.test_gpu::test_c", "skipped", "needs a GPU: --gpu"),
        ("::tests.ranks.test_d", "error", "No module"),
    ]
    assert read_report(tmp_path / "none.xml") == []
