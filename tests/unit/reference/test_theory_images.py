"""The masked average on a convolutional network with batch norm: unbiased in the backward regime, and not in the other.

A worker's gradient goes through the statistics of its own batch, as in data parallelism, so what is averaged is each
worker's dense gradient, and the full average is data parallelism's.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

from sdp_deepspeed.architectures import locate_branches, unit_costs, units_of_branches
from sdp_deepspeed.plan.assign import assign
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.reference.theory import Gradients, dense_gradients, deviation, distance, mean, similarity
from sdp_deepspeed.reference.virtual_workers import local_gradients, masked_average

pytestmark = pytest.mark.slow

EPS = 2.0**-24  # unit roundoff of fp32
K = 4
PLACEMENTS = list(itertools.permutations(range(K)))
STAGES = ["resnet.encoder.stages.0", "resnet.encoder.stages.1"]
EACH = pytest.mark.parametrize(("strategy", "p"), list(itertools.product(["block", "neuron"], [1, 2, 3])))


def build() -> nn.Module:
    """Four blocks that an identity bypasses; two layers project, and are cut into neurons only."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"embedding_size": 6, "hidden_sizes": [8, 12], "depths": [3, 3], "num_labels": 5}
    return ResNetForImageClassification(ResNetConfig(**sizes, layer_type="basic")).train()


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    """On 8 images, each of a class of its own mean."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 5, (8,), generator=generator)
    images = torch.randn(8, 3, 16, 16, generator=generator) + labels[:, None, None, None] / 2
    loss: torch.Tensor = model(pixel_values=images, labels=labels).loss
    return loss


def plan_of(model: nn.Module, regime: str, strategy: str, p: int) -> Plan:
    units = units_of_branches(locate_branches(model), strategy=strategy, num_subnetworks=K)
    holders = assign(unit_costs(model, units), [p] * len(units), K)
    return Plan(regime, strategy, K, p, 0, tuple(units), holders, tuple(range(K)))


@functools.cache
def of_every_placement(regime: str, strategy: str, p: int) -> tuple[list[Gradients], list[Gradients], Plan]:
    """The masked average of each placement of four batches on four workers, their dense gradients, and the plan."""
    model = build()
    plan = plan_of(model, regime, strategy, p)
    dense: list[Gradients] = [*dense_gradients(model, plan, [[seed] for seed in range(K)], loss_of)]
    table = [[local_gradients(model, plan, rank, [seed], loss_of)[1] for seed in range(K)] for rank in range(K)]
    averages: list[Gradients] = [
        masked_average(model, plan, [table[rank][seed] for rank, seed in enumerate(placement)])
        for placement in PLACEMENTS
    ]
    return averages, dense, plan


@EACH
def test_the_mean_over_placements_is_the_full_average(strategy: str, p: int) -> None:
    """24 averages of numbers that are each rounded a few times, and are at most a few times as large as the result's
    largest."""
    averages, dense, _ = of_every_placement("backward", strategy, p)
    full = mean(dense)
    for name, value in mean(averages).items():
        torch.testing.assert_close(value, full[name], rtol=0, atol=64 * EPS * float(full[name].abs().max()), msg=name)


@EACH
def test_its_distance_is_what_theory_says(strategy: str, p: int) -> None:
    averages, dense, plan = of_every_placement("backward", strategy, p)
    distances = [distance(plan, average, dense) for average in averages]
    assert np.mean(distances) == pytest.approx((K - p) / (K * (K - 1)) * deviation(plan, dense), rel=1e-5)


@pytest.mark.parametrize("strategy", ["block", "neuron"])
def test_the_forward_regime_is_biased(strategy: str) -> None:
    """What the first test would look like if it failed."""
    averages, dense, _ = of_every_placement("forward", strategy, 2)
    full, found = mean(dense), mean(averages)
    off = [float((found[name] - full[name]).abs().max() / full[name].abs().max()) for name in full]
    assert max(off) > 0.1


@pytest.mark.parametrize("strategy", ["block", "neuron"])
def test_backward_is_nearer_to_the_full_average_in_every_stage(strategy: str) -> None:
    similar = {}
    for regime in ("forward", "backward"):
        averages, dense, _ = of_every_placement(regime, strategy, 2)
        similar[regime] = similarity(averages[0], mean(dense), STAGES)
    assert all(similar["forward"][stage] < similar["backward"][stage] for stage in STAGES)
    shared = [name for name in similar["backward"] if name not in STAGES]
    assert [similar["backward"][name] for name in shared] == pytest.approx([1.0] * len(shared), abs=1e-6)
