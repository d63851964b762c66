"""Checks for mixtures of experts.

The auxiliary loss of routers is a mean over the layers whose routers ran: in a subnetwork, over the layers that it
holds. A subnetwork without any router has no such loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.architectures.derivation import flops_per_element, last_derivation
from sdp_deepspeed.messages import KEY
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.strategies import blocks_of_units

_FLAG = "output_router_logits"
_BYTES = 16

Hook = Callable[[nn.Module, Any, Mapping[str, Any]], None]


def check_experts(model: nn.Module, plan: Plan, branches: Sequence[LocatedBranch]) -> None:
    """Raise ValueError if grouped matrix products cannot use the held neurons: rows must be multiples of 16 bytes."""
    parameters = dict(model.named_parameters())
    in_units: Counter[str] = Counter()  # number of indices along the cut dim that are in units, by parameter
    held: Counter[tuple[str, int]] = Counter()  # number of these that a subnetwork holds
    for unit, holders in zip(plan.units, plan.holders, strict=True):
        for piece in (piece for piece in unit.pieces if piece.dim is not None):
            in_units[piece.parameter] += piece.length
            held.update({(piece.parameter, subnetwork): piece.length for subnetwork in holders})
    stacked = [branch for branch in branches if branch.has_stacked_matrices]
    grouped = _grouped_weights(model) if stacked else set()
    for branch in stacked:
        for tensor in branch.cut_tensors:
            if not tensor.cut.is_output or tensor.parameter not in grouped:
                continue
            step = _BYTES // parameters[tensor.parameter].element_size()
            for subnetwork in range(plan.num_subnetworks):
                absent = in_units[tensor.parameter] - held[tensor.parameter, subnetwork]
                if absent % step or (absent and tensor.size % step):
                    raise ValueError(
                        f"{branch.name!r}: subnetwork {subnetwork} has {tensor.size - absent} of {tensor.size} neurons"
                        f'; grouped_mm needs multiples of {step}: change neuron_groups, or use "batched_mm"'
                    )


def _grouped_weights(model: nn.Module) -> set[str]:
    """Parameters that grouped products read in the traced pass, unless the config has changed since."""
    grouped = set()
    for traced, prefix in last_derivation(model).traced:
        for node in (node for node in traced.nodes if "_grouped_mm" in node.operators):
            module: Any = model.get_submodule(f"{prefix}{node.module}")
            if getattr(getattr(module, "config", None), "_experts_implementation", "grouped_mm") == "grouped_mm":
                grouped |= {f"{prefix}{name}" for name in node.flops}
    return grouped


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
