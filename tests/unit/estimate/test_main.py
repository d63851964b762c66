"""`sdp estimate`: its arguments, and the table that it prints."""

from __future__ import annotations

import pytest

from sdp_deepspeed.__main__ import main
from sdp_deepspeed.estimate.formulas import bytes_per_parameter, sent_per_parameter, table
from sdp_deepspeed.estimate.precision import Precision

BF16 = Precision.of("bf16")


def test_printed_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--ranks", "8", "--coverage", "0.5"]) == 0
    printed = capsys.readouterr().out
    assert table(bytes_per_parameter(8, 0.5, BF16), sent_per_parameter(8, 0.5, BF16)) in printed
    assert "| SDP + ZeRO-2 | 1 | 0.25 | 1.5 | 2.75 | 1.5 |" in printed
    assert "nodes" not in printed


def test_table_between_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--ranks", "64", "--coverage", "0.5", "--ranks-per-node", "8"]) == 0
    printed = capsys.readouterr().out
    assert "| between 8 nodes | nodes of a unit |" in printed
    assert "| holders on the fewest nodes | 4 | 12 | at most 0.857 |" in printed


@pytest.mark.parametrize(
    ("flags", "row"),
    [
        ("--dtype fp16", "| SDP + ZeRO-2 | 1 | 0.25 | 1.5 | 2.75 | 1.5 |"),
        ("--dtype fp32", "| SDP + ZeRO-2 | 2 | 0.5 | 1 | 3.5 | 3 |"),
        ("--accumulate-in-fp32", "| SDP + ZeRO-2 | 1 | 0.5 | 1.5 | 3 | 1.5 |"),
        ("--accumulation 3", "| SDP + ZeRO-2 | 1 | 0.25 | 1.5 | 2.75 | 3 |"),
        ("--regime backward", "| SDP + ZeRO-2 | 2 | 0.25 | 1.5 | 3.75 | 2.5 |"),
        ("--offload", "| SDP + ZeRO-2 | 1 | 0.25 | 1.5 | 1.25 | 1.5 |"),
        ("--offload --dtype fp32", "| SDP + ZeRO-2 | 2 | 0.5 | 1.5 | 2.5 | 3 |"),
    ],
)
def test_flags_of_the_printed_table(flags: str, row: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *flags.split()]) == 0
    printed = capsys.readouterr().out
    assert row in printed
    assert ("SDP, stage 0" in printed) == ("--offload" not in flags), "stage 0 has nothing to offload to"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--ranks 0", "--ranks: expected a whole number above 0, got '0'"),
        ("--ranks-per-node 0", "--ranks-per-node: expected a whole number above 0, got '0'"),
        ("--accumulation 0", "--accumulation: expected a whole number above 0, got '0'"),
        ("--coverage 0", "--coverage: got 0, expected a number above 0 and at most 1"),
        ("--coverage 2", "--coverage: got 2, expected a number above 0 and at most 1"),
        ("--coverage nan", "--coverage: got nan, expected a number above 0 and at most 1"),
        ("--coverage half", "--coverage: invalid float value: 'half'"),
        ("--coverage 0.1", "0.1 of 8 ranks leaves units without a holder: needs 1/8 or more"),
    ],
)
def test_impossible_arguments(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *arguments.split()]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert words in printed.err
    assert not printed.out
