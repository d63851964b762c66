"""Synchronized batch norms: over the holders of their unit, over all ranks if shared; what is refused by name.

PyTorch's own refuses CPUs, so a subclass computes the same over gloo."""

from __future__ import annotations

import itertools
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sdp_deepspeed.fsdp import sharded_model_of
from tests.helpers.batch_norms import Net, SyncLayer, batches, settings, statistics_of, train
from tests.helpers.ranks import Check, Rank
from tests.helpers.sharded import sharded
from tests.helpers.training import assert_identical, dense_state, engine_of, gathered, refusal

SIZE = 3


def holders_by_norm(module: nn.Module, plan: Any) -> dict[str, tuple[int, ...]]:
    """What the groups must be."""
    norms = [name for name, inner in module.named_modules() if isinstance(inner, nn.SyncBatchNorm)]
    everyone = tuple(range(SIZE))
    of_units = {
        piece.parameter.rpartition(".")[0]: plan.ranks_of(index) if plan.regime == "forward" else everyone
        for index, unit in enumerate(plan.units)
        for piece in unit.pieces
    }
    return {name: of_units.get(name, everyone) for name in norms}


def check_groups(module: nn.Module, plan: Any) -> None:
    expected, rank = holders_by_norm(module, plan), dist.get_rank()
    assert len(set(expected.values())) > 1 or plan.regime == "backward"
    groups: dict[Any, Any] = {}
    for name, holders in expected.items():
        norm: Any = module.get_submodule(name)
        if rank in holders:
            found = (
                tuple(range(SIZE)) if norm.process_group is None else dist.get_process_group_ranks(norm.process_group)
            )
            assert tuple(found) == holders, name
            assert groups.setdefault(holders, norm.process_group) is norm.process_group, "one group for a holder set"
        else:
            assert norm.process_group is None


def check_values(module: nn.Module, plan: Any) -> None:
    """Each norm gave what a plain one gives to the rows of all ranks that run it."""
    for name, holders in holders_by_norm(module, plan).items():
        norm: Any = module.get_submodule(name)
        seen = gathered(norm.seen)
        assert [bool(of_rank) for of_rank in seen] == [rank in holders for rank in range(SIZE)]
        if norm.seen:
            rows = torch.cat([seen[rank][-1][0] for rank in holders])
            expected = nn.functional.batch_norm(rows, None, None, norm.sdp_before[0], norm.sdp_before[1], training=True)
            own = expected.chunk(len(holders))[holders.index(dist.get_rank())]
            torch.testing.assert_close(norm.seen[-1][1], own, rtol=1e-4, atol=1e-5)


def remember_weights(module: Any) -> None:
    for norm in module.modules():
        if isinstance(norm, nn.SyncBatchNorm):
            vars(norm)["sdp_before"] = tuple(
                getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in (norm.weight, norm.bias)
            )


def over_holders(rank: Rank) -> None:
    """Groups, values, and nobody waits in vain: training, evaluation, training."""
    for regime, stage in (("forward", 0), ("forward", 1), ("backward", 1)):
        block = settings(holders=2, regime=regime, check_agreement=True) | {"zero_optimization": {"stage": stage}}
        engine = engine_of(block, Net(SyncLayer))
        check_groups(engine.module, engine.plan)
        train(engine, rank.rank, num_steps=2)
        remember_weights(engine.module)
        train(engine, rank.rank, num_steps=1)
        check_values(engine.module, engine.plan)
        engine.eval()
        with torch.no_grad():
            found = engine(batches(7, 1)[0][0])
        dense = Net().eval()
        dense.load_state_dict(dense_state(engine))
        with torch.no_grad():
            torch.testing.assert_close(found, dense(batches(7, 1)[0][0]))
        engine.train()
        before = statistics_of(engine.module)
        engine.reestimate_batch_norm([images for images, _ in batches(rank.rank, 2)], num_batches=2)
        assert any(not torch.equal(value, before[name]) for name, value in statistics_of(engine.module).items())
        train(engine, rank.rank, num_steps=1)


