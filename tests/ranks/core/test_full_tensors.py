"""Single dense parameters across ranks: fp32 weights, gradients, state; read, written, and what the next step makes of
them, next to `torch.optim` in one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sdp_deepspeed.core.parallel.full_tensors import read_full, write_full
from sdp_deepspeed.core.parallel.groups import Groups
from sdp_deepspeed.core.parallel.optimizer import ShardedOptimizer
from tests.helpers.ranks import Rank
from tests.helpers.sliced_models import Reference, SlicedMask, param_groups, sliced_model

pytestmark = pytest.mark.slow  # the engine's own tests come by the same way

NAMES = ("embed", "layer1.up", "layer1.down", "layer2.bias", "scale")


def adam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, lr=0.01, eps=1e-2)


def reads_and_writes(rank: Rank) -> None:
    for strategy, regime, stage, offload, overlap in itertools.product(
        ("block", "neuron"), ("forward", "backward"), (0, 1, 2), (False, True), (False, True)
    ):
        if offload == overlap and stage == 1:
            continue
        model = sliced_model(rank.size, strategy)  # type: ignore[arg-type]
        groups = Groups(model.holder_sets)
        mask = SlicedMask(model, rank.rank, regime, torch.float32)  # type: ignore[arg-type]
        options: dict[str, Any] = {"regime": regime, "stage": stage, "offload": offload, "overlap": overlap}
        client = adam(param_groups(model, mask.parameters))
        optimizer = ShardedOptimizer(client, mask, groups, model.groups, bucket_size=40, **options)
        reference = Reference(model, rank.size, adam, torch.float32, 0.0)
        with pytest.raises(ValueError, match="before the first step"):
            read_full(optimizer, "embed", "state", "exp_avg")

        def backward(step: int, optimizer: ShardedOptimizer = optimizer, mask: SlicedMask = mask) -> None:
            for micro_step in range(2):
                optimizer.is_last_micro_step = micro_step == 1
                mask.loss(micro_step, step).backward()
                optimizer.finish_backward()

        def compare(optimizer: ShardedOptimizer = optimizer, reference: Reference = reference) -> None:
            for name in NAMES:
                master = reference.masters[name]
                torch.testing.assert_close(read_full(optimizer, name), master.detach())
                for key in ("exp_avg", "exp_avg_sq"):
                    state = reference.optimizer.state[master][key]
                    torch.testing.assert_close(read_full(optimizer, name, "state", key), state)

        backward(0)
        gradients = {name: read_full(optimizer, name, "gradient") for name in NAMES}
        assert optimizer.step()
        reference.step(2, 0)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, reference.masters[name].grad)
        compare()
        generator = torch.Generator().manual_seed(0)
        for name in NAMES:
            value, moment = (torch.rand(model.shapes[name], generator=generator) for _ in range(2))
            write_full(optimizer, name, value)
            write_full(optimizer, name, moment, "state", "exp_avg")
            assert torch.equal(read_full(optimizer, name), value)
            with torch.no_grad():
                reference.masters[name].copy_(value)
                reference.optimizer.state[reference.masters[name]]["exp_avg"].copy_(moment)
        backward(1)
        assert optimizer.step()
        reference.step(2, 1)
        compare()
        backward(2)
        for name in NAMES:  # a gradient of zero moves as its moments say
            write_full(optimizer, name, torch.zeros(model.shapes[name]), "gradient")
        before = {name: reference.masters[name].detach().clone() for name in NAMES}
        moments = {name: dict(reference.optimizer.state[reference.masters[name]]) for name in NAMES}
        assert optimizer.step()
        for name in NAMES:
            m, v = 0.9 * moments[name]["exp_avg"], 0.999 * moments[name]["exp_avg_sq"]
            lr = client.param_groups[model.groups[name]]["lr"]
            decay = client.param_groups[model.groups[name]]["weight_decay"]
            assert decay == 0.0
            moved = lr * m / (1 - 0.9**3) / ((v / (1 - 0.999**3)).sqrt() + 1e-2)
            torch.testing.assert_close(read_full(optimizer, name), before[name] - moved)
        optimizer.close()
        groups.close()


def what_cannot_be_answered(rank: Rank) -> None:
    model = sliced_model(rank.size, "block")
    groups = Groups(model.holder_sets)
    mask = SlicedMask(model, rank.rank, "forward", torch.float32)
    client = adam(param_groups(model, mask.parameters))
    optimizer = ShardedOptimizer(client, mask, groups, model.groups, regime="forward", stage=1)
    with pytest.raises(ValueError, match=r"'layer0.up' has shape \(4, 3\), the value \(3,\)"):
        write_full(optimizer, "layer0.up", torch.zeros(3))
    optimizer.is_last_micro_step = False
    mask.loss(0).backward()
    optimizer.finish_backward()
    with pytest.raises(RuntimeError, match="after the last micro-step"):
        read_full(optimizer, "layer0.up", "gradient")
    optimizer.is_last_micro_step = True
    mask.loss(1).backward()
    optimizer.finish_backward()
    optimizer.step()
    with pytest.raises(ValueError, match="'momentum' for single elements: it has exp_avg, exp_avg_sq"):
        read_full(optimizer, "layer0.up", "state", "momentum")
    groups.close()


def _checks(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    yield "reads_and_writes", reads_and_writes
    if size == 2:
        yield "what_cannot_be_answered", what_cannot_be_answered


@pytest.mark.checks((2, 3), _checks)
def test_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome
