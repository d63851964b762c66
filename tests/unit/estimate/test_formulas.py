"""Bytes per parameter: figures that a person can work out."""

from __future__ import annotations

import pytest

from sdp_deepspeed.estimate.formulas import between_nodes, bytes_per_parameter, sent_per_parameter, table
from sdp_deepspeed.estimate.precision import Precision

BF16 = Precision.of("bf16")
FP32 = Precision.of("fp32")


@pytest.mark.parametrize(
    ("method", "figures"),
    [
        ("DDP / ZeRO-0", (2, 2, 12)),
        ("ZeRO-1", (2, 2, 1.5)),
        ("ZeRO-2", (2, 0.25, 1.5)),
        ("ZeRO-3, FSDP", (0.25, 0.25, 1.5)),
        ("SDP, stage 0", (1, 1, 6)),
        ("SDP + ZeRO-1", (1, 1, 1.5)),
        ("SDP + ZeRO-2", (1, 0.5, 1.5)),
        ("SDP + FSDP2", (0.25, 0.25, 1.5)),
    ],
)
def test_eight_ranks_that_hold_half(method: str, figures: tuple[float, float, float]) -> None:
    assert bytes_per_parameter(8, 0.5, BF16)[method] == pytest.approx(figures)


def test_other_precisions() -> None:
    n, c = 4, 0.5
    assert bytes_per_parameter(n, c, FP32)["SDP + ZeRO-1"] == (4 * c, 4 * c, 8 / n)
    sums = Precision.of("bf16", accumulate_in_fp32=True)
    assert bytes_per_parameter(n, c, sums)["SDP + ZeRO-1"] == (2 * c, 4 * c, 12 / n)
    assert bytes_per_parameter(n, c, sums)["SDP + ZeRO-2"] == (2 * c, 4 / n, 12 / n)


def test_offload_leaves_out_what_has_no_state_to_offload() -> None:
    rows = bytes_per_parameter(8, 0.5, FP32, offload=True)
    assert list(rows) == ["ZeRO-1", "ZeRO-2", "SDP + ZeRO-1", "SDP + ZeRO-2"]
    assert rows["SDP + ZeRO-1"] == (2, 2, 1.5), "with a master"


def test_what_is_sent() -> None:
    """4 ranks, 2 holders: half of the parameters, half of which stays; 2 bytes each way."""
    forward, backward = (sent_per_parameter(4, 0.5, BF16, regime=regime) for regime in ("forward", "backward"))
    assert forward["SDP + ZeRO-1"] == 0.25 * 2 + 0.25 * 2
    assert backward["SDP + ZeRO-1"] == 0.25 * 2 + 0.75 * 2
    assert forward["ZeRO-1"] == backward["ZeRO-1"] == 0.75 * 2 + 0.75 * 2
    assert forward["SDP + FSDP2"] == 0.25 * (2 * 2 + 2), "gathered twice, averaged once"
    assert "SDP + FSDP2" not in {**backward, **bytes_per_parameter(4, 0.5, BF16, regime="backward")}
    several = sent_per_parameter(4, 0.5, BF16, accumulation=3)
    assert several["SDP + ZeRO-1"] == forward["SDP + ZeRO-1"]
    assert several["SDP + ZeRO-2"] == 3 * 0.25 * 2 + 0.25 * 2
    assert several["SDP + FSDP2"] == 3 * 0.25 * (2 * 2 + 2)
    assert several["ZeRO-3, FSDP"] == 3 * 0.75 * (2 * 2 + 2)
    assert several["ZeRO-2"] == 3 * 0.75 * 2 + 0.75 * 2


def test_between_nodes() -> None:
    """32 of 64 ranks on eight nodes of eight: four whole nodes at best; 2 bytes each way."""
    plain, anywhere, fewest = between_nodes(64, 0.5, 8, BF16).values()
    assert plain == (8, 7 * 4, 1.0)
    assert anywhere[0] == pytest.approx(8, abs=0.03)  # a node has a holder unless all 32 are among 56 others
    assert anywhere[2] == pytest.approx(64 * 31 / (32 * 63))
    assert fewest == (4, 3 * 4, pytest.approx(8 * 3 / (4 * 7)))
    assert between_nodes(64, 0.5, 8, BF16, regime="backward")["holders on the fewest nodes"][1] == 3 * 2 + 7 * 2
    assert between_nodes(4, 0.5, 8, BF16)["holders anywhere"] == (1, 0, pytest.approx(2 / 3))


def test_nodes_that_holders_anywhere_are_on() -> None:
    """All ways to choose 2 of 6 ranks on nodes of 4 and 2: 7 of 15 are on one node."""
    assert between_nodes(6, 1 / 3, 4, BF16)["holders anywhere"][0] == pytest.approx((7 + 8 * 2) / 15)


def test_table_adds_up_what_is_on_the_device() -> None:
    rows, sent = {"a": (1.0, 2.0, 3.0), "b": (1.0, 1.0, 1.0)}, {"a": 0.5}
    title, _, *lines = table(rows, sent).split("\n")
    assert title == "| bytes per parameter | weights | gradients | optimizer | sum on device | least sent per step |"
    assert lines == ["| a | 1 | 2 | 3 | 6 | 0.5 |", "| b | 1 | 1 | 1 | 3 |  |"]
    title, _, *lines = table(rows, sent, offload=True).split("\n")
    assert "optimizer, host memory" in title
    assert lines[0] == "| a | 1 | 2 | 3 | 3 | 0.5 |"
