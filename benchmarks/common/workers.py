"""Virtual workers in one process, each with a model of its own under the product's mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from sdp_deepspeed.config import KEY, SubnetworkConfig, parse
from sdp_deepspeed.config.schedule import Schedule
from sdp_deepspeed.estimate.forecast import forecast, model_of
from sdp_deepspeed.masking import Mask
from sdp_deepspeed.masking.proof import proven_branches
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.planner import plan_model
from sdp_deepspeed.units import Piece

Batch = tuple[torch.Tensor, torch.Tensor]  # pixels, labels


def loss_of_images(model: nn.Module, batch: Batch) -> torch.Tensor:
    pixels, labels = batch
    return cross_entropy(model(pixel_values=pixels).logits, labels)


class Workers:
    """Compute the averaged gradients of a dense model.

    Args:
        model: dense; `backward` sets its parameters' `grad`.
        plan: who holds what at first.
        loss_of: mean loss of a model on the batch of a worker.
        is_scaled: whether `branch_scale` is "training".
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        loss_of: Callable[[nn.Module, Any], torch.Tensor] = loss_of_images,
        *,
        is_scaled: bool = True,
    ) -> None:
        self.model, self.loss_of, self.is_scaled = model, loss_of, is_scaled
        self.copies = [deepcopy(model) for _ in plan.subnetwork_of_rank]
        self.branches = proven_branches(model, "neuron")
        self.masks: list[Mask] = []
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.replan(plan)

    def replan(self, plan: Plan) -> None:
        """Change the plan between two steps."""
        for mask in self.masks:
            mask.undo()
        self.plan = plan
        self.masks = [
            Mask(copy, plan, rank, self.branches, is_scaled=self.is_scaled) for rank, copy in enumerate(self.copies)
        ]
        self._weights: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []  # of each worker, and of the model
        self._trained: list[dict[Piece, torch.Tensor]] = []  # by worker: dense gradients
        dense = dict(self.model.named_parameters())
        gradients = {name: parameter.grad for name, parameter in dense.items() if parameter.grad is not None}
        for mask in self.masks:
            mask.apply()
            stored = [piece for piece, _ in _pieces(mask) if mask.is_stored(piece)]
            views = [piece.narrow(dense[piece.parameter].detach()) for piece in stored]
            self._weights.append(([mask.view(piece) for piece in stored], views))
            trained = [piece for piece in stored if mask.is_trained(piece)]
            self._trained.append({piece: piece.narrow(gradients[piece.parameter]) for piece in trained})
        self._averaged = [piece.narrow(gradients[piece.parameter]) for piece, _ in _pieces(self.masks[0])]
        self._num_holders = [float(len(holders)) for _, holders in _pieces(self.masks[0])]

    def backward(self, batches: Sequence[Any]) -> list[float]:
        """Set the dense gradients to the means over holders.

        Args:
            batches: of each worker.

        Returns:
            The loss of each worker.
        """
        torch._foreach_zero_(self._averaged)
        losses = []
        for worker, (mask, batch) in enumerate(zip(self.masks, batches, strict=True)):
            losses.append(self._run(worker, batch))
            sums, terms = [], []
            for piece, average in self._trained[worker].items():
                gradient = mask.parameters[piece.parameter].grad
                if gradient is not None:  # a branch that stochastic depth left out has none
                    sums.append(average)
                    terms.append(mask.view(piece, gradient))
            torch._foreach_add_(sums, terms)
            for parameter in mask.parameters.values():
                parameter.grad = None
        torch._foreach_div_(self._averaged, self._num_holders)
        return losses

    def _run(self, worker: int, batch: Any) -> float:
        """Forward and backward pass of a worker, with the dense model's weights."""
        views, dense = self._weights[worker]
        torch._foreach_copy_(views, dense)
        loss = self.loss_of(self.copies[worker], batch)
        loss.backward()
        return loss.item()

    def flops_per_image(self, batch: Batch) -> float:
        """Of a forward and a backward pass, mean over the workers; convolutions and matrix products."""
        total = 0.0
        for worker, mask in enumerate(self.masks):
            with FlopCounterMode(display=False) as counter:
                self._run(worker, batch)
            total += counter.get_total_flops() / len(batch[1])
            for parameter in mask.parameters.values():
                parameter.grad = None
        return total / len(self.masks)


def plans_of_steps(
    model: nn.Module, block: Mapping[str, Any], num_workers: int
) -> Iterator[tuple[SubnetworkConfig, Plan]]:
    """What each step of a run has, as in the engine; the same objects where nothing changes.

    Args:
        block: `subnetwork_data_parallel`, with the `total_steps` of a schedule.
    """
    schedule, known, current = Schedule.of({KEY: block}), None, None
    for step in count():
        place = (schedule.phase_after(step), schedule.draw_after(step)) if schedule else None
        if current is None or place != known:
            config = parse(schedule.config_after(step) if schedule else {KEY: block})
            assert config is not None
            current, known = (config, plan_model(model, config, num_workers)[0]), place
        yield current


def costs_of_step(
    shape: Mapping[str, Any],
    block: Mapping[str, Any],
    rows: int,
    num_workers: int,
    optimizer: Mapping[str, Any],
    length: int | None = None,
) -> dict[str, float]:
    """Peak memory and bytes sent with ZeRO-1 in fp32, of the rank with the most FLOPs: `sdp estimate`.

    Args:
        shape: a config of Transformers.
        rows: of a rank.
        optimizer: as in DeepSpeed's config.
        length: tokens of a row.
    """
    config = {
        "train_micro_batch_size_per_gpu": rows,
        "zero_allow_untested_optimizer": True,
        "optimizer": optimizer,
        "zero_optimization": {"stage": 1},
        KEY: block,
    }
    found = forecast(model_of(shape, config, sequence_length=length), config, num_ranks=num_workers)
    return {"peak": found.peak, "sent": found.rank.sent}


def _pieces(mask: Mask) -> list[tuple[Piece, tuple[int, ...]]]:
    return [found for name in mask.parameters for found in mask.pieces[name]]
