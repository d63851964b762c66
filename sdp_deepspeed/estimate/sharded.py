"""Bytes and traffic of each rank under FSDP2 (`sdp_deepspeed.fully_shard`), from a plan and dense shapes alone.

FSDP2 cuts a tensor's first dim into one chunk for each holder, of equal length: the last ones are padded. Chunks are
stored, gathered and reduced with their padding; an optimizer's state has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.estimate.per_rank import RankEstimate
from sdp_deepspeed.estimate.precision import FP32_BYTES
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo, pieces_by_tensor


@dataclass(frozen=True)
class ShardedSetup:
    """What decides a rank's bytes besides plan and shapes; bytes are per element.

    Args:
        weights: as they are stored, and gradients once they are averaged.
        compute: of the gathered weights (`mp_policy.param_dtype`).
        wire: of gradients on their way (`mp_policy.reduce_dtype`).
        num_moments: fp32 moments per element: Adam 2.
        accumulation: micro-steps; weights are gathered and gradients averaged in each.
        reshard_after_forward: as `fully_shard`'s: None means True for units and False for what is shared.
    """

    weights: int = 4
    compute: int = 4
    wire: int = 4
    num_moments: int = 2
    accumulation: int = 1
    reshard_after_forward: bool | None = None

    def num_gathers(self, *, of_units: bool) -> int:
        """All-gathers in one optimizer step: forward, and again in backward if it was freed in between."""
        freed = of_units if self.reshard_after_forward is None else self.reshard_after_forward
        return self.accumulation * (2 if freed else 1)


@dataclass(frozen=True)
class _Part:
    """A tensor, or what the same ranks hold of one.

    Args:
        shape: of what is sharded.
        holders: ranks that hold it.
        unit: what is gathered together; None for what is shared.
    """

    shape: tuple[int, ...]
    holders: tuple[int, ...]
    unit: str | None
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


def estimate_sharded(
    plan: Plan, tensors: Sequence[TensorInfo], setup: ShardedSetup, branches: Sequence[LocatedBranch] = ()
) -> tuple[RankEstimate, ...]:
    """One estimate for each rank. `sent_gradients` is reduced, `sent_back` gathered; `gathered` is what is whole at the
    peak: what is shared and two units, or all of them if they stay, and one unit's gradients before and on their way.

    Args:
        plan: who holds what, forward regime.
        tensors: the dense model's in model order; buffers are passed over.
        branches: of the model. One that every rank has whole is gathered by itself; without them it is counted with
            what is shared.
    """
    parts = list(_parts(plan, tensors, branches))
    return tuple(_of_rank(parts, setup, rank) for rank in range(len(plan.subnetwork_of_rank)))


def _parts(plan: Plan, tensors: Sequence[TensorInfo], branches: Sequence[LocatedBranch]) -> Iterator[_Part]:
    parameters = [info for info in tensors if info.kind == "parameter"]
    unit_of = {piece.parameter: unit.name for unit in plan.units for piece in unit.pieces}
    pieces_of = pieces_by_tensor(parameters, plan)
    everyone = tuple(range(len(plan.subnetwork_of_rank)))
    for branch in branches:
        own = [p.parameter for body in branch.bodies for p in branch.pieces if p.parameter.startswith(f"{body}.")]
        first = {name: pieces_of["parameter", name][0] for name in own if ("parameter", name) in pieces_of}
        if all(holders == everyone and piece.dim is None for piece, holders in first.values()):
            unit_of |= {name: unit_of.get(name, branch.name) for name in first}
    for (_, name), pieces in pieces_of.items():
        info = next(info for info in parameters if info.name == name)
        if pieces[0][0].dim is None:
            yield _Part(info.shape, pieces[0][1], unit_of.get(name), info.trainable)
            continue
        lengths: Counter[tuple[int, ...]] = Counter()
        for piece, holders in pieces:
            lengths[holders] += piece.length
        for holders, length in lengths.items():
            shape = tuple(length if dim == pieces[0][0].dim else size for dim, size in enumerate(info.shape))
            yield _Part(shape, holders, unit_of[name].rsplit(".", 1)[0], info.trainable)


def _of_rank(parts: Sequence[_Part], setup: ShardedSetup, rank: int) -> RankEstimate:
    held = [part for part in parts if rank in part.holders]
    trained = [part for part in held if part.trainable]
    reduced = setup.accumulation * sum(part.stored * (len(part.holders) - 1) for part in trained)
    gathered = sum(
        part.stored * (len(part.holders) - 1) * setup.num_gathers(of_units=part.unit is not None) for part in held
    )
    return RankEstimate(
        weights=sum(part.stored for part in held) * setup.weights,
        gradients=sum(part.stored for part in trained) * setup.weights,
        optimizer=sum(part.stepped(rank) for part in trained) * FP32_BYTES * setup.num_moments,
        host_optimizer=0,
        step_gradients=0,
        sent_gradients=reduced,
        sent_back=gathered,
        sent_bytes=reduced * setup.wire + gathered * setup.compute,
        gathered=_gathered(held, setup),
    )


def _gathered(held: Sequence[_Part], setup: ShardedSetup) -> int:
    """Bytes at the peak."""
    units: Counter[str | None] = Counter()
    for part in held:
        units[part.unit] += part.stored * len(part.holders)
    shared = units.pop(None, 0)
    largest = sorted(units.values(), reverse=True)
    here = largest if setup.reshard_after_forward is False else largest[:2]
    return (shared + sum(here)) * setup.compute + sum(largest[:1]) * (setup.compute + setup.wire)