def trained_as_one_batch(rank: Rank) -> None:
    """With one subnetwork's units on all ranks it is one big batch; the default group is left as it is."""
    engine = engine_of(settings(holders=3), Net(SyncLayer))
    assert all(m.process_group is None for m in engine.module.modules() if isinstance(m, nn.SyncBatchNorm))
    losses = torch.tensor(gathered(train(engine, rank.rank, num_steps=1)[0]))
    torch.manual_seed(0)
    model: Any = Net()
    own = [batches(of_rank, 1)[0] for of_rank in range(SIZE)]
    model.dropout = nn.Identity()
    assert losses.isfinite().all()
    model(torch.cat([images for images, _ in own]))
    for name, value in statistics_of(engine.module).items():
        torch.testing.assert_close(value, model.get_buffer(name), rtol=1e-4, atol=1e-5)


def with_fsdp2(rank: Rank) -> None:
    model = sharded(Net(SyncLayer), {"holders": 2})
    plan = sharded_model_of(model).plan
    check_groups(model, plan)
    for images, classes in batches(rank.rank, 2):
        remember_sharded(model)
        model(images, classes).backward()
        check_values(model, plan)
    model.eval()
    with torch.no_grad():
        assert len({str(logits.tolist()) for logits in gathered(model(batches(7, 1)[0][0]))}) == 1


def remember_sharded(model: Any) -> None:
    for norm in model.modules():
        if isinstance(norm, nn.SyncBatchNorm):
            vars(norm)["sdp_before"] = torch.ones(6), torch.zeros(6)  # as they begin; nothing is stepped


def copies_are_over_the_same_ranks(rank: Rank) -> None:
    engine = engine_of(settings(holders=2), Net(SyncLayer))
    copied = deepcopy(deepcopy(engine.module))
    for norm, other in zip(engine.module.modules(), copied.modules(), strict=True):
        if isinstance(norm, nn.SyncBatchNorm):
            assert other.process_group is norm.process_group
    with engine.dense(resident=True):
        whole = deepcopy(engine.module).eval()
    assert_identical(whole.state_dict(), dense_state(engine))


def refused(rank: Rank) -> None:
    """By name, on all ranks, before training."""

    def build(model: nn.Module, stage: int = 1, **block: Any) -> Any:
        return engine_of(settings(**({"holders": 2} | block)) | {"zero_optimization": {"stage": stage}}, model)

    refusal(ValueError, lambda: build(Net(SyncLayer), stage=2), "SyncBatchNorm, at stage 2", "use stage 1")
    with_group: Any = Net(SyncLayer)
    group = dist.new_group([0, 1, 2])
    with_group.layers[1].body[1].process_group = group
    refusal(ValueError, lambda: build(with_group), "'layers.1.body.1'", "without one")
    shared = Net(SyncLayer)
    shared.norm.process_group = group  # all ranks run it, whatever its user's ranks are
    build(shared)
    frozen = Net(SyncLayer)
    for parameter in itertools.chain(frozen.stem.parameters(), frozen.norm.parameters()):
        parameter.requires_grad_(False)
    refusal(ValueError, lambda: build(frozen), "nothing that all ranks train comes before it")
    empty: Any = Net(SyncLayer)
    empty.layers[2].body[1] = nn.SyncBatchNorm(6, affine=False, track_running_stats=False)
    refusal(ValueError, lambda: build(empty), "'layers.2.body.1'", "no plan says who holds it")
    engine = build(Net(SyncLayer))
    refusal(ValueError, lambda: engine.replan({"holders": 1}), "SyncBatchNorm, whose process group")
    build(Net(SyncLayer), stage=2, holders=3)


CHECKS: list[Check] = [
    over_holders,
    trained_as_one_batch,
    with_fsdp2,
    copies_are_over_the_same_ranks,
    refused,
]


def _checks(size: int, config: pytest.Config) -> list[tuple[str, Check]]:
    return [(check.__name__, check) for check in CHECKS]


@pytest.mark.checks(SIZE, _checks, slow=["3-with_fsdp2", "3-copies*", "3-trained*"])
def test_synchronized(outcome: str | None) -> None:
    assert outcome is None, outcome
