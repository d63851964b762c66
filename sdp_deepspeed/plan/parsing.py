"""Reading plan.json: every field's type is checked, and what is wrong is named by its JSON path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdp_deepspeed.units import Piece, Unit

VERSION = 2  # since units may have different numbers of holders; such a plan has null for the one number
_PIECE = {"parameter": str, "kind": str, "dim": (int, type(None)), "start": int, "length": int}
_UNIT = {"name": str, "pieces": list, "holders": list}
_PLAN = {
    "regime": str,
    "strategy": (str, dict),
    "num_subnetworks": int,
    "num_holders": (int, type(None)),
    "seed": int,
    "units": list,
    "subnetwork_of_rank": list,
}


def fields(data: Any) -> dict[str, Any]:
    """Constructor arguments of Plan from the content of plan.json; ValueError names the JSON path."""
    if not isinstance(data, Mapping):
        raise ValueError(f"plan: expected a JSON object, got {type(data).__name__}")
    if data.get("version") not in range(1, VERSION + 1):
        raise ValueError(f"plan.version: got {data.get('version')!r}, this release reads versions 1 to {VERSION}")
    _check_types(data, _PLAN, "plan", optional={"version", "hash", "node_of_subnetwork"})
    units = [_unit(item, f"plan.units[{index}]") for index, item in enumerate(data["units"])]
    return {
        **{key: data[key] for key in ("regime", "strategy", "num_subnetworks", "num_holders", "seed")},
        "units": tuple(unit for unit, _ in units),
        "holders": tuple(holders for _, holders in units),
        "subnetwork_of_rank": _indices(data["subnetwork_of_rank"], "plan.subnetwork_of_rank"),
        "node_of_subnetwork": _nodes(data.get("node_of_subnetwork")),
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


def _nodes(values: Any) -> tuple[int, ...] | None:
    if not isinstance(values, list | None):
        raise ValueError(f"plan.node_of_subnetwork: got {values!r}, expected list")
    return None if values is None else _indices(values, "plan.node_of_subnetwork")


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
