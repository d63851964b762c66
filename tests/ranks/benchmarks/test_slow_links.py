"""Benchmarks of slow links on two ranks without one: what is trained, timed and refused."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from benchmarks import link_rates, step_time, time_to_loss
from benchmarks.tables.links import link_rates as link_table
from benchmarks.tables.time_to_loss import time_to_loss as loss_table
from tests.helpers.ranks import Rank

pytestmark = pytest.mark.slow


def refused(words: str) -> Any:
    """By a line of the first rank."""
    return pytest.raises(SystemExit, match=f"error: .*{words}" if dist.get_rank() == 0 else "2")


def ddp_trains_what_zero_does(rank: Rank) -> None:
    """The same losses after the same steps, at rates that rise and fall; what is there is not trained again."""
    facts: dict[str, Any] = {"steps": 6, "every": 2, "micro_batch": 1, "validation": 4, "rate": 3e-3, "bucket": 2e5}
    options = argparse.Namespace(**facts, only=["DDP", "zero2"], seeds=[0], output=str(rank.folder / "loss.json"))
    found = time_to_loss.measure(options)
    ddp, zero = (row["curve"] for row in found["results"])
    assert [point[0] for point in ddp] == [2, 4, 6]
    assert [point[2] for point in ddp] == pytest.approx([point[2] for point in zero], rel=1e-4)
    assert ddp[0][2] - ddp[-1][2] > 0.1, "it learns"
    assert all(row["provenance"]["versions"] for row in found["results"])
    again = time_to_loss.measure(options)
    if dist.get_rank() == 0:  # the others have times of their own, which are not written
        assert json.dumps(again) == json.dumps(found)
    assert "| DDP | 6 |" in loss_table(found | {"link": "1gbit"})
    with mock.patch.dict(os.environ, {"SDP_LINK_RATE": "100mbit"}), refused("of a run with another link: name another"):
        time_to_loss.measure(options)
    with refused("of a run with another --rate, --steps: name another"):
        time_to_loss.measure(argparse.Namespace(**vars(options) | {"steps": 8, "rate": 1e-3}))


def collectives_are_timed(_rank: Rank) -> None:
    options = argparse.Namespace(sizes=[2**19, 2**20], repeats=2, late=0.001)
    found = link_rates.measure(options)
    assert set(found["seconds"]) == {name + late for name in link_rates.primitives() for late in ("", link_rates.LATE)}
    assert all(len(times) == 2 for sizes in found["seconds"].values() for times in sizes.values())
    assert "all_to_all, receives first, a rank late" in link_table(found)
    with refused("a line needs two sizes above 262144 bytes"):
        link_rates.measure(argparse.Namespace(sizes=[2**16, 2**20], repeats=2, late=0.001))


def ddp_beside_the_others(_rank: Rank) -> None:
    """It sends what C = 1 does, two thirds of ZeRO-1's bytes."""
    facts: dict[str, Any] = {"stage": [1], "overlap": False, "all_modes": False, "subnetworks": None, "ddp": True}
    facts |= {"knows_nodes": False, "model": "small", "micro_batch": 1, "accumulation": 1, "bucket": 2e6}
    facts |= {"optimizer": "AdamW", "warmup": 0, "repeats": 2, "all_to_all_of_gloo": False}
    found = step_time.measure(argparse.Namespace(**facts))
    sent = {name: ranks[0]["sent_bytes"] for name, ranks in found["work"].items()}
    assert list(sent)[-1] == "DDP"
    assert sent["DDP"] == pytest.approx(sent["forward x block C=1"], rel=0.01)
    assert sent["DDP"] == pytest.approx(sent["zero1"] * 2 / 3, rel=0.01)
    assert (len(found["seconds"]["DDP"]), found["targets"]["DDP"], found["spectral_gaps"]["DDP"]) == (2, None, None)
    with refused("--ddp makes one micro-step with AdamW"):
        step_time.measure(argparse.Namespace(**facts | {"accumulation": 2}))


def _cases(_size: int, _options: pytest.Config) -> Iterator[tuple[str, Any]]:
    for check in (ddp_trains_what_zero_does, collectives_are_timed, ddp_beside_the_others):
        yield check.__name__, check


@pytest.mark.checks(2, _cases)
def test_two_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome
