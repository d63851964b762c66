"""The auxiliary loss of mixtures of experts.

The loss is a mean over the layers whose routers ran: in a subnetwork, over the layers that it holds. A subnetwork
without any router has no such loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.architectures.derivation import flops_per_element
from sdp_deepspeed.masking.check import blocks_of_units
from sdp_deepspeed.messages import KEY
from sdp_deepspeed.plan.plan import Plan

_FLAG = "output_router_logits"

Hook = Callable[[nn.Module, Any, Mapping[str, Any]], None]


def mixtures(model: nn.Module, branches: Sequence[LocatedBranch]) -> set[str]:
    """Names of the branches that are mixtures: some of their weights are used for fewer tokens than others."""
    flops = flops_per_element(model)
    of_weights = {b.name: {flops.get(piece.parameter, 0) for piece in b.pieces} - {0} for b in branches}
    return {name for name, different in of_weights.items() if len(different) > 1}


def router_refusal(model: nn.Module, plan: Plan, branches: Sequence[LocatedBranch]) -> Hook | None:
    """A forward pre-hook that refuses the auxiliary loss if some subnetwork has no router.

    Raises:
        ValueError: the model's config enables the loss.
    """
    configs = [getattr(module, "config", None) for module in model.modules()]
    if plan.regime == "backward" or not any(hasattr(config, _FLAG) for config in configs):
        return None
    routed = mixtures(model, branches)
    unit_of = {b.name: unit for unit, members in blocks_of_units(plan, branches).items() for b in members}
    if not routed or not routed <= unit_of.keys():
        return None
    holding = {subnetwork for name in routed for subnetwork in plan.holders[unit_of[name]]}
    without = [subnetwork for subnetwork in range(plan.num_subnetworks) if subnetwork not in holding]
    if not without:
        return None
    text = (
        f"{_FLAG}: subnetwork {without[0]} has no router, so no auxiliary loss; raise {KEY}.holders, or share one of "
        f'them: "shared": ["^{sorted(routed)[0]}$"]'
    )
    if any(getattr(config, _FLAG, False) is True for config in configs):
        raise ValueError(text)

    def refuse(module: nn.Module, _: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        if module.training and kwargs is not None and kwargs.get(_FLAG):
            raise ValueError(text)

    return refuse
