"""Local steps: each team trains its subnetwork by itself, and every H steps holders average their weights (DiLoCo).

A team is the ranks of one subnetwork. Buckets keep their slices and holders, but are sharded over the team: in each
team that holds a bucket, the rank at position i owns shard i. A step averages gradients, computes the norm and gathers
weights over the team only. A synchronization then averages shard i over the ranks at position i of the teams that hold
it, its peers: one all-reduce of a shard for each bucket, in the order of buckets.

An anchor is a weight after the last synchronization. The mean over holders of `anchor - weight` is the gradient of an
outer SGD, which changes the anchor; all holders continue from it. The dense model is that of the anchors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import nn

from sdp_deepspeed.config import LocalSteps
from sdp_deepspeed.parallel.buckets import Bucket
from sdp_deepspeed.parallel.groups import Groups, RankGroup
from sdp_deepspeed.units import Holders

OUTER_MOMENTUM = "outer_momentum"  # in a checkpoint, beside the moments of the optimizer


def teams_of(subnetwork_of_rank: Sequence[int]) -> list[Holders]:
    """The team of each data-parallel rank, as ascending data-parallel indices."""
    return [
        tuple(rank for rank, other in enumerate(subnetwork_of_rank) if other == subnetwork)
        for subnetwork in subnetwork_of_rank
    ]


def peers_of(holders: Holders, teams: Sequence[Holders], position: int) -> Holders:
    """The ranks at one position of the teams that hold a bucket."""
    return tuple(sorted({teams[rank][position] for rank in holders}))


def group_sets(holder_sets: Collection[Holders], teams: Sequence[Holders]) -> set[Holders]:
    """Sets of ranks that communicate: teams, and the peers at each position of each holder set."""
    sets = set(teams)
    for holders in holder_sets:
        for position in range(len(teams[0])):
            sets.add(peers_of(holders, teams, position))
    return sets


class Synchronizer:
    """Anchors and outer momentum of this rank's shards. Every rank constructs it, with equal settings.

    Args:
        settings: `local_steps` of the block.
        buckets: those that this rank holds, in the order of collectives.
        groups: process groups, of `group_sets`.
        teams: see `teams_of`.
        wire_dtype: communication dtype of differences. Default: fp32.

    Attributes:
        anchors: fp32 [shard size] of each bucket, where its shard is.
        momenta: outer momentum, likewise; empty if the momentum is 0.
        is_between: whether weights have been stepped since the last synchronization.
        are_shown: whether anchors are in the place of shards, so that the module has them.
    """

    def __init__(
        self,
        settings: LocalSteps,
        buckets: Sequence[Bucket],
        groups: Groups,
        teams: Sequence[Holders],
        wire_dtype: torch.dtype | None,
    ) -> None:
        self.settings, self._buckets, self._wire_dtype = settings, buckets, wire_dtype
        self.is_between = self.are_shown = False
        self._hidden: list[torch.Tensor] = []  # shards, while anchors are in their place
        self._peers: list[RankGroup] = []
        for bucket in buckets:
            peers = groups.of(peers_of(bucket.layout.holders, teams, bucket.shard_group.position))
            assert peers is not None
            self._peers.append(peers)
        self.anchors = [shard.detach().clone() for shard in self._shards()]
        has_momentum = settings.outer_momentum > 0
        self.momenta = [torch.zeros_like(anchor) for anchor in self.anchors] if has_momentum else []

    def _shards(self) -> list[nn.Parameter]:
        return [bucket.shard for bucket in self._buckets if bucket.shard is not None]

    def check_finite(self, subnetwork: int) -> None:
        """Raise RuntimeError if this rank's shards are not finite."""
        if not all(bool(torch.isfinite(shard).all()) for shard in self._shards()):
            raise RuntimeError(
                f"local steps: weights of subnetwork {subnetwork} are infinite or NaN, so they were not averaged; "
                "lower its learning rate, or load an earlier checkpoint"
            )

    @torch.no_grad()
    def synchronize(self) -> None:
        """Average shards over their peers and take the outer step; weights have to be gathered after it. Collective."""
        rate, momentum = self.settings.outer_lr, self.settings.outer_momentum
        for index, (shard, anchor) in enumerate(zip(self._shards(), self.anchors, strict=True)):
            delta = self._mean(index, anchor - shard.detach(), self._wire_dtype)
            if momentum > 0:
                buffer = self.momenta[index].mul_(momentum).add_(delta)
                delta = delta.add_(buffer, alpha=momentum)  # Nesterov, as torch.optim.SGD
            anchor.sub_(delta, alpha=rate)
            shard.detach().copy_(anchor)
        self.is_between = False

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in `synchronize`, as rings do."""
        total = 0
        for shard, peers in zip(self._shards(), self._peers, strict=True):
            width = (self._wire_dtype or shard.dtype).itemsize
            total += 2 * (peers.size - 1) * shard.numel() * width // peers.size
        return total

    @torch.no_grad()
    def average_moments(self, optimizer: torch.optim.Optimizer) -> None:
        """Set moments to their fp32 means over peers, so that all holders have the same optimizer state. Collective."""
        for index, bucket in enumerate(self._buckets):
            for parameter in bucket.parameters:
                state = optimizer.state.get(parameter, {})
                for key in sorted(state):
                    moment = state[key]
                    if torch.is_tensor(moment) and moment.shape == parameter.shape:
                        moment.copy_(self._mean(index, moment.float(), None))

    def _mean(self, index: int, values: torch.Tensor, wire_dtype: torch.dtype | None) -> torch.Tensor:
        """Mean over the peers of a bucket.

        Args:
            values: fp32, where the shard is.
            wire_dtype: communication dtype; None for fp32.
        """
        peers, device = self._peers[index], self._buckets[index].device
        if peers.size == 1 or not values.numel():
            return values
        sent = values.to(device, wire_dtype or values.dtype)
        peers.comm.all_reduce(sent, group=peers.process_group)
        return sent.to(values.device, values.dtype).div_(peers.size)

    @torch.no_grad()
    def restart(self) -> None:
        """Set anchors to weights that were changed or loaded."""
        for shard, anchor in zip(self._shards(), self.anchors, strict=True):
            anchor.copy_(shard.detach())
        self.is_between = self.are_shown = False
        self._hidden.clear()

    @torch.no_grad()
    def load_momenta(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the outer momentum to that in the optimizer's state, or to zero."""
        for parameter, momentum in self._momenta_of_parameters():
            loaded = optimizer.state.get(parameter, {}).get(OUTER_MOMENTUM)
            if loaded is None:
                momentum.zero_()
            else:
                momentum.copy_(loaded)

    def add_momenta(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the outer momentum beside the moments of the optimizer, for checkpoints and re-planning."""
        for parameter, momentum in self._momenta_of_parameters():
            optimizer.state[parameter][OUTER_MOMENTUM] = momentum

    def _momenta_of_parameters(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        for bucket, momentum in zip(self._buckets, self.momenta, strict=bool(self.momenta)):
            yield from zip(bucket.parameters, bucket.stepped(momentum), strict=True)

    @torch.no_grad()
    def show(self) -> None:
        """Put the anchors in the place of shards, until `hide` or `restart`."""
        self._hidden = [shard.detach().clone() for shard in self._shards()]
        for shard, anchor in zip(self._shards(), self.anchors, strict=True):
            shard.detach().copy_(anchor)
        self.are_shown = True

    @torch.no_grad()
    def hide(self) -> None:
        """Undo `show`."""
        for shard, weights in zip(self._shards(), self._hidden, strict=True):
            shard.detach().copy_(weights)
        self.are_shown = False
        self._hidden.clear()

    def differs(self, index: int) -> bool:
        """Whether the shard of a bucket is not its anchor; whole fp32 tensors of the module are views of shards."""
        return not torch.equal(self._shards()[index].detach(), self.anchors[index])


def drop_momenta(optimizer: torch.optim.Optimizer) -> None:
    """Remove what `Synchronizer.add_momenta` or a checkpoint has added."""
    for state in optimizer.state.values():
        state.pop(OUTER_MOMENTUM, None)
