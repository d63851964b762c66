"""Reference implementation: virtual workers run one after the other, on a dense model in one process.

It follows the definition of the method literally, and tests compare both hosts with it. Slow; holds the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.masking.proof import proven_branches
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.units import Piece

LossFunction = Callable[[nn.Module, Any], torch.Tensor]


def pieces_with_holders(plan: Plan, kind: str) -> Iterator[tuple[Piece, tuple[int, ...]]]:
    """Yield each piece of each unit with the subnetworks that hold it.

    Args:
        kind: "parameter" or "buffer".
    """
    for unit, holders in zip(plan.units, plan.holders, strict=True):
        for piece in unit.pieces:
            if piece.kind == kind:
                yield piece, holders


@torch.no_grad()
def zero_absent(model: nn.Module, plan: Plan, subnetwork: int) -> None:
    """Zero all pieces of units that `subnetwork` lacks, in place."""
    for kind, tensors in (("parameter", dict(model.named_parameters())), ("buffer", dict(model.named_buffers()))):
        for piece, holders in pieces_with_holders(plan, kind):
            if subnetwork not in holders:
                piece.narrow(tensors[piece.parameter]).zero_()


def divisors(model: nn.Module, plan: Plan, ranks: Sequence[int] = ()) -> dict[str, torch.Tensor]:
    """Number of `ranks` that hold each element, at least 1, in the shape of each parameter; empty for all ranks."""
    masks = [held_mask(model, plan, plan.subnetwork_of_rank[rank]) for rank in ranks or plan.all_ranks]
    return {name: torch.stack([mask[name] for mask in masks]).sum(0).clamp(min=1) for name in masks[0]}


def held_mask(model: nn.Module, plan: Plan, subnetwork: int) -> dict[str, torch.Tensor]:
    """0/1 mask of elements that `subnetwork` holds, in the shape of each parameter."""
    masks = {name: torch.ones_like(p, dtype=torch.float32) for name, p in model.named_parameters()}
    for piece, holders in pieces_with_holders(plan, "parameter"):
        if subnetwork not in holders:
            piece.narrow(masks[piece.parameter]).zero_()
    return masks


@torch.no_grad()
def idle_buffers(model: nn.Module, plan: Plan, subnetwork: int) -> dict[str, torch.Tensor]:
    """Mask of elements that workers of `subnetwork` do not run, in the shape of each buffer."""
    idle = {name: torch.zeros_like(buffer, dtype=torch.bool) for name, buffer in model.named_buffers()}
    for piece, holders in pieces_with_holders(plan, "buffer"):
        if plan.regime == "forward" and subnetwork not in holders:
            piece.narrow(idle[piece.parameter]).fill_(True)
    return idle


@torch.no_grad()
def average_statistics(
    model: nn.Module, plan: Plan, buffers: Sequence[dict[str, torch.Tensor]], ranks: Sequence[int]
) -> None:
    """Average running statistics of batch norms over those of `ranks` that run them, in place.

    Args:
        buffers: of each of `ranks`.
    """
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    idle = [idle_buffers(model, plan, plan.subnetwork_of_rank[rank]) for rank in ranks]
    for name in (f"{norm}.{statistic}" for norm in norms for statistic in ("running_mean", "running_var")):
        if name in idle[0]:
            runs = torch.stack([~of_rank[name] for of_rank in idle])
            values = torch.stack([of_rank[name].double() for of_rank in buffers])
            mean = (values * runs).sum(0) / runs.sum(0).clamp(min=1)
            for own, of_rank in zip(runs, buffers, strict=True):
                of_rank[name] = torch.where(own, mean.to(of_rank[name].dtype), of_rank[name])


def dense_buffers(model: nn.Module, plan: Plan, buffers: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Buffers of the dense model: each element from a rank that runs it.

    Args:
        buffers: of each rank.
    """
    found = dict(buffers[0])
    for subnetwork, of_rank in zip(plan.subnetwork_of_rank, buffers, strict=True):
        for name, idle in idle_buffers(model, plan, subnetwork).items():
            found[name] = torch.where(idle, found[name], of_rank[name])
    return found


