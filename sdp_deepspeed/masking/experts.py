"""Mixtures of experts whose losses or random numbers do not go with what a worker runs: refused by name.

The auxiliary loss of routers is a mean over the layers whose routers ran. A subnetwork's is over the layers that it
has, as its other losses are; one without any router has none, and the hosts' code would end in an index error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.architectures.active_experts import has_experts
from sdp_deepspeed.architectures.branch import attribute
from sdp_deepspeed.config import KEY
from sdp_deepspeed.masking.mixins import Hook
from sdp_deepspeed.masking.part import MaskedPart
from sdp_deepspeed.messages import quoted
from sdp_deepspeed.plan.plan import Plan

_FLAG = "output_router_logits"
_BYTES = 16


def check_noise(model: nn.Module, branches: Sequence[LocatedBranch], cut: Collection[str]) -> None:
    """In the backward regime a cut body runs twice, so noise on its input would be drawn twice.

    Args:
        cut: names of the branches that run twice.

    Raises:
        ValueError: by the attribute.
    """
    for branch in branches:
        experts = branch.description.experts
        if branch.name not in cut or experts is None or experts.noise is None:
            continue
        if has_experts(model.get_submodule(branch.layer), branch.description) and (
            noise := attribute(model.get_submodule(branch.root), experts.noise)
        ):
            raise ValueError(
                f"{branch.name!r}: {experts.noise} is {noise}: in the backward regime with the neuron strategy its "
                "experts run in two halves, which must route tokens alike, but each would draw noise of its own. Build "
                f'the model without it (router_jitter_noise=0.0), or use "block" for the part '
                f"{branch.description.name!r}"
            )


def check_grouped_products(
    model: nn.Module, plan: Plan, branches: Sequence[LocatedBranch], cut: Collection[str]
) -> None:
    """PyTorch multiplies the matrices of all experts in one call only if rows begin at multiples of 16 bytes, which the
    number of neurons that a worker has decides.

    Args:
        cut: names of the branches whose neurons are cut.

    Raises:
        ValueError: what a worker would have does not run.
    """
    tensors = dict(model.named_parameters())
    lengths = _lacking_lengths(plan) if any(branch.description.experts for branch in branches) else {}
    for branch in branches:
        experts = branch.description.experts
        if branch.name not in cut or experts is None or not _is_grouped(model, branch):
            continue
        inside = f"{branch.root}.{experts.module}."
        output = next(t for t in branch.cut_tensors if t.cut.is_output and t.parameter.startswith(inside))
        step = _BYTES // tensors[output.parameter].element_size()
        for subnetwork in range(plan.num_subnetworks):
            lacking = lengths.get((output.parameter, subnetwork), 0)
            if any(part % step for part in (output.size - lacking, lacking)):
                raise ValueError(
                    f"{branch.name!r}: of {output.size} neurons of each expert subnetwork {subnetwork} has "
                    f"{output.size - lacking} and lacks {lacking}, and grouped products of "
                    f"{tensors[output.parameter].dtype} run with multiples of {step} only: use fewer "
                    f"{KEY}.neuron_groups, a number of neurons that they divide into multiples of {step}, or "
                    'model.set_experts_implementation("batched_mm")'
                )


def _lacking_lengths(plan: Plan) -> Mapping[tuple[str, int], int]:
    """Of each parameter how many indices of a cut dimension each subnetwork lacks; nothing where it lacks none."""
    lengths: dict[tuple[str, int], int] = defaultdict(int)
    everybody = set(range(plan.num_subnetworks))
    for unit, holders in zip(plan.units, plan.holders, strict=True):
        for subnetwork in everybody.difference(holders):
            for piece in (piece for piece in unit.pieces if piece.dim is not None):
                lengths[piece.parameter, subnetwork] += piece.length
    return lengths


def _is_grouped(model: nn.Module, branch: LocatedBranch) -> bool:
    assert branch.description.experts is not None
    if not has_experts(model.get_submodule(branch.layer), branch.description):
        return False
    config = getattr(model.get_submodule(f"{branch.root}.{branch.description.experts.module}"), "config", None)
    return getattr(config, "_experts_implementation", None) == "grouped_mm"


def subnetworks_without_routers(
    model: nn.Module, plan: Plan, blocks: Mapping[int, Sequence[LocatedBranch]], branches: Sequence[LocatedBranch]
) -> tuple[list[int], list[str]]:
    """Subnetworks that run no router, and the branches with routers; none of the first without such branches.

    Args:
        blocks: the branches of each block unit, by its index in the plan.
    """
    mixtures = [b.name for b in branches if has_experts(model.get_submodule(b.layer), b.description)]
    unit_of = {branch.name: unit for unit, members in blocks.items() for branch in members}
    if not mixtures or plan.regime == "backward" or not all(name in unit_of for name in mixtures):
        return [], mixtures
    holding = {subnetwork for name in mixtures for subnetwork in plan.holders[unit_of[name]]}
    return [subnetwork for subnetwork in range(plan.num_subnetworks) if subnetwork not in holding], mixtures


class RefuseRouterLoss(Hook):
    """A hook before the model's forward, on all ranks if one of the subnetworks has no router.

    Args:
        text: of the error.
        parts: of the mask; the dense model has all routers.
    """

    def __init__(self, text: str, parts: Sequence[MaskedPart]) -> None:
        super().__init__(self._check)
        self._text = text
        self._parts = parts

    def _check(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if kwargs.get(_FLAG) and module.training and not all(part.dense for part in self._parts):
            raise ValueError(self._text)


def check_router_losses(
    model: nn.Module, plan: Plan, blocks: Mapping[int, Sequence[LocatedBranch]], branches: Sequence[LocatedBranch]
) -> str:
    """The message for an auxiliary loss that not every subnetwork has; empty if all have one.

    Raises:
        ValueError: with that message, if the model's config asks for the loss.
    """
    without, mixtures = subnetworks_without_routers(model, plan, blocks, branches)
    if not without:
        return ""
    text = (
        f"{_FLAG}: the auxiliary loss of routers is over the layers that a subnetwork has, and {len(without)} of "
        f"{plan.num_subnetworks} subnetworks (first {without[0]}) have none of {quoted(mixtures)}. "
        f'{KEY}: raise holders, use granularity "layer", cut the part by "neuron", or keep one of them with every '
        f'worker (shared: ["^{mixtures[0]}$"])'
    )
    configs = (getattr(module, "config", None) for module in model.modules())
    if any(getattr(config, _FLAG, False) is True for config in configs):
        raise ValueError(text)
    return text
