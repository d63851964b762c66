"""benchmarks/compare.py on two ranks: what contestants hold and send is what they must."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from benchmarks import compare
from benchmarks.common.contestants import DDP, FSDP2, Contestant
from benchmarks.common.models import TINY, num_parameters
from sdp_deepspeed.config import MODES
from tests.helpers.ranks import Rank

pytestmark = pytest.mark.world(2)

WHOLE = 4 * num_parameters(TINY)  # bytes of all fp32 parameters
LAYERS = WHOLE - 4 * num_parameters(TINY | {"num_hidden_layers": 0})
LARGEST = 4 * 64 * 32
COUNTERS = 4 * 20  # the step counters of the optimizer: 9 tensors of each layer, embeddings, norm
PADDING = 64 * 4 * 8  # bytes, of a few shards that start at multiples of 64 elements
HALF = Contestant(1, MODES[0], 0.5)


def test_contestants_hold_and_send_what_they_must(rank: Rank) -> None:
    """Losses of C = 1 are compared with DDP's inside."""
    rows = [DDP, Contestant(1), FSDP2, Contestant(1, MODES[0], 1.0), HALF, Contestant(3, MODES[0], 0.5, host="FSDP2")]
    found = compare.measure(rows, TINY, repeats=2, length=8, bucket=100_000)
    ddp, zero1, fsdp2, whole, half, over_fsdp2 = (found[row.name]["ranks"][dist.get_rank()] for row in rows)
    assert (ddp["weights"], ddp["sent"]) == (WHOLE, WHOLE), "half of it each way"
    assert WHOLE <= ddp["gradients"] <= WHOLE + LARGEST, "a gradient is copied into its bucket"
    assert 2 * WHOLE <= ddp["optimizer"] <= 2 * WHOLE + COUNTERS
    assert zero1["sent"] == pytest.approx(1.5 * WHOLE, rel=0.01), "it all-reduces gradients"
    for kind, bytes_held in (("weights", WHOLE), ("gradients", WHOLE), ("optimizer", 2 * WHOLE)):
        assert fsdp2[kind] == pytest.approx(bytes_held / 2, rel=0.01), kind
        assert over_fsdp2[kind] == pytest.approx(bytes_held / 2, rel=0.01), "a unit's only holder has all of it"
    assert WHOLE <= whole["sent"] <= 1.01 * WHOLE + PADDING
    shared = WHOLE - LAYERS
    for kind in ("weights", "gradients"):
        assert half[kind] == pytest.approx(shared + LAYERS / 2, rel=0.01), kind
    assert half["optimizer"] == pytest.approx(2 * (shared / 2 + LAYERS / 2), rel=0.01)  # units have one holder
    assert shared <= half["sent"] <= 1.01 * shared + PADDING, "of units nothing travels"
    for mine in (ddp, zero1, fsdp2, whole, half, over_fsdp2):
        assert mine["peak"] > mine["weights"] + mine["gradients"] + mine["optimizer"]
    assert all(len(row["seconds"]) == 2 for row in found.values())
