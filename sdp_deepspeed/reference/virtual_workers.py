"""The method's definition executed literally: virtual workers one after the other, on a dense model in one process.

The oracle that judges the engine. It is slow and holds everything; nothing but tests and checks uses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import named_tensors
from sdp_deepspeed.units import Unit

_RATES: Mapping[str, Callable[[float], float]] = {
    "none": lambda coverage: 1.0,
    "sqrt": math.sqrt,
    "linear": lambda coverage: coverage,
}
LossFunction = Callable[[nn.Module, Any], torch.Tensor]


@torch.no_grad()
def zero_lacking(model: nn.Module, plan: Plan, subnetwork: int) -> None:
    """Set all pieces of the units that `subnetwork` lacks to zero, in place."""
    tensors = named_tensors(model)
    for index, unit in enumerate(plan.units):
        if not plan.holds(index, subnetwork):
            for piece in unit.pieces:
                piece.narrow(tensors[piece.parameter]).zero_()


def divisors(model: nn.Module, plan: Plan) -> dict[str, torch.Tensor]:
    """Number of holding ranks of each element, shaped like each parameter."""
    num_ranks = len(plan.subnetwork_of_rank)
    counts = {name: torch.full_like(p, float(num_ranks), dtype=torch.float32) for name, p in model.named_parameters()}
    for index, unit in enumerate(plan.units):
        for piece in unit.pieces:
            if piece.kind == "parameter":
                piece.narrow(counts[piece.parameter]).fill_(float(len(plan.ranks_of(index))))
    return counts


def held_mask(model: nn.Module, plan: Plan, subnetwork: int) -> dict[str, torch.Tensor]:
    """Ones where `subnetwork` holds the element or it is shared, zeros elsewhere, shaped like each parameter."""
    masks = {name: torch.ones_like(p, dtype=torch.float32) for name, p in model.named_parameters()}

    def clear(unit: Unit) -> None:
        for piece in unit.pieces:
            if piece.kind == "parameter":
                piece.narrow(masks[piece.parameter]).zero_()

    for index, unit in enumerate(plan.units):
        if not plan.holds(index, subnetwork):
            clear(unit)
    return masks


def rate_factors(model: nn.Module, plan: Plan, rule: str) -> dict[str, torch.Tensor]:
    """What the learning rate of each element is multiplied by, shaped like each parameter."""
    factors = {name: torch.ones_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    for index, unit in enumerate(plan.units):
        coverage = len(plan.holders[index]) / plan.num_subnetworks
        for piece in unit.pieces:
            if piece.kind == "parameter":
                piece.narrow(factors[piece.parameter]).fill_(_RATES[rule](coverage))
    return factors


@torch.no_grad()
def idle_buffers(model: nn.Module, plan: Plan, subnetwork: int) -> dict[str, torch.Tensor]:
    """True where a worker of `subnetwork` does not run the element, shaped like each buffer."""
    idle = {name: torch.zeros_like(buffer, dtype=torch.bool) for name, buffer in model.named_buffers()}
    for index, unit in enumerate(plan.units):
        if plan.regime == "forward" and not plan.holds(index, subnetwork):
            for piece in unit.pieces:
                if piece.kind == "buffer":
                    piece.narrow(idle[piece.parameter]).fill_(True)
    return idle


@torch.no_grad()
def average_statistics(model: nn.Module, plan: Plan, buffers: Sequence[dict[str, torch.Tensor]]) -> None:
    """Each element of a batch norm's running statistics becomes the mean over the ranks that run it, in place."""
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    idle = [idle_buffers(model, plan, subnetwork) for subnetwork in plan.subnetwork_of_rank]
    for name in (f"{norm}.{statistic}" for norm in norms for statistic in ("running_mean", "running_var")):
        if name in idle[0]:
            runs = torch.stack([~of_rank[name] for of_rank in idle])
            values = torch.stack([of_rank[name].double() for of_rank in buffers])
            mean = (values * runs).sum(0) / runs.sum(0)
            for own, of_rank in zip(runs, buffers, strict=True):
                of_rank[name] = torch.where(own, mean.to(of_rank[name].dtype), of_rank[name])