@torch.no_grad()
def scale_branches(
    worker: nn.Module, plan: Plan, subnetwork: int, branches: Sequence[LocatedBranch]
) -> list[tuple[Piece, float]]:
    """Multiply what each unit of `subnetwork` adds to the residual stream by 1 / C, in a copy of the model.

    The end of a block gets a hook. Of neurons, heads and channels the weights of the output projection are multiplied,
    in place.

    Args:
        branches: of the model.

    Returns:
        The multiplied pieces and their factors, which the chain rule applies to their gradients, too.
    """
    weights = {tensor.parameter: tensor.dim for b in branches for tensor in b.cut_tensors if tensor.cut.is_output}
    multiplied = []
    for index, unit in enumerate(plan.units):
        factor = 1 / plan.coverage_of(index)
        if subnetwork not in plan.holders[index] or factor == 1:
            continue
        whole = {piece.parameter for piece in unit.pieces if piece.dim is None}
        for branch in branches:
            if branch.pieces and whole.issuperset(piece.parameter for piece in branch.pieces):
                added_to = branch.description.added_to
                multiply = partial(_multiply, factor, added_to)
                worker.get_submodule(branch.modules[-1]).register_forward_hook(multiply, with_kwargs=True)
        for piece in unit.pieces:
            if piece.dim is not None and piece.parameter in weights:
                piece.narrow(worker.get_parameter(piece.parameter)).mul_(factor)
                multiplied.append((piece, factor))
    return multiplied


