"""The plan: which subnetwork holds which unit, as data that can be hashed, printed, saved and given back.

Pure: knows neither DeepSpeed nor torch.distributed. The search for a good table is in assignment.py,
reading and checking plan.json in plan_json.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdp_deepspeed.plan import parsing as plan_json
from sdp_deepspeed.plan.assignment import methods as assignment
from sdp_deepspeed.plan.placement import Asked, Load, Network, Placement, choose
from sdp_deepspeed.units import Unit, UnitCost

if TYPE_CHECKING:  # config reads plans, so at run time imports go from config to plan only
    from sdp_deepspeed.config import Layout, SubnetworkConfig

Strategy = str | Mapping[str, str]


@dataclass(frozen=True)
class Plan:
    """The table of units by subnetworks, the same on every rank.

    Args:
        regime: "forward" or "backward".
        strategy: "block", "neuron", or a mapping by part.
        num_subnetworks: k.
        num_holders: p; every unit is held by exactly p subnetworks.
        seed: what the assignment was made with.
        units: U units in a fixed order; what is in no unit is shared.
        holders: for each unit its p subnetworks, ascending.
        subnetwork_of_rank: the subnetwork of each data-parallel rank.
        placement: where replicas are and why; None without replicas, and in a plan that was read from a file, whose
            ranks may have been on other nodes.
    """

    regime: str
    strategy: Strategy
    num_subnetworks: int
    num_holders: int
    seed: int
    units: tuple[Unit, ...]
    holders: tuple[tuple[int, ...], ...]
    subnetwork_of_rank: tuple[int, ...]
    placement: Placement | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        plan_json.check_table(self)

    @property
    def coverage(self) -> float:
        """C = p / k."""
        return self.num_holders / self.num_subnetworks

    @property
    def hash(self) -> str:
        """SHA-256 (hex) of what decides the training: units, holders, k, p, regime and strategy."""
        facts = {key: value for key, value in plan_json.facts(self).items() if key in plan_json.HASHED}
        canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
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
        return spectral_gap(self.holders, weights or [1] * len(self.units), self.num_subnetworks, self.num_holders)

    def place(self, elements: Sequence[int], num_shared: int, network: Network, asked: Asked) -> Plan:
        """This plan with the replicas of its subnetworks on the ranks that run.

        Args:
            elements: for each unit its trainable elements.
            num_shared: trainable elements in no unit.
            network: nodes of the ranks.
            asked: what the config says.
        """
        load = Load(self.num_subnetworks, self.holders, elements, num_shared, self.regime == "backward")
        placement, ranks = choose(load, network, asked)
        return dataclasses.replace(self, subnetwork_of_rank=ranks, placement=placement)

    def to_json(self) -> dict[str, Any]:
        """The plan in the format of plan.json (DESIGN.md section 3)."""
        return {"version": plan_json.VERSION, "hash": self.hash, **plan_json.facts(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Inverse of `to_json`; ValueError names what is wrong in `data`."""
        plan = cls(**plan_json.fields(data))
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
        handle, aside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(self.to_json(), file, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.chmod(aside, 0o644)  # mkstemp makes it private, a plan is to be read by others
            os.replace(aside, target)
        except BaseException:
            Path(aside).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan.json; ValueError (with the path) if it cannot be read or does not hold a plan."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"plan {os.fspath(path)!r} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"plan {os.fspath(path)!r} is not JSON: {error}") from None
        try:
            return cls.from_json(data)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None

    def table(self, costs: Sequence[UnitCost] | None = None) -> str:
        """Text to print: units by subnetworks, balance, spectral gap, placement of replicas, hash."""
        return plan_json.table(self, costs)


