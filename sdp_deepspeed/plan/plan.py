"""The plan: which subnetwork holds which unit, as data that is hashed, printed, saved and loaded.

The format of plan.json:

    {"version": 1, "regime": "forward", "strategy": "block", "num_subnetworks": k, "seed": 0, "hash": "<SHA-256>",
     "subnetwork_of_rank": [<subnetwork of each data-parallel rank>],
     "units": [{"name": "model.layers.0.attention",
                "pieces": [{"parameter": <dense name>, "kind": "parameter" or "buffer",
                            "dim": <stored dimension> or null, "start": s, "length": l}],
                "holders": [<subnetworks, ascending>]}]}

`"dim": null` means the whole tensor, with `length` its number of elements. Pieces of different units must not overlap.
Elements in no unit are shared. Hash and seed may be omitted. The hash covers regime, strategy, k, units and holders;
remove it from a file that you edit.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from sdp_deepspeed.atomic_files import regular, write_text
from sdp_deepspeed.messages import listed
from sdp_deepspeed.plan.connectivity import incidence, spectral_gap
from sdp_deepspeed.plan.coverage import describe_holders
from sdp_deepspeed.units import Holders, Piece, Regime, StrategyName, Subnetworks, TensorKind, Unit, UnitCost

_MAX_LISTED = 64  # maximum rows and columns of the printed table


@dataclass(frozen=True)
class Plan:
    """The table of units by subnetworks, the same on every rank.

    Args:
        strategy: "block", "neuron", or a mapping by branch type.
        num_subnetworks: k.
        seed: of the assignment.
        units: units in a fixed order; tensors that belong to no unit are shared.
        holders: subnetworks that hold each unit, ascending, as in plan.json; `ranks_of` has the ranks.

    Raises:
        ValueError: the table is inconsistent.
    """

    regime: Regime
    strategy: str | Mapping[str, str]
    num_subnetworks: int
    seed: int
    units: tuple[Unit, ...]
    holders: tuple[Subnetworks, ...]
    subnetwork_of_rank: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_table(self)

    @property
    def num_ranks(self) -> int:
        """Number of data-parallel ranks."""
        return len(self.subnetwork_of_rank)

    @cached_property
    def all_ranks(self) -> Holders:
        """All data-parallel ranks, the holders of what is shared."""
        return tuple(range(self.num_ranks))

    @property
    def coverage(self) -> float:
        """C = p / k; the unweighted mean if units have different p."""
        return sum(map(len, self.holders)) / (len(self.units) * self.num_subnetworks)

    def coverage_by_flops(self, costs: Sequence[UnitCost]) -> float:
        """Mean C weighted by the FLOPs of each unit; unweighted if all are zero."""
        total = sum(cost.flops for cost in costs)
        held = sum(cost.flops * len(holders) for cost, holders in zip(costs, self.holders, strict=True))
        return held / (total * self.num_subnetworks) if total else self.coverage

    def coverage_of(self, unit: int) -> float:
        """C of the unit with this index."""
        return len(self.holders[unit]) / self.num_subnetworks

    @property
    def is_dense(self) -> bool:
        """Whether every subnetwork holds everything."""
        return all(len(holders) == self.num_subnetworks for holders in self.holders)

    @property
    def trains_subnetworks(self) -> bool:
        """Whether the training loss is that of a subnetwork, not of the dense model."""
        return self.regime == "forward" and not self.is_dense

    def holds(self, unit: int, subnetwork: int) -> bool:
        """Whether `subnetwork` holds the unit with index `unit`."""
        return subnetwork in self.holders[unit]

    def holds_rank(self, unit: int, rank: int) -> bool:
        """Whether data-parallel rank `rank` holds the unit with index `unit`."""
        return self.holds(unit, self.subnetwork_of_rank[rank])

    def units_of(self, subnetwork: int) -> tuple[int, ...]:
        """Indices of the units that `subnetwork` holds, ascending."""
        return tuple(u for u, holders in enumerate(self.holders) if subnetwork in holders)

    def ranks_of(self, unit: int) -> Holders:
        """Data-parallel ranks that hold the unit with index `unit`, ascending."""
        return self._ranks_of_set[self.holders[unit]]

    @cached_property
    def _ranks_of_set(self) -> dict[Subnetworks, Holders]:
        ranks_of: dict[Subnetworks, Holders] = {}
        for holders in dict.fromkeys(self.holders):
            held = frozenset(holders)
            ranks_of[holders] = tuple(r for r, subnetwork in enumerate(self.subnetwork_of_rank) if subnetwork in held)
        return ranks_of

    def spectral_gap(self, weights: Sequence[int] | None = None) -> float:
        """Spectral gap of the table; `weights` are trainable elements per unit, None for equal units."""
        return spectral_gap(self.holders, weights or [1] * len(self.units), self.num_subnetworks)

    @cached_property
    def hash(self) -> str:
        """SHA-256 (hex) of units, holders, k, regime and strategy."""
        strategy = self.strategy if isinstance(self.strategy, str) else sorted(self.strategy.items())
        sets = {holders: index for index, holders in enumerate(dict.fromkeys(self.holders))}
        units = [
            [unit.name, [[*vars(piece).values()] for piece in unit.pieces], sets[holders]]
            for unit, holders in zip(self.units, self.holders, strict=True)
        ]
        content = [self.regime, strategy, self.num_subnetworks, list(sets), units]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Content of plan.json."""
        return {
            "version": 1,
            "hash": self.hash,
            "regime": self.regime,
            "strategy": self.strategy if isinstance(self.strategy, str) else dict(self.strategy),
            "num_subnetworks": self.num_subnetworks,
            "seed": self.seed,
            "subnetwork_of_rank": list(self.subnetwork_of_rank),
            "units": [
                {"name": unit.name, "pieces": [dict(vars(piece)) for piece in unit.pieces], "holders": list(holders)}
                for unit, holders in zip(self.units, self.holders, strict=True)
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Inverse of `to_json`; hash and seed may be omitted.

        Raises:
            ValueError: invalid data, with its JSON path.
        """
        try:
            content = _PlanFile.model_validate(data)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in problem["loc"])
            raise ValueError(f"plan{path}: got {problem['input']!r:.80}; {problem['msg']}") from None
        plan = cls(
            content.regime,
            content.strategy,
            content.num_subnetworks,
            content.seed,
            tuple(Unit(unit.name, tuple(Piece(**dict(piece)) for piece in unit.pieces)) for unit in content.units),
            tuple(tuple(unit.holders) for unit in content.units),
            tuple(content.subnetwork_of_rank),
        )
        if content.hash not in (None, plan.hash):
            raise ValueError(
                f"plan.hash: got {content.hash!r}, but the units and holders have {plan.hash!r}; remove the hash if "
                "they were changed on purpose"
            )
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write plan.json atomically; call it on one rank."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, json.dumps(self.to_json(), indent=1) + "\n", concurrent=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read plan.json; raises ValueError if it cannot be read or is invalid."""
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

    def table(self, costs: Sequence[UnitCost] | None = None, *, details: bool = False) -> str:
        """Text with the table of units by subnetworks, and balance.

        Args:
            costs: of each unit, for coverage by FLOPs and balance.
            details: whether to add spectral gap and hash.
        """
        k, num_units = self.num_subnetworks, len(self.units)
        coverage = self.coverage if costs is None else self.coverage_by_flops(costs)
        lines = [
            f"plan: {num_units} units, {k} subnetworks, {describe_holders([*map(len, self.holders)])} "
            f"(coverage {coverage:.4g}), regime {self.regime}, strategy {self.strategy}, "
            f"{self.num_ranks} ranks, each in {self.max_sets_per_rank} holder sets"
        ]
        if k <= _MAX_LISTED:
            other = "does not have it" if self.regime == "forward" else "runs it without training it"
            lines.append(f"  a line is a unit, a column a subnetwork: # trains the unit, . {other}")
            width = max(len(unit.name) for unit in self.units)
            for unit, holders in list(zip(self.units, self.holders, strict=True))[:_MAX_LISTED]:
                marks = "".join("#" if subnetwork in holders else "." for subnetwork in range(k))
                lines.append(f"  {unit.name:<{width}}  {marks}")
            if num_units > _MAX_LISTED:
                lines.append(f"  +{num_units - _MAX_LISTED} more units")
        if costs is not None:
            flops, size = ([cost.flops for cost in costs], [cost.num_bytes for cost in costs])
            lines.append(
                f"  units of the largest subnetwork: {self.imbalance(flops):.2f} times the mean FLOPs, "
                f"{self.imbalance(size):.2f} times the mean bytes"
            )
        if details:
            weights = None if costs is None else [cost.num_parameters for cost in costs]
            lines += [f"  spectral gap {self.spectral_gap(weights):.4f}", f"  hash {self.hash[:16]}"]
        return "\n".join(lines)

    @property
    def max_sets_per_rank(self) -> int:
        """Maximum number of holder sets of a rank, each of which needs a process group."""
        return int(incidence([*dict.fromkeys(self.holders)], self.num_subnetworks).sum(axis=0).max())

    def imbalance(self, amounts: Sequence[int]) -> float:
        """Max/mean load of a subnetwork; `amounts` per unit, such as FLOPs."""
        loads = incidence(self.holders, self.num_subnetworks).T @ list(amounts)
        return float(loads.max() / loads.mean()) if loads.any() else 1.0


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _PieceFile(_File):
    parameter: str
    kind: TensorKind
    dim: int | None
    start: int
    length: int


class _UnitFile(_File):
    name: str
    pieces: list[_PieceFile]
    holders: list[int]


class _PlanFile(_File):
    version: Literal[1]
    hash: str | None = None
    regime: Regime
    strategy: StrategyName | dict[str, StrategyName]
    num_subnetworks: int
    num_holders: int | None = None  # of earlier files; it follows from the holders
    seed: int = 0
    subnetwork_of_rank: list[int]
    units: list[_UnitFile]


def _check_table(plan: Plan) -> None:
    k = plan.num_subnetworks
    if len(plan.units) != len(plan.holders):
        raise ValueError(f"plan: {len(plan.units)} units but holders for {len(plan.holders)}")
    if len({unit.name for unit in plan.units}) < len(plan.units):
        raise ValueError("plan: two units have the same name; names must be unique")
    for holders in dict.fromkeys(plan.holders):
        name = plan.units[plan.holders.index(holders)].name
        if not holders or list(holders) != sorted({*holders}) or holders[0] < 0 or holders[-1] >= k:
            raise ValueError(f"plan: holders of {name!r}: got [{listed(holders)}], expected ascending, 0 to {k - 1}")
    held = {subnetwork for holders in {*plan.holders} for subnetwork in holders}
    if len(held) < k:
        raise ValueError(f"plan: {k - len(held)} of {k} subnetworks hold no unit; each must hold at least one")
    counts = [plan.subnetwork_of_rank.count(subnetwork) for subnetwork in range(k)]
    if sum(counts) != len(plan.subnetwork_of_rank) or min(counts) != max(counts) or not counts[0]:
        raise ValueError(
            f"plan.subnetwork_of_rank: got [{listed(plan.subnetwork_of_rank)}], expected each of {k} equally often"
        )
