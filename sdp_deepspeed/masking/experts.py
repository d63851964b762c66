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
from sdp_deepspeed.architectures.active_experts import has_experts
from sdp_deepspeed.masking.check import blocks_of_units
from sdp_deepspeed.messages import KEY
from sdp_deepspeed.plan.plan import Plan

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
    for branch in branches:
        experts = branch.description.experts
        if experts is None or not has_experts(model.get_submodule(branch.layer), branch.description):
            continue
        module: Any = model.get_submodule(f"{branch.root}.{experts.module}")
        if getattr(getattr(module, "config", None), "_experts_implementation", None) != "grouped_mm":
            continue
        outputs = [t for t in branch.cut_tensors if t.cut.is_output and t.cut.module.startswith(f"{experts.module}.")]
        for tensor in outputs:
            step = _BYTES // parameters[tensor.parameter].element_size()
            for subnetwork in range(plan.num_subnetworks):
                absent = in_units[tensor.parameter] - held[tensor.parameter, subnetwork]
                if absent % step or (absent and tensor.size % step):
                    raise ValueError(
                        f"{branch.name!r}: subnetwork {subnetwork} has {tensor.size - absent} of {tensor.size} neurons"
                        f'; grouped_mm needs multiples of {step}: change neuron_groups, or use "batched_mm"'
                    )


def router_refusal(model: nn.Module, plan: Plan, branches: Sequence[LocatedBranch]) -> Hook | None:
    """A forward pre-hook that refuses the auxiliary loss if some subnetwork has no router.

    Raises:
        ValueError: the model's config enables the loss.
    """
    mixtures = {b.name for b in branches if has_experts(model.get_submodule(b.layer), b.description)}
    unit_of = {b.name: unit for unit, members in blocks_of_units(plan, branches).items() for b in members}
    if not mixtures or plan.regime == "backward" or not mixtures <= unit_of.keys():
        return None
    holding = {subnetwork for name in mixtures for subnetwork in plan.holders[unit_of[name]]}
    without = [subnetwork for subnetwork in range(plan.num_subnetworks) if subnetwork not in holding]
    if not without:
        return None
    text = (
        f"{_FLAG}: subnetwork {without[0]} has no router, so no auxiliary loss; raise {KEY}.holders, or share one of "
        f'them: "shared": ["^{sorted(mixtures)[0]}$"]'
    )
    configs = (getattr(module, "config", None) for module in model.modules())
    if any(getattr(config, _FLAG, False) is True for config in configs):
        raise ValueError(text)

    def refuse(module: nn.Module, _: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        if module.training and kwargs is not None and kwargs.get(_FLAG):
            raise ValueError(text)

    return refuse
