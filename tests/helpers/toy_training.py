"""Trainings of random layouts on threads: gradients are made up, the optimizer and its exchange are the real ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pytest
import torch
from sdp_deepspeed.optimizer.optimizer import SubnetworkOptimizer
from tests.helpers.stream_order import MoreStreams, pretended_gpu
from torch import nn

from sdp_deepspeed.config import LearningRateRule
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.exchange.exchange import Steps
from sdp_deepspeed.layout.buckets import Bucket
from sdp_deepspeed.optimizer.settings import OptimizerSettings
from tests.helpers.mailbox import Mailbox, run_mail
from tests.helpers.random_layouts import Layout, placed, random_layout
from tests.helpers.rank_models import optimizer_of

Tensors = dict[str, torch.Tensor]

# bf16 has 8 significant bits. Weights are rounded to them once, at stage 0 the averages of each step before it too:
# two micro-batches of at most two gradients of at most 8 are at most 32.
BF16_WEIGHT, BF16_AVERAGE = 2**-8, 32 * 2**-8


@dataclass(frozen=True)
class Toy:
    """A few steps of plain SGD (rate 1) on one layout.

    Args:
        layout: its `max_elements` bounds the exchange of gradients.
        returning: bounds the exchange of weights.
        overlap: buckets that may be on their way while others are packed.
        missing: chance of a parameter to get no gradient from one rank's micro-batch.
        twice: chance of a gradient to come in two parts, as in two checkpointed segments that use one parameter.
        failing: chance of a rank's backward pass to end with an error, after some of its gradients.
        num_streams: of a GPU, on which gradients are computed; 0 is that of the caller alone.
        checks_order: streams are pretended, and checked (`stream_order.py`).
        lr_by_coverage: as in the block.
        seed: of gradients, of which are missing, and of the order in which they arrive.
    """

    layout: Layout
    stage: int = 2
    returning: int = 10_000
    overlap: int = 0
    num_micro: int = 2
    num_steps: int = 2
    clip: float = 0.0
    missing: float = 0.2
    twice: float = 0.0
    failing: float = 0.0
    num_streams: int = 0
    checks_order: bool = False
    lr_by_coverage: LearningRateRule = "none"
    seed: int = 0

    def gradients(self, rank: int, step: int, micro: int) -> list[tuple[str, torch.Tensor]]:
        """Whole numbers, of which sums of some are exact in bf16, in the order in which they arrive."""
        arrivals = self._arrivals(rank, step, micro)
        return arrivals[: len(arrivals) // 2] if self.fails(rank, step, micro) else arrivals

    def fails(self, rank: int, step: int, micro: int) -> bool:
        """Whether this backward pass ends with an error."""
        return random.Random(f"{self.seed} {rank} {step} {micro} fails").random() < self.failing

    def _arrivals(self, rank: int, step: int, micro: int) -> list[tuple[str, torch.Tensor]]:
        chance = random.Random(f"{self.seed} {rank} {step} {micro}")
        generator = torch.Generator().manual_seed(chance.randrange(2**31))
        arrivals = []
        for info in self.layout.tensors:
            parts = 0 if chance.random() < self.missing else 2 if chance.random() < self.twice else 1
            for _ in range(parts):
                arrivals.append((info.name, torch.randint(-8, 9, info.shape, generator=generator).to(info.dtype)))
        chance.shuffle(arrivals)
        return arrivals

    def weights(self) -> Tensors:
        generator = torch.Generator().manual_seed(self.seed)
        return {i.name: torch.randint(-8, 9, i.shape, generator=generator).to(i.dtype) for i in self.layout.tensors}

    def holds(self, rank: int) -> dict[str, torch.Tensor]:
        """By name, which elements `rank` holds."""
        return self._held[rank]

    @cached_property
    def _held(self) -> list[dict[str, torch.Tensor]]:
        return [self._held_by(rank) for rank in range(self.layout.size)]

    def _held_by(self, rank: int) -> dict[str, torch.Tensor]:
        masks = {info.name: torch.ones(info.shape, dtype=torch.bool) for info in self.layout.tensors}
        for index, unit in enumerate(self.layout.plan.units):
            for piece in unit.pieces:
                piece.narrow(masks[piece.parameter]).fill_(self.layout.plan.holds_rank(index, rank))
        return masks

    @property
    def settings(self) -> OptimizerSettings:
        return OptimizerSettings(
            stage=self.stage,
            clip=self.clip,
            bucket_elements=self.layout.max_elements,
            return_bucket_elements=self.returning,
            wire_dtype=torch.float32,
            max_in_flight=self.overlap,
            lr_by_coverage=self.lr_by_coverage,
        )


def toy_of(
    seed: int, size: int, regime: str = "forward", limit: int = 40, nodes: str = "one", **options: object
) -> Toy:
    layout = placed(replace(random_layout(seed, size, regime), max_elements=limit), nodes)
    return Toy(layout, seed=seed, **options)  # type: ignore[arg-type]


@dataclass
class Trained:
    """What one rank has in the end.

    Args:
        order: in which its buckets of gradients left, each with the names that had arrived by then in this micro-step.
        amounts: of each collective, by what travels ("gradients", "averages" or "weights"): bucket, elements sent and
            received.
        buckets: of gradients, and of weights.
        held: by bucket of gradients, names of what this rank trains in it.
        most_live: collectives that ran at once.
    """

    weights: Tensors
    buckets: tuple[tuple[Bucket, ...], tuple[Bucket, ...]]
    held: list[set[str]]
    norms: list[float] = field(default_factory=list)
    order: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    amounts: dict[str, list[tuple[Bucket, int, int]]] = field(default_factory=dict)
    most_live: int = 0


def run_toy(
    toy: Toy, device: torch.device | None = None, observe: Callable[[SubnetworkOptimizer], None] | None = None
) -> list[Trained]:
    """Train on all ranks.

    Args:
        observe: gets each rank's optimizer before the first step.
    """
    with pretended_gpu() if toy.checks_order else nullcontext():
        return run_mail(
            toy.layout.size,
            lambda group, box: _train(toy, group, box, observe),
            device=device,
            checks_order=toy.checks_order,
        )


def _train(
    toy: Toy, group: Communicator, box: Mailbox, observe: Callable[[SubnetworkOptimizer], None] | None
) -> Trained:
    masks = toy.holds(group.rank)
    parameters = {
        name: nn.Parameter(value.to(box.device), requires_grad=bool(masks[name].any()))
        for name, value in toy.weights().items()
    }
    groups: list[dict[str, Any]] = [{"params": []}, {"params": []}]
    for info in toy.layout.tensors:
        groups[info.group]["params"].append(parameters[info.name])
    optimizer = optimizer_of(
        torch.optim.SGD([group for group in groups if group["params"]], lr=1.0),
        parameters=parameters,
        tensors=toy.layout.tensors,
        plan=toy.layout.plan,
        dp_group=group,
        settings=toy.settings,
        nodes=toy.layout.nodes,
    )
    if observe is not None:
        observe(optimizer)
    exchange, returning = optimizer.exchange, optimizer.weight_exchange
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    held = [exchange.held_names(bucket) & trained for bucket in exchange.buckets]
    result = Trained(parameters_of(parameters), (exchange.buckets, returning.buckets), held)
    arrived: list[str] = []
    _watch(optimizer, result, box, arrived)
    streams = MoreStreams(toy.num_streams, box.device)
    for step in range(toy.num_steps):
        for micro in range(toy.num_micro):
            arrived.clear()
            optimizer.begin_backward()
            for name, gradient in toy.gradients(group.rank, step, micro):
                arrived.append(name)
                if parameters[name].requires_grad:
                    with streams.of(name):
                        (parameters[name] * gradient.to(box.device)).sum().backward()
            streams.join()
            if toy.fails(group.rank, step, micro):
                optimizer._averaging.fail_backward()
            else:
                optimizer.end_backward()
        optimizer.step()
        assert optimizer._global_grad_norm is not None
        result.norms.append(optimizer._global_grad_norm)
    assert not exchange.buffers._lent, "buffers that nobody gave back"
    result.weights, result.most_live = parameters_of(parameters), box.most_live
    return result


def parameters_of(parameters: dict[str, nn.Parameter]) -> Tensors:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def _watch(optimizer: Any, result: Trained, box: Mailbox, arrived: list[str]) -> None:
    """Write down what leaves."""

    def watch(exchange: Any, method: str) -> None:
        start = getattr(exchange, method)

        def watched(bucket: Bucket, tensors: Any, *arguments: Any, **options: Any) -> Steps:
            what = "weights" if tensors is optimizer.model.views else "averages"
            if method == "reduce":
                what = "gradients"
                result.order.append((bucket.index, tuple(arrived)))
            steps = start(bucket, tensors, *arguments, **options)
            while next(steps, steps) is None:
                result.amounts.setdefault(what, []).append((bucket, *box.amounts[-1]))
                yield

        setattr(exchange, method, watched)

    watch(optimizer.exchange, "reduce")
    for exchange in {optimizer.exchange, optimizer.weight_exchange}:
        watch(exchange, "distribute")


@dataclass(frozen=True)
class Expected:
    """What all ranks should have, computed by hand on the dense tensors."""

    weights: Tensors
    norms: list[float]


def by_hand(toy: Toy) -> Expected:
    """Mean over holders of the sum over micro-batches, clipped by the norm of the dense average, subtracted once."""
    masters = {name: value.double() for name, value in toy.weights().items()}
    rates = _rates(toy)
    norms = []
    for step in range(toy.num_steps):
        averages = _averages(toy, step)
        norms.append(float(torch.stack([value.square().sum() for value in averages.values()]).sum().sqrt()))
        factor = max(1.0, (norms[-1] + 1e-6) / toy.clip) if toy.clip else 1.0
        for name, value in averages.items():
            masters[name] -= rates[name] * value / factor
    return Expected({info.name: masters[info.name].to(info.dtype) for info in toy.layout.tensors}, norms)


def _rates(toy: Toy) -> Tensors:
    """Of each element: every rank is a subnetwork of its own, and shared ones are held by all."""
    held = {name: sum(toy.holds(rank)[name] for rank in range(toy.layout.size)) for name in toy.holds(0)}
    power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[toy.lr_by_coverage]
    return {name: torch.as_tensor(count).double().div(toy.layout.size).pow(power) for name, count in held.items()}


def _averages(toy: Toy, step: int) -> Tensors:
    ranks = range(toy.layout.size)
    sums = [{info.name: torch.zeros(info.shape, dtype=torch.float64) for info in toy.layout.tensors} for _ in ranks]
    counts = {info.name: torch.zeros(info.shape) for info in toy.layout.tensors}
    for rank in ranks:
        for name, mask in toy.holds(rank).items():
            counts[name] += mask
        for micro in range(toy.num_micro):
            for name, gradient in toy.gradients(rank, step, micro):
                sums[rank][name] += gradient * toy.holds(rank)[name]
    return {name: torch.stack([own[name] for own in sums]).sum(0) / counts[name] for name in counts}


def compare(toy: Toy, found: list[Trained], expected: Expected) -> None:
    """Norms, and weights: in the forward regime those that a rank holds, and all others as they were."""
    before, everything = toy.weights(), toy.layout.plan.regime == "backward"
    for rank, trained in enumerate(found):
        assert trained.norms == pytest.approx(expected.norms, rel=1e-5)
        for name, mask in toy.holds(rank).items():
            value, wanted = trained.weights[name].cpu(), expected.weights[name]
            is_new = torch.ones_like(mask) if everything else mask
            assert torch.equal(value[~is_new], before[name][~is_new]), (rank, name)
            difference = (value.double() - wanted.double()).abs()
            allowed = torch.full_like(difference, 1e-5)  # sums of a few whole numbers, divided by 3 here and there
            if value.dtype == torch.bfloat16:
                allowed += 2 * BF16_WEIGHT * wanted.double().abs() + toy.num_steps * BF16_AVERAGE * (toy.stage == 0)
            assert bool((difference <= allowed)[is_new].all()), (rank, name, difference.max())