def _multiply(factor: float, added_to: int | str | None, _: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (_multiply(factor, added_to, _, args, kwargs, output[0]), *output[1:])
    if added_to is None:
        return output * factor
    stream = kwargs[added_to] if isinstance(added_to, str) else args[added_to]
    return stream + (output - stream) * factor


def local_gradients(
    model: nn.Module,
    plan: Plan,
    rank: int,
    micro_batches: Sequence[Any],
    loss_of: LossFunction,
    buffers: dict[str, torch.Tensor] | None = None,
    *,
    sum_in_fp32: bool = False,
    loss_scale: float = 1.0,
    is_scaled: bool = True,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and mean fp32 gradients of one virtual worker over its micro-batches; zeros for pieces that it lacks.

    Args:
        buffers: the worker's buffers, such as running statistics, which are updated. None: those of `model`, which are
            not changed.
        sum_in_fp32: whether to accumulate gradients in fp32, not in the weights' dtype.
        loss_scale: factor of each loss in backward; gradients are divided by it.
        is_scaled: whether `branch_scale` is "training".
    """
    subnetwork = plan.subnetwork_of_rank[rank]
    worker = deepcopy(model)
    with torch.no_grad():
        for name, buffer in worker.named_buffers():
            if buffers is not None:
                buffer.copy_(buffers[name])
    if plan.regime == "forward":
        zero_absent(worker, plan, subnetwork)
    multiplied: list[tuple[Piece, float]] = []
    if plan.regime == "forward" and is_scaled:
        multiplied = scale_branches(worker, plan, subnetwork, proven_branches(model, plan.strategy))
    losses = []
    sums: dict[str, torch.Tensor] = {}
    for batch in micro_batches:
        loss = loss_of(worker, batch)
        losses.append(loss.item())
        (loss * loss_scale / len(micro_batches)).backward()
        for name, p in worker.named_parameters() if sum_in_fp32 else ():
            if p.grad is not None:
                sums[name] = sums.get(name, 0) + p.grad.float()
                p.grad = None
    if buffers is not None:
        idle = idle_buffers(model, plan, subnetwork)
        for name, buffer in worker.named_buffers():
            buffers[name] = torch.where(idle[name], buffers[name], buffer)
    masks = held_mask(model, plan, subnetwork)
    for piece, factor in multiplied:
        piece.narrow(masks[piece.parameter]).mul_(factor)
    if not sum_in_fp32:
        sums = {name: p.grad.float() for name, p in worker.named_parameters() if p.grad is not None}
    gradients = {
        name: sums[name] / loss_scale * mask if name in sums else torch.zeros_like(mask) for name, mask in masks.items()
    }
    return losses, gradients


def masked_average(
    model: nn.Module, plan: Plan, gradients: Sequence[Mapping[str, torch.Tensor]], ranks: Sequence[int] = ()
) -> dict[str, torch.Tensor]:
    """Average over those of `ranks` that hold an element; over all of them for shared parameters.

    Args:
        gradients: of each of `ranks`.
        ranks: empty for all.
    """
    counts = divisors(model, plan, ranks)
    return {name: sum(g[name] for g in gradients) / count for name, count in counts.items()}


def norm(average: Mapping[str, torch.Tensor]) -> float:
    """Norm of the averaged dense gradient, with every element counted once."""
    return float(torch.stack([value.double().square().sum() for value in average.values()]).sum().sqrt())


@dataclass
class LossScale:
    """Dynamic loss scale of fp16, as in DeepSpeed's ZeRO optimizers with a `hysteresis` of 1.

    Args:
        value: 2 ** `initial_scale_power`.
        window: number of steps without overflow after which it doubles; the first after an overflow does not count.
    """

    value: float
    window: int
    num_steps: int = field(default=0, init=False)
    last_overflow: int = field(default=-1, init=False)

    def update(self, overflow: bool) -> None:
        """Update after each step, including skipped ones."""
        if overflow:
            self.last_overflow = self.num_steps
            self.value /= 2
        elif (good := self.num_steps - self.last_overflow - 1) > 0 and good % self.window == 0:
            self.value *= 2
        self.num_steps += 1


@dataclass
class Reference:
    """Trains virtual workers in one process.

    Args:
        model: dense, in the weights' dtype; trained in place.
        plan: which subnetwork holds which unit.
        make_optimizer: creates an optimizer, with any param groups, from named fp32 parameters.
        loss_of: loss of a model on a micro-batch.
        clip: `gradient_clipping` of a DeepSpeed config.
        later: later plans, by the number of steps after which they apply.
        sum_in_fp32: whether `data_types.grad_accum_dtype` is "fp32".
        loss_scale: loss scale of fp16; steps with non-finite gradients are skipped.
        make_scheduler: creates an LR scheduler from the optimizer; it is stepped after each step that is not skipped.
        is_scaled: whether `branch_scale` is "training".
        ranks: who trains here and is averaged over, such as a team; empty for all.

    Attributes:
        buffers: buffers of each of `ranks` by dense name, after the first step, with averaged running statistics.
    """

    model: nn.Module
    plan: Plan
    make_optimizer: Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]
    loss_of: LossFunction
    clip: float = 0.0
    later: Mapping[int, Plan] = field(default_factory=dict)
    sum_in_fp32: bool = False
    loss_scale: LossScale | None = None
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    is_scaled: bool = True
    ranks: Sequence[int] = ()
    num_steps: int = field(default=0, init=False)
    buffers: list[dict[str, torch.Tensor]] = field(default_factory=list, init=False)
    weights: dict[str, nn.Parameter] = field(init=False, repr=False)
    masters: dict[str, nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = self.ranks or self.plan.all_ranks
        self.weights = dict(self.model.named_parameters())
        self.masters = {name: nn.Parameter(p.detach().float().clone()) for name, p in self.weights.items()}
        self.optimizer = self.make_optimizer(self.masters)
        self.scheduler = self.make_scheduler(self.optimizer) if self.make_scheduler else None

    def step(self, batches: Sequence[Sequence[Any]]) -> tuple[list[list[float]], float]:
        """Run one step.

        Args:
            batches: micro-batches of each of `ranks`.

        Returns:
            Losses of each of them, and the norm of the averaged dense gradient before clipping; infinity if it is not
            finite and the step was skipped.
        """
        self.plan = self.later.get(self.num_steps, self.plan)
        self.num_steps += 1
        losses, average = self.averaged_gradients(batches)
        total = norm(average)
        if self.loss_scale is not None:
            self.loss_scale.update(not math.isfinite(total))
            if not math.isfinite(total):
                return losses, math.inf
        factor = max(1.0, (total + 1e-6) / self.clip) if self.clip > 0 else 1.0
        for name, master in self.masters.items():
            master.grad = average[name] / factor
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.refresh_weights()
        return losses, total

    @torch.no_grad()
    def refresh_weights(self) -> None:
        """Cast the fp32 masters to the model's weights."""
        for name, parameter in self.weights.items():
            parameter.copy_(self.masters[name])

    def averaged_gradients(self, batches: Sequence[Sequence[Any]]) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
        """Losses of each rank, and the gradient averaged over holders, under the current plan."""
        if not self.buffers:
            self.buffers = [{name: b.clone() for name, b in self.model.named_buffers()} for _ in batches]
        results = [
            local_gradients(
                self.model,
                self.plan,
                rank,
                micro_batches,
                self.loss_of,
                buffers,
                sum_in_fp32=self.sum_in_fp32,
                loss_scale=self.loss_scale.value if self.loss_scale else 1.0,
                is_scaled=self.is_scaled,
            )
            for rank, micro_batches, buffers in zip(self.ranks, batches, self.buffers, strict=True)
        ]
        average_statistics(self.model, self.plan, self.buffers, self.ranks)
        average = masked_average(self.model, self.plan, [gradients for _, gradients in results], self.ranks)
        return [losses for losses, _ in results], average

    def dense_buffers(self) -> dict[str, torch.Tensor]:
        """Buffers of the dense model."""
        return dense_buffers(self.model, self.plan, self.buffers)
