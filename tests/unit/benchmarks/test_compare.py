"""benchmarks/compare.py: losses that differ are an error."""

from __future__ import annotations

import pytest

from benchmarks.common.contestants import DDP, Contestant
from benchmarks.common.traffic_counter import sent_bytes
from benchmarks.compare import check_losses
from sdp_deepspeed.config import MODES


@pytest.mark.parametrize("loss", [1.0001, float("nan")])
def test_contestants_that_train_the_same_must_have_equal_losses(loss: float) -> None:
    whole, half, other = (Contestant(1, MODES[0], 1.0), Contestant(1, MODES[0], 0.5), Contestant(2, MODES[0], 0.5))
    held = {row.name: [{"losses": [3.0, 1.0]}] for row in (DDP, whole, half, other)}
    held[half.name] = held[other.name] = [{"losses": [2.0, 5.0]}]  # a subnetwork's loss is its own
    check_losses([DDP, whole, half, other], held)
    with pytest.raises(RuntimeError, match="C=1 does not train what DDP does"):
        check_losses([DDP, whole], held | {whole.name: [{"losses": [3.0, loss]}]})


def test_unknown_collectives_are_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"'new_collective_'.*sent_bytes"):
        sent_bytes("new_collective_", {}, 2, 0)