def local_gradients(
    model: nn.Module,
    plan: Plan,
    rank: int,
    micro_batches: Sequence[Any],
    loss_of: LossFunction,
    buffers: dict[str, torch.Tensor] | None = None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and mean fp32 gradients of one virtual worker over its micro-batches; zeros for what it lacks.

    Args:
        buffers: the worker's own, such as running statistics, which go on here; what it lacks stays as it is. None for
            those of `model`, which stay as they are.
    """
    subnetwork = plan.subnetwork_of_rank[rank]
    worker = deepcopy(model)
    with torch.no_grad():
        for name, buffer in worker.named_buffers():
            if buffers is not None:
                buffer.copy_(buffers[name])
    if plan.regime == "forward":
        zero_lacking(worker, plan, subnetwork)
    losses = []
    for batch in micro_batches:
        loss = loss_of(worker, batch)
        losses.append(loss.item())
        (loss / len(micro_batches)).backward()
    if buffers is not None:
        idle = idle_buffers(model, plan, subnetwork)
        for name, buffer in worker.named_buffers():
            buffers[name] = torch.where(idle[name], buffers[name], buffer)
    masks = held_mask(model, plan, subnetwork)
    gradients = {
        name: torch.zeros_like(p, dtype=torch.float32) if p.grad is None else p.grad.float() * masks[name]
        for name, p in worker.named_parameters()
    }
    return losses, gradients


def masked_average(
    model: nn.Module, plan: Plan, gradients: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """g_u = sum over holders of their g_u / |holders(u)|, shared parameters over all ranks."""
    counts = divisors(model, plan)
    return {name: sum(g[name] for g in gradients) / count for name, count in counts.items()}


def norm(average: Mapping[str, torch.Tensor]) -> float:
    """Of the averaged dense gradient: every element once."""
    return float(torch.stack([value.double().square().sum() for value in average.values()]).sum().sqrt())


@dataclass
class Reference:
    """Training of `k` virtual workers in one process.

    Args:
        model: dense, in the weights' dtype; it is trained in place.
        plan: who holds what.
        make_optimizer: from named fp32 parameters to an optimizer, with any param groups.
        loss_of: loss of a model on one micro-batch.
        clip: as `gradient_clipping` in a DeepSpeed config.
        later: plans by the number of steps after which they hold.
        lr_by_coverage: as in the block.
        later_rates: the same, by the number of steps after which it holds.

    Attributes:
        buffers: each rank's own, by dense name, once there was a step; running statistics are averaged in each.
    """

    model: nn.Module
    plan: Plan
    make_optimizer: Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]
    loss_of: LossFunction
    clip: float = 0.0
    later: Mapping[int, Plan] = field(default_factory=dict)
    lr_by_coverage: str = "none"
    later_rates: Mapping[int, str] = field(default_factory=dict)
    num_steps: int = field(default=0, init=False)
    buffers: list[dict[str, torch.Tensor]] = field(default_factory=list, init=False)
    masters: dict[str, nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.masters = {name: nn.Parameter(p.detach().float().clone()) for name, p in self.model.named_parameters()}
        self.optimizer = self.make_optimizer(self.masters)

    def step(self, batches: Sequence[Sequence[Any]]) -> tuple[list[list[float]], float]:
        """One step.

        Args:
            batches: per rank its micro-batches.

        Returns:
            Per rank its losses, and the norm of the averaged dense gradient before clipping.
        """
        self.plan = self.later.get(self.num_steps, self.plan)
        self.lr_by_coverage = self.later_rates.get(self.num_steps, self.lr_by_coverage)
        self.num_steps += 1
        losses, average = self.averaged_gradients(batches)
        total = norm(average)
        factor = max(1.0, (total + 1e-6) / self.clip) if self.clip > 0 else 1.0
        for name, master in self.masters.items():
            master.grad = average[name] / factor
        self._step_by_coverage()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.masters[name])
        return losses, total

    def averaged_gradients(self, batches: Sequence[Sequence[Any]]) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
        """Per rank its losses, and the average of each element over its holders, as the current plan has them."""
        if not self.buffers:
            self.buffers = [{name: b.clone() for name, b in self.model.named_buffers()} for _ in batches]
        results = [
            local_gradients(self.model, self.plan, rank, own, self.loss_of, self.buffers[rank])
            for rank, own in enumerate(batches)
        ]
        average_statistics(self.model, self.plan, self.buffers)
        average = masked_average(self.model, self.plan, [gradients for _, gradients in results])
        return [losses for losses, _ in results], average

    def _step_by_coverage(self) -> None:
        """Step the whole model once for each factor of the learning rate; each element is as that of its own leaves
        it. What an optimizer keeps does not depend on the rate, so it goes on from the step at factor 1."""
        if self.lr_by_coverage == "none":
            self.optimizer.step()
            return
        factors = rate_factors(self.model, self.plan, self.lr_by_coverage)
        distinct = {float(factor) for of_tensor in factors.values() for factor in of_tensor.unique()} - {1.0}
        others = {factor: self._stepped(factor) for factor in distinct}
        self.optimizer.step()
        with torch.no_grad():
            for factor, masters in others.items():
                for name, master in self.masters.items():
                    master.copy_(torch.where(factors[name] == factor, masters[name], master))

    def _stepped(self, factor: float) -> dict[str, nn.Parameter]:
        """Masters after a step of a copy of them, and of the optimizer, at `factor` times the learning rate."""
        masters, optimizer = deepcopy((self.masters, self.optimizer))
        for name, master in masters.items():
            master.grad = self.masters[name].grad
        for group in optimizer.param_groups:
            group["lr"] *= factor
        optimizer.step()
        return masters
