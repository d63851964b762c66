"""The plan: which subnetwork holds which unit, as data that can be hashed, printed, saved and given back.

Pure: knows neither DeepSpeed nor torch.distributed. The search for a good table is in assignment/, what
the config block asks for in planner.py, reading plan.json in parsing.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from sdp_deepspeed.atomic_files import regular, write_text
from sdp_deepspeed.messages import listed
from sdp_deepspeed.plan import parsing
from sdp_deepspeed.plan.holders import in_words
from sdp_deepspeed.plan.placement import Asked, Load, Network, Placement, Weighed, choose_placement
from sdp_deepspeed.plan.spectral_gap import spectral_gap
from sdp_deepspeed.units import Piece, Unit, UnitCost

Strategy = str | Mapping[str, str]
_HASHED = ("regime", "strategy", "num_subnetworks", "num_holders", "units")
_MAX_LISTED = 64  # rows and columns of the table that a terminal still shows


@dataclass(frozen=True)
class Plan:
    """The table of units by subnetworks, the same on every rank.

    Args:
        regime: "forward" or "backward".
        strategy: "block", "neuron", or a mapping by part.
        num_subnetworks: k.
        num_holders: p, if every unit is held by as many subnetworks; None if their numbers differ.
        seed: what the assignment was made with.
        units: U units in a fixed order; what is in no unit is shared.
        holders: for each unit its subnetworks, ascending.
        subnetwork_of_rank: the subnetwork of each data-parallel rank.
        placement: where replicas are and why; None without replicas, and in a plan that was read from a file, whose
            ranks may have been on other nodes.
        node_of_subnetwork: for each subnetwork the number of the node, or nodes, that its holders were chosen for; None
            if nodes had no part in that.
        weighed: what `assignment: "auto"` compared on several nodes, else None.
    """

    regime: str
    strategy: Strategy
    num_subnetworks: int
    num_holders: int | None
    seed: int
    units: tuple[Unit, ...]
    holders: tuple[tuple[int, ...], ...]
    subnetwork_of_rank: tuple[int, ...]
    placement: Placement | None = field(default=None, compare=False)
    node_of_subnetwork: tuple[int, ...] | None = None
    weighed: Weighed | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        _check_table(self)

    @property
    def coverage(self) -> float:
        """C = p / k; where units have different p the mean, each unit counted alike."""
        return self.mean_coverage([0] * len(self.units))

    @property
    def is_whole(self) -> bool:
        """Whether every subnetwork holds everything."""
        return all(len(holders) == self.num_subnetworks for holders in self.holders)

    def mean_coverage(self, weights: Sequence[int]) -> float:
        """C of the plan; `weights` are FLOPs (or what else counts) per unit, alike if all are zero."""
        weights = weights if any(weights) else [1] * len(self.units)
        held = sum(weight * len(holders) for weight, holders in zip(weights, self.holders, strict=True))
        return held / (sum(weights) * self.num_subnetworks)

    def coverage_of(self, unit: int) -> float:
        """C of the unit of this index."""
        return len(self.holders[unit]) / self.num_subnetworks

    @property
    def trains_subnetworks(self) -> bool:
        """Whether a loss of training is that of a subnetwork, and not the dense model's."""
        return self.regime == "forward" and not self.is_whole

    @cached_property
    def hash(self) -> str:
        """SHA-256 (hex) of what decides the training: units, holders, k, p, regime and strategy."""
        content = {key: value for key, value in _metadata(self).items() if key in _HASHED}
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def holds(self, unit: int, subnetwork: int) -> bool:
        """Whether `subnetwork` holds the unit of index `unit`."""
        return subnetwork in self.holders[unit]

    def holds_rank(self, unit: int, rank: int) -> bool:
        """Whether data-parallel rank `rank` holds the unit of index `unit`."""
        return self.holds(unit, self.subnetwork_of_rank[rank])

    def units_of(self, subnetwork: int) -> tuple[int, ...]:
        """Indices of the units that `subnetwork` holds, ascending."""
        return tuple(u for u, holders in enumerate(self.holders) if subnetwork in holders)

    def ranks_of(self, unit: int) -> tuple[int, ...]:
        """Data-parallel ranks that hold the unit of index `unit`, ascending (p * r of them)."""
        holders = self.holders[unit]
        return tuple(rank for rank, subnetwork in enumerate(self.subnetwork_of_rank) if subnetwork in holders)

    def spectral_gap(self, weights: Sequence[int] | None = None) -> float:
        """Spectral gap of the table; `weights` are trainable elements per unit, None for equal units."""
        return spectral_gap(self.holders, weights or [1] * len(self.units), self.num_subnetworks)

    def place(self, elements: Sequence[int], num_shared: int, network: Network, asked: Asked) -> Plan:
        """This plan with the replicas of its subnetworks on the ranks that run.

        Args:
            elements: for each unit its trainable elements.
            num_shared: trainable elements in no unit.
            network: nodes of the ranks.
            asked: what the config says.
        """
        load = Load(self.num_subnetworks, self.holders, elements, num_shared, self.regime == "backward")
        placement, ranks = choose_placement(load, network, asked)
        return dataclasses.replace(self, subnetwork_of_rank=ranks, placement=placement)

    def to_json(self) -> dict[str, Any]:
        """The plan in the format of plan.json (README.md beside this file)."""
        return {"version": 1 if self.num_holders is not None else parsing.VERSION, "hash": self.hash, **_metadata(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Inverse of `to_json`; ValueError names what is wrong in `data`."""
        plan = cls(**parsing.fields(data))
        if data.get("hash") not in (None, plan.hash):
            raise ValueError(
                f"plan: its hash is {data['hash']!r}, but its units and holders have {plan.hash!r}; "
                "it was changed after it was written. Remove the hash if that was on purpose"
            )
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write plan.json complete or not at all; one rank calls it."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_json(), indent=1) + "\n"
        write_text(target, text, permissions=0o644, concurrent=True)  # others read it; all ranks may save it by mistake

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan.json; ValueError (with the path) if it cannot be read or does not hold a plan."""
        try:
            data = json.loads(regular(Path(path)).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"plan {os.fspath(path)!r} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"plan {os.fspath(path)!r} is not JSON: {error}") from None
        try:
            return cls.from_json(data)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None

    def table(self, costs: Sequence[UnitCost] | None = None, *, rows: bool = True) -> str:
        """Text to print: units by subnetworks (`rows`), balance, spectral gap, placement of replicas, hash."""
        return _table(self, costs, rows=rows)


def _metadata(plan: Plan) -> dict[str, Any]:
    """All of plan.json but version and hash."""
    strategy = plan.strategy if isinstance(plan.strategy, str) else dict(plan.strategy)
    return {
        "regime": plan.regime,
        "strategy": strategy,
        "num_subnetworks": plan.num_subnetworks,
        "num_holders": plan.num_holders,
        "seed": plan.seed,
        "subnetwork_of_rank": list(plan.subnetwork_of_rank),
        **({} if plan.node_of_subnetwork is None else {"node_of_subnetwork": list(plan.node_of_subnetwork)}),
        "units": [
            {"name": unit.name, "pieces": [_piece_metadata(piece) for piece in unit.pieces], "holders": list(holders)}
            for unit, holders in zip(plan.units, plan.holders, strict=True)
        ],
    }


def _piece_metadata(piece: Piece) -> dict[str, Any]:
    return {
        "parameter": piece.parameter,
        "kind": piece.kind,
        "dim": piece.dim,
        "start": piece.start,
        "length": piece.length,
    }


def _check_table(plan: Plan) -> None:
    """Refuse a plan that breaks a rule of its table; ValueError names the unit or rank."""
    k, p = plan.num_subnetworks, plan.num_holders
    _check_words(plan)
    if p is not None and not 1 <= p <= k:
        raise ValueError(f"plan: num_holders must be 1 to num_subnetworks, got {p} of {k}")
    if len(plan.units) != len(plan.holders):
        raise ValueError(f"plan: {len(plan.units)} units but holders for {len(plan.holders)}")
    names: set[str] = set()
    for unit, holders in zip(plan.units, plan.holders, strict=True):
        if unit.name in names:
            raise ValueError(f"plan: two units are named {unit.name!r}; names must differ")
        names.add(unit.name)
        _check_holders(unit.name, holders, k, p)
    if k > sum(map(len, plan.holders)):  # nor is a table made for a count that only a file names
        words = in_words([*map(len, plan.holders)])
        raise ValueError(f"plan: {len(names)} units with {words} cannot give each of {k} subnetworks a unit")
    if p is None and len({*map(len, plan.holders)}) == 1:
        raise ValueError(f"plan.num_holders: got null, but every unit has {len(plan.holders[0])} holders; say so")
    idle = sorted(set(range(k)) - {subnetwork for holders in plan.holders for subnetwork in holders})
    if idle:
        raise ValueError(f"plan: subnetworks [{listed(idle)}] hold no unit; every subnetwork needs one or more")
    _check_ranks(plan.subnetwork_of_rank, k)
    if plan.node_of_subnetwork is not None and len(plan.node_of_subnetwork) != k:
        raise ValueError(f"plan.node_of_subnetwork: got {len(plan.node_of_subnetwork)} nodes for {k} subnetworks")


def _check_words(plan: Plan) -> None:
    if plan.regime not in ("forward", "backward"):
        raise ValueError(f'plan.regime: got {plan.regime!r}, expected "forward" or "backward"')
    names = [plan.strategy] if isinstance(plan.strategy, str) else list(plan.strategy.values())
    if not names or any(name not in ("block", "neuron") for name in names):
        raise ValueError(f'plan.strategy: got {plan.strategy!r}, expected "block", "neuron" or a mapping to them')


def _check_holders(name: str, holders: tuple[int, ...], k: int, p: int | None) -> None:
    if list(holders) != sorted(set(holders)):
        raise ValueError(f"plan: holders of unit {name!r} must ascend without repeats, got [{listed(holders)}]")
    if p is None and not holders:
        raise ValueError(f"plan: unit {name!r} has no holders, but every unit needs one or more")
    if p is not None and len(holders) != p:
        raise ValueError(f"plan: unit {name!r} has {len(holders)} holders, but every unit needs num_holders = {p}")
    if holders[0] < 0 or holders[-1] >= k:
        raise ValueError(f"plan: holders of unit {name!r} must be 0 to {k - 1}, got [{listed(holders)}]")


def _check_ranks(subnetwork_of_rank: tuple[int, ...], k: int) -> None:
    counts = [0] * k
    for rank, subnetwork in enumerate(subnetwork_of_rank):
        if not 0 <= subnetwork < k:
            raise ValueError(f"plan.subnetwork_of_rank: rank {rank} has {subnetwork}, expected 0 to {k - 1}")
        counts[subnetwork] += 1
    if min(counts) != max(counts) or not counts[0]:
        raise ValueError(f"plan.subnetwork_of_rank: every subnetwork needs equally many ranks, got [{listed(counts)}]")


def _table(plan: Plan, costs: Sequence[UnitCost] | None, *, rows: bool) -> str:
    """Text form of a plan: a row per unit, a column per subnetwork, then balance, gap, placement and hash."""
    coverage = plan.coverage if costs is None else plan.mean_coverage([cost.flops for cost in costs])
    lines = [
        f"plan: {len(plan.units)} units, {plan.num_subnetworks} subnetworks, {in_words([*map(len, plan.holders)])} "
        f"(coverage {coverage:.4g}), regime {plan.regime}, strategy {plan.strategy}, "
        f"{len(plan.subnetwork_of_rank)} ranks"
    ]
    width = max((len(unit.name) for unit in plan.units), default=0)
    if rows and plan.num_subnetworks <= _MAX_LISTED:
        for unit, holders in list(zip(plan.units, plan.holders, strict=True))[:_MAX_LISTED]:
            marks = "".join("#" if subnetwork in holders else "." for subnetwork in range(plan.num_subnetworks))
            lines.append(f"  {unit.name:<{width}}  {marks}")
        if len(plan.units) > _MAX_LISTED:
            lines.append(f"  +{len(plan.units) - _MAX_LISTED} more units")
    if costs is not None:
        lines.append(f"  FLOPs max/mean {_imbalance(plan, [cost.flops for cost in costs])}")
        lines.append(f"  bytes max/mean {_imbalance(plan, [cost.num_bytes for cost in costs])}")
    weights = None if costs is None else [cost.num_parameters for cost in costs]
    lines.append(f"  spectral gap {plan.spectral_gap(weights):.4f}")
    if plan.placement is not None:
        lines.append(f"  {plan.placement.line()}")
    if plan.weighed is not None:
        lines.append(f"  {plan.weighed.line()}")
    lines.append(f"  hash {plan.hash[:16]}")
    return "\n".join(lines)


def _imbalance(plan: Plan, amounts: Sequence[int]) -> str:
    loads = [0] * plan.num_subnetworks
    for amount, holders in zip(amounts, plan.holders, strict=True):
        for subnetwork in holders:
            loads[subnetwork] += amount
    total = sum(loads)
    return f"{max(loads) * len(loads) / total:.4f}" if total else "1 (all zero)"
