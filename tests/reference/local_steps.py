"""Reference implementation of local steps: teams that train their own weights and average every H steps.

At full coverage this is DiLoCo (arXiv 2311.08105).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.plan.plan import Plan
from tests.reference.virtual_workers import Reference, average_statistics, dense_buffers, held_mask


@dataclass(frozen=True)
class LocalSteps:
    """
    Args:
        every: steps between two synchronizations, H.
        outer_lr, outer_momentum: of the outer SGD, which is Nesterov's where the momentum is not 0.
    """

    every: int
    outer_lr: float
    outer_momentum: float

    def outer_optimizer(self, anchors: Sequence[nn.Parameter]) -> torch.optim.SGD:
        return torch.optim.SGD(
            anchors, lr=self.outer_lr, momentum=self.outer_momentum, nesterov=self.outer_momentum > 0
        )


class LocalReference:
    """Trains virtual workers with weights of their own in one process.

    Args:
        model: dense, in the weights' dtype; it has the anchors: changed by a synchronization, not by a step.
        plan: which subnetwork holds which unit.
        make_team: creates the reference of one team, from its copy of the model and its ranks. Optimizer, norm,
            clipping and schedule are the team's.

    Attributes:
        anchors: fp32 weights after the last synchronization, by dense name.
        held: 0/1 masks of the elements of each team.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        local_steps: LocalSteps,
        make_team: Callable[[nn.Module, Sequence[int]], Reference],
    ) -> None:
        self.model, self.plan, self.local_steps = model, plan, local_steps
        self.num_steps = 0
        self.teams = [
            make_team(deepcopy(model), [rank for rank in plan.all_ranks if plan.subnetwork_of_rank[rank] == subnetwork])
            for subnetwork in range(plan.num_subnetworks)
        ]
        self.anchors = {name: nn.Parameter(p.detach().float().clone()) for name, p in model.named_parameters()}
        self.outer = local_steps.outer_optimizer([*self.anchors.values()])
        self.held = [held_mask(model, plan, subnetwork) for subnetwork in range(plan.num_subnetworks)]

    def step(self, batches: Sequence[Sequence[Any]]) -> tuple[list[list[float]], list[float]]:
        """Run one step of each team, and a synchronization after every H-th.

        Args:
            batches: micro-batches of each rank.

        Returns:
            Losses of each rank, and the norm of each team before clipping.
        """
        losses: list[list[float]] = [[] for _ in batches]
        norms = []
        for subnetwork, team in enumerate(self.teams):
            of_ranks, total = team.step([batches[rank] for rank in team.ranks])
            norms.append(total)
            for rank, of_rank in zip(team.ranks, of_ranks, strict=True):
                losses[rank] = of_rank
            if self.plan.regime == "backward":
                self._restore_unheld(subnetwork)
        self.num_steps += 1
        if self.num_steps % self.local_steps.every == 0:
            self.synchronize()
        return losses, norms

    @torch.no_grad()
    def synchronize(self) -> None:
        """Average over the teams that hold an element, take the outer step, and start all teams from its result."""
        for name, anchor in self.anchors.items():
            count, total = torch.zeros_like(anchor), torch.zeros_like(anchor)
            for team, held in zip(self.teams, self.held, strict=True):
                count += held[name]
                total += (anchor - team.masters[name]) * held[name]
            anchor.grad = total / count
        self.outer.step()
        for team in self.teams:
            for name, master in team.masters.items():
                master.copy_(self.anchors[name])
            team.refresh_weights()
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self.anchors[name])
        self._average_statistics()

    @torch.no_grad()
    def _restore_unheld(self, subnetwork: int) -> None:
        """Units that a team does not train run at their anchors, which weight decay would change."""
        team = self.teams[subnetwork]
        for name, master in team.masters.items():
            master.copy_(torch.where(self.held[subnetwork][name] > 0, master, self.anchors[name]))
        team.refresh_weights()

    def dense_buffers(self) -> dict[str, torch.Tensor]:
        """Buffers of the dense model, with running statistics that are averaged now; this does not change later means.
        After the first step."""
        self._average_statistics()
        return dense_buffers(self.model, self.plan, self._buffers())

    def _average_statistics(self) -> None:
        buffers = self._buffers()
        if buffers:
            average_statistics(self.model, self.plan, buffers, range(len(buffers)))

    def _buffers(self) -> list[dict[str, torch.Tensor]]:
        """Of each rank; none before the first step."""
        of_rank: dict[int, dict[str, torch.Tensor]] = {}
        for team in self.teams:
            of_rank |= dict(zip(team.ranks, team.buffers, strict=False))
        return [of_rank[rank] for rank in sorted(of_rank)]
