"""Bytes that each rank holds and sends under FSDP2, computed from a plan and dense shapes.

FSDP2 shards the first dimension of a tensor into chunks of equal length, the last ones padded. Chunks are stored,
gathered and reduced with padding; optimizer state has none. Units are resharded after the forward pass; shared
parameters stay gathered until the backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.architectures.branch import is_inside
from sdp_deepspeed.estimate.deepspeed_bytes import FP32_BYTES, RankEstimate, leaves
from sdp_deepspeed.fsdp.fsdp_groups import gathered_together
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo, pieces_by_tensor


@dataclass(frozen=True)
class FSDP2Setup:
    """Settings that determine a rank's bytes, besides plan and shapes. Sizes are in bytes per element.

    Args:
        weights: stored weights and averaged gradients.
        compute: gathered weights (`mp_policy.param_dtype`).
        wire: gradients on the wire (`mp_policy.reduce_dtype`).
        master: separate copy that the optimizer steps; 0 if it steps the stored weights.
        accumulation: micro-steps. Each gathers weights and averages gradients.
    """

    weights: int = 4
    compute: int = 4
    wire: int = 4
    num_moments: int = 2
    master: int = 0
    accumulation: int = 1


@dataclass(frozen=True)
class FSDP2Tensor:
    """A tensor, or the slices of it that the same ranks hold.

    Args:
        shape: before sharding.
        group: equal for tensors that are gathered at the same time: those with the same holders in a layer; all holder
            sets of several layers that are gathered together, and of neurons and heads, since these groups are nested
            or overlap; None for shared tensors.
    """

    name: str
    shape: tuple[int, ...]
    holders: tuple[int, ...]
    group: tuple[str, tuple[int, ...]] | None
    trainable: bool

    @property
    def stored(self) -> int:
        """Elements of each holder's chunk, with padding."""
        return self._rows * prod(self.shape[1:])

    def stepped(self, rank: int) -> int:
        """Elements of a holder's chunk without padding."""
        left = self.shape[0] - self.holders.index(rank) * self._rows
        return max(0, min(self._rows, left)) * prod(self.shape[1:])

    @property
    def _rows(self) -> int:
        return -(-self.shape[0] // len(self.holders))


def fsdp2_tensors(
    plan: Plan, tensors: Sequence[TensorInfo], branches: Sequence[LocatedBranch] = ()
) -> Iterator[FSDP2Tensor]:
    """Parts that are sharded.

    Args:
        plan: plan in the forward regime.
        branches: residual branches of the model. Those that all ranks hold are gathered by layers; without `branches`
            they count as shared.
    """
    parameters = [info for info in tensors if info.kind == "parameter"]
    group_of = {piece.parameter: unit.name for unit in plan.units for piece in unit.pieces}
    pieces_of = pieces_by_tensor(parameters, plan)
    together = gathered_together(plan, parameters, branches)
    for branch in branches:
        first = {}  # first piece of each parameter in the branch's bodies
        for piece in branch.pieces:
            if piece.parameter in pieces_of and any(is_inside(piece.parameter, body) for body in branch.bodies):
                first[piece.parameter] = pieces_of[piece.parameter][0]
        if all(holders == plan.all_ranks and piece.dim is None for piece, holders in first.values()):
            group_of |= dict.fromkeys(first, branch.name)
        for piece in branch.pieces:
            if piece.parameter in group_of:
                group_of[piece.parameter] = together[branch.name]
    layers: dict[str, set[str]] = {}
    for branch in branches:
        layers.setdefault(together[branch.name], set()).add(branch.layer)
    # Of groups of several layers all holder sets are gathered at the same time.
    overlapping = {name for name, of_name in layers.items() if len(of_name) > 1}
    for info, pieces in zip(parameters, pieces_of.values(), strict=True):
        if pieces[0][0].dim is not None and info.name in group_of:
            overlapping.add(group_of[info.name])
    for info, pieces in zip(parameters, pieces_of.values(), strict=True):
        dim, by_holders = pieces[0][0].dim, Counter[tuple[int, ...]]()
        for piece, holders in pieces:
            by_holders[holders] += piece.length
        for holders, length in by_holders.items():
            shape = tuple(length if d == dim else size for d, size in enumerate(info.shape))
            name = group_of.get(info.name)
            group = None if name is None else (name, () if name in overlapping else holders)
            yield FSDP2Tensor(info.name, shape, holders, group, info.trainable)


def names_in_units(parts: Sequence[FSDP2Tensor]) -> set[str]:
    """Names of tensors that are gathered with a layer, and not with the root."""
    return {part.name for part in parts if part.group is not None}


def fsdp2_estimate(parts: Sequence[FSDP2Tensor], setup: FSDP2Setup, rank: int) -> RankEstimate:
    """The estimate of one rank."""
    held = [part for part in parts if rank in part.holders]
    trained = [part for part in held if part.trainable]
    state_bytes = FP32_BYTES * setup.num_moments + setup.master
    groups: Counter[tuple[str, tuple[int, ...]] | None] = Counter()
    for part in held:
        groups[part.group] += part.stored * len(part.holders)
    shared = groups.pop(None, 0)
    largest = sorted(groups.values(), reverse=True)
    return RankEstimate(
        weights=sum(part.stored for part in held) * setup.weights,
        gradients=sum(part.stored for part in trained) * setup.weights,
        optimizer=sum(part.stepped(rank) for part in trained) * state_bytes,
        gathered=shared * setup.compute,
        gathered_units=sum(largest[:2]) * setup.compute + sum(largest[:1]) * (setup.compute + setup.wire),
        sent=_sent(held, setup),
    )


def fsdp2_sent_out_of(node: range, parts: Sequence[FSDP2Tensor], setup: FSDP2Setup) -> int:
    """Bytes that all ranks of a node, which has these data-parallel ranks, send to other nodes in a step."""
    return _sent([part for part in parts if leaves(part.holders, node)], setup)


def _sent(parts: Sequence[FSDP2Tensor], setup: FSDP2Setup) -> int:
    """Bytes that a holder of all these sends in a step."""
    num_bytes = 0
    for part in parts:
        others = part.stored * (len(part.holders) - 1)
        num_gathers = 1 if part.group is None else 2  # units in the forward and again in the backward pass
        num_bytes += others * (setup.wire * part.trainable + setup.compute * num_gathers)
    return setup.accumulation * num_bytes
