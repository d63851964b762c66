"""plan.json: a plan's facts, their validation, and the text that people read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sdp_deepspeed.messages import listed
from sdp_deepspeed.units import Piece, Unit, UnitCost

if TYPE_CHECKING:
    from sdp_deepspeed.plan.plan import Plan

VERSION = 1
HASHED = ("regime", "strategy", "num_subnetworks", "num_holders", "units")
_PIECE = {"parameter": str, "kind": str, "dim": (int, type(None)), "start": int, "length": int}
_UNIT = {"name": str, "pieces": list, "holders": list}
_PLAN = {
    "regime": str,
    "strategy": (str, dict),
    "num_subnetworks": int,
    "num_holders": int,
    "seed": int,
    "units": list,
    "subnetwork_of_rank": list,
}
_MAX_LISTED = 64  # rows and columns that a terminal still shows


def facts(plan: Plan) -> dict[str, Any]:
    """All of plan.json but version and hash."""
    strategy = plan.strategy if isinstance(plan.strategy, str) else dict(plan.strategy)
    return {
        "regime": plan.regime,
        "strategy": strategy,
        "num_subnetworks": plan.num_subnetworks,
        "num_holders": plan.num_holders,
        "seed": plan.seed,
        "subnetwork_of_rank": list(plan.subnetwork_of_rank),
        "units": [
            {"name": unit.name, "pieces": [_piece_facts(piece) for piece in unit.pieces], "holders": list(holders)}
            for unit, holders in zip(plan.units, plan.holders, strict=True)
        ],
    }


def _piece_facts(piece: Piece) -> dict[str, Any]:
    return {
        "parameter": piece.parameter,
        "kind": piece.kind,
        "dim": piece.dim,
        "start": piece.start,
        "length": piece.length,
    }


def fields(data: Any) -> dict[str, Any]:
    """Constructor arguments of Plan from the content of plan.json; ValueError names the JSON path."""
    if not isinstance(data, Mapping):
        raise ValueError(f"plan: expected a JSON object, got {type(data).__name__}")
    if data.get("version") != VERSION:
        raise ValueError(f"plan.version: got {data.get('version')!r}, this release reads version {VERSION}")
    _check_types(data, _PLAN, "plan", optional={"version", "hash"})
    units = [_unit(item, f"plan.units[{index}]") for index, item in enumerate(data["units"])]
    return {
        **{key: data[key] for key in ("regime", "strategy", "num_subnetworks", "num_holders", "seed")},
        "units": tuple(unit for unit, _ in units),
        "holders": tuple(holders for _, holders in units),
        "subnetwork_of_rank": _indices(data["subnetwork_of_rank"], "plan.subnetwork_of_rank"),
    }


def _unit(item: Any, path: str) -> tuple[Unit, tuple[int, ...]]:
    _check_types(item, _UNIT, path)
    pieces = []
    for index, piece in enumerate(item["pieces"]):
        where = f"{path}.pieces[{index}]"
        _check_types(piece, _PIECE, where)
        if piece["kind"] not in ("parameter", "buffer"):
            raise ValueError(f'{where}.kind: got {piece["kind"]!r}, expected "parameter" or "buffer"')
        try:
            pieces.append(Piece(**piece))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return Unit(item["name"], tuple(pieces)), _indices(item["holders"], f"{path}.holders")


def _indices(values: list[Any], path: str) -> tuple[int, ...]:
    for value in values:
        if not _is_a(value, int):
            raise ValueError(f"{path}: got {value!r}, expected whole numbers")
    return tuple(values)


def _is_a(value: Any, types: Any) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)  # True is an int in Python, not in JSON


def _check_types(item: Any, expected: Mapping[str, Any], path: str, optional: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    if not isinstance(item, Mapping):
        raise ValueError(f"{path}: expected a JSON object, got {item!r}")
    missing = [key for key in expected if key not in item]
    unknown = [key for key in item if key not in expected and key not in optional]
    if missing or unknown:
        raise ValueError(f"{path}: missing keys {missing}, unknown keys {unknown}; expected {list(expected)}")
    for key, types in expected.items():
        if not _is_a(item[key], types):
            names = " or ".join(t.__name__ for t in (types if isinstance(types, tuple) else (types,)))
            raise ValueError(f"{path}.{key}: got {item[key]!r}, expected {names}")


def check_table(plan: Plan) -> None:
    """Refuse a plan whose table breaks DESIGN.md section 1; ValueError names the unit or rank."""
    k, p = plan.num_subnetworks, plan.num_holders
    _check_words(plan)
    if not 1 <= p <= k:
        raise ValueError(f"plan: num_holders must be 1 to num_subnetworks, got {p} of {k}")
    if len(plan.units) != len(plan.holders):
        raise ValueError(f"plan: {len(plan.units)} units but holders for {len(plan.holders)}")
    names: set[str] = set()
    for unit, holders in zip(plan.units, plan.holders, strict=True):
        if unit.name in names:
            raise ValueError(f"plan: two units are named {unit.name!r}; names must differ")
        names.add(unit.name)
        _check_holders(unit.name, holders, k, p)
    idle = sorted(set(range(k)) - {subnetwork for holders in plan.holders for subnetwork in holders})
    if idle:
        raise ValueError(f"plan: subnetworks [{listed(idle)}] hold no unit; every subnetwork needs one or more")
    _check_ranks(plan.subnetwork_of_rank, k)


def _check_words(plan: Plan) -> None:
    if plan.regime not in ("forward", "backward"):
        raise ValueError(f'plan.regime: got {plan.regime!r}, expected "forward" or "backward"')
    names = [plan.strategy] if isinstance(plan.strategy, str) else list(plan.strategy.values())
    if not names or any(name not in ("block", "neuron") for name in names):
        raise ValueError(f'plan.strategy: got {plan.strategy!r}, expected "block", "neuron" or a mapping to them')


def _check_holders(name: str, holders: tuple[int, ...], k: int, p: int) -> None:
    if list(holders) != sorted(set(holders)):
        raise ValueError(f"plan: holders of unit {name!r} must ascend without repeats, got [{listed(holders)}]")
    if len(holders) != p:
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


def table(plan: Plan, costs: Sequence[UnitCost] | None) -> str:
    """Text form of a plan: a row per unit, a column per subnetwork, then balance, gap, placement and hash."""
    lines = [
        f"plan: {len(plan.units)} units, {plan.num_subnetworks} subnetworks, {plan.num_holders} holders each "
        f"(coverage {plan.coverage:.4g}), regime {plan.regime}, strategy {plan.strategy}, "
        f"{len(plan.subnetwork_of_rank)} ranks"
    ]
    width = max((len(unit.name) for unit in plan.units), default=0)
    if plan.num_subnetworks <= _MAX_LISTED:
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
    lines.append(f"  hash {plan.hash[:16]}")
    return "\n".join(lines)


def _imbalance(plan: Plan, amounts: Sequence[int]) -> str:
    loads = [sum(amounts[u] for u in plan.units_of(subnetwork)) for subnetwork in range(plan.num_subnetworks)]
    total = sum(loads)
    return f"{max(loads) * len(loads) / total:.4f}" if total else "1 (all zero)"
