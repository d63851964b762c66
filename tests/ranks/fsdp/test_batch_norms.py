"""Batch norms under FSDP2: one mean at evaluations, exports and checkpoints, and statistics of the dense model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import sdp_deepspeed
from sdp_deepspeed.fsdp import CheckpointManager, full_state_dict, param_groups, reestimate_batch_norm
from tests.helpers.batch_norms import Net, batches, means, statistics_of
from tests.helpers.ranks import Rank
from tests.helpers.sharded import sharded
from tests.helpers.training import assert_identical, gathered, refusal
from tests.ranks.engine.test_batch_norms import NUM, oracle, similar

pytestmark = pytest.mark.world(3)

SUMS = 2.0**-23  # of fp64 in another order, rounded to fp32


def trained(rank: Rank, block: dict[str, Any], num_steps: int = 2) -> tuple[Any, torch.optim.Optimizer]:
    model = sharded(Net(), block)
    optimizer = torch.optim.AdamW(param_groups(model), lr=1e-2)
    steps(model, optimizer, rank, num_steps)
    return model, optimizer


def steps(model: Any, optimizer: torch.optim.Optimizer, rank: Rank, num_steps: int) -> None:
    for images, classes in batches(rank.rank, num_steps):
        model(images, classes).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_means(model: Any, before: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The means of what ranks had, the same bits on all that have it."""
    by_rank, expected = gathered(statistics_of(model)), means(before)
    for found in by_rank:
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=SUMS, atol=0)
            assert all(torch.equal(value, other.get(name, value)) for other in by_rank), name
    shared = [found["norm.running_mean"] for found in before]
    assert not torch.equal(shared[0], shared[1]), "each rank has batches of its own"
    return means(by_rank)


def test_evaluation(rank: Rank) -> None:
    """Also where all ranks hold everything, and with a layer that was wrapped afterwards."""
    images = batches(7, 1)[0][0]
    for holders in (2, 3):
        model, optimizer = trained(rank, {"holders": holders})
        model.layers[1] = checkpoint_wrapper(model.layers[1])
        for _ in range(2):
            before = gathered(statistics_of(model))
            model.eval()
            with torch.no_grad():
                found = [model(images) for _ in range(2)]
            expected = assert_means(model, before)
            plain = Net().eval()
            state = [full_state_dict(model)]
            torch.distributed.broadcast_object_list(state)
            plain.load_state_dict(state[0])
            assert_identical(statistics_of(plain), expected)
            with torch.no_grad():
                assert all(torch.equal(logits, found[0]) for logits in found)
                torch.testing.assert_close(found[0], plain(images), rtol=1e-6, atol=1e-6)
            steps(model.train(), optimizer, rank, 1)


def test_what_is_saved(rank: Rank) -> None:
    """The full state dict has means over holders, and a checkpoint makes them so."""
    for holders in (2, 3):
        model, optimizer = trained(rank, {"holders": holders})
        before = gathered(statistics_of(model))
        state = full_state_dict(model)
        expected = assert_means(model, before)
        if rank.rank == 0:
            assert_identical({name: state[name] for name in expected}, expected)
        model, optimizer = trained(rank, {"holders": holders})
        folder = rank.folder / str(holders)
        CheckpointManager(model, optimizer).save_checkpoint(folder)
        assert_means(model, before)


@pytest.mark.slow
def test_re_estimation(rank: Rank) -> None:
    """Inside and outside of the dense view, by both names; and what is wrong with it, on all ranks."""
    own = [images for images, _ in batches(rank.rank, NUM, seed=9)]
    for holders in (2, 3):
        model, optimizer = trained(rank, {"holders": holders})
        state = [full_state_dict(model)]
        torch.distributed.broadcast_object_list(state)
        assert reestimate_batch_norm(model, own, num_batches=NUM) == 9
        assert model.training
        first = statistics_of(model)
        model.norm.running_mean.fill_(1e3)
        assert sdp_deepspeed.reestimate_batch_norm(model, own, num_batches=NUM) == 9
        assert_identical(statistics_of(model), first)
        expected = oracle(state[0])
        for name, value in means(gathered(first)).items():
            similar(value, expected[name])
        words = ("num_batches: got 4, but found 3",)
        refusal(ValueError, lambda: reestimate_batch_norm(model, own, num_batches=4), *words)  # noqa: B023
        assert_identical(statistics_of(model), first)
        steps(model, optimizer, rank, 1)