def spectral_gap(holders: Sequence[Sequence[int]], weights: Sequence[int], k: int, p: int) -> float:
    """rho = 1 - lambda_2 of the gossip matrix (DESIGN.md section 1).

    Args:
        holders: for each unit its subnetworks.
        weights: for each unit its trainable elements.
        k: number of subnetworks.
        p: holders per unit; the row sums cancel it, so it only has to be positive.

    Returns:
        0.0 when the graph of subnetworks and (weighted) units falls apart, 1.0 when all hold everything.
    """
    import numpy as np

    if k == 1:
        return 1.0
    table = assignment.incidence([h for h, w in zip(holders, weights, strict=True) if w > 0], k)
    if not assignment.is_connected(table):
        return 0.0
    kept = np.array([w for w in weights if w > 0], dtype=np.float64)
    overlaps = (table.T * kept) @ table / p
    row_sums = overlaps.sum(axis=1)
    # W is not symmetric when loads differ, but is similar to this symmetric matrix: same eigenvalues, all real.
    eigenvalues = np.linalg.eigvalsh(overlaps / np.sqrt(np.outer(row_sums, row_sums)))
    return float(min(1.0, max(0.0, 1.0 - eigenvalues[-2])))


def make_plan(
    units: Sequence[Unit],
    costs: Sequence[UnitCost],
    layout: Layout,
    config: SubnetworkConfig,
    data_parallel_size: int,
    branches: Sequence[str | None] | None = None,
) -> Plan:
    """The plan that the config block asks for, the same on every rank; replicas are neighbours until `Plan.place`.

    Args:
        units: the model's units; a plan given by path brings its own, the caller checks that they fit the model.
        costs: cost of each unit.
        layout: counts from `config.resolve`.
        config: the block.
        data_parallel_size: D.
        branches: for each unit the branch of which every subnetwork must keep a unit (heads or neuron groups of one
            layer), None for block units; None if all are block units.

    Raises:
        ValueError: too few units, or too few of a branch, for all subnetworks, or a plan given by path that contradicts
            the config (that each subnetwork has a unit of each branch there is checked with the model).
    """
    k, p = layout.num_subnetworks, layout.num_holders
    ranks = tuple(rank * k // data_parallel_size for rank in range(data_parallel_size))
    if config.plan_path is not None:
        plan = dataclasses.replace(Plan.load(config.plan_path), subnetwork_of_rank=ranks)
        _check_agreement(plan, layout, config)
    else:
        if config.assignment == "cyclic":
            holders = assignment.cyclic(len(units), num_subnetworks=k, num_holders=p, branches=branches)
        else:
            holders = assignment.balanced(costs, num_subnetworks=k, num_holders=p, seed=config.seed, branches=branches)
        plan = Plan(config.regime, config.strategy, k, p, config.seed, tuple(units), holders, ranks)
    _warn_if_disconnected(plan)
    return plan


def _check_agreement(plan: Plan, layout: Layout, config: SubnetworkConfig) -> None:
    pairs = {
        "regime": (plan.regime, config.regime),
        "strategy": (plan.strategy, config.strategy),
        "subnetworks": (plan.num_subnetworks, layout.num_subnetworks),
        "holders": (plan.num_holders, layout.num_holders),
    }
    wrong = [f"{name} is {a!r} in the plan and {b!r} here" for name, (a, b) in pairs.items() if a != b]
    if wrong:
        raise ValueError(
            f"assignment: the plan {config.plan_path!r} contradicts the config: {'; '.join(wrong)}. "
            "Change the config, or make a plan for it"
        )


def _warn_if_disconnected(plan: Plan) -> None:
    k, p, num_units = plan.num_subnetworks, plan.num_holders, len(plan.units)
    if assignment.is_connected(assignment.incidence(plan.holders, k)):
        return
    finer = ', or use finer units: granularity "sublayer", or for MLPs cut by neurons more neuron_groups' * (p > 1)
    warnings.warn(
        f"{num_units} units with {p} holders each do not connect {k} subnetworks (spectral gap 0): "
        "some of them never exchange anything but shared parameters. "
        f"Connecting them takes {k - 1} or more of units * (holders - 1), here {num_units * (p - 1)}: "
        f"raise holders{finer}",
        stacklevel=3,
    )
