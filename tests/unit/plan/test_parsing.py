"""plan.json that is damaged: every message names the place. And one of an earlier version."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sdp_deepspeed.plan.assignment.graph import to_holders
from sdp_deepspeed.plan.assignment.search import search
from sdp_deepspeed.plan.counts import resolve
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.planner import make_plan
from sdp_deepspeed.units import Piece, Unit
from tests.unit.plan.test_plan import COST, block, units


def example_json() -> dict[str, Any]:
    pieces = [[Piece(f"layers.{i}.w", 1, 2, 3), Piece(f"layers.{i}.b", None, 0, 4, "buffer")] for i in range(3)]
    units = tuple(Unit(f"layers.{i}", tuple(pair)) for i, pair in enumerate(pieces))
    return Plan("forward", "block", 3, 2, 5, units, ((0, 1), (1, 2), (0, 2)), (0, 1, 2)).to_json()


def change(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def apply(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = to

    return apply


def remove(*path: Any) -> Callable[[dict[str, Any]], None]:
    def apply(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return apply


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (change("version", to=3), r"plan\.version: got 3, this release reads versions 1 to 2"),
        (remove("version"), r"plan\.version: got None"),
        (remove("regime"), r"plan: missing keys \['regime'\]"),
        (change("color", to=1), r"unknown keys \['color'\]"),
        (change("regime", to="sideways"), r"plan\.regime: got 'sideways'"),
        (change("regime", to=1), r"plan\.regime: got 1, expected str"),
        (change("strategy", to="nothing"), r"plan\.strategy: got 'nothing'"),
        (change("strategy", to={}), r"plan\.strategy: got \{\}"),
        (change("strategy", to={"mlp": ["block"]}), r"plan\.strategy: got"),
        (change("num_subnetworks", to="3"), r"plan\.num_subnetworks: got '3', expected int"),
        (change("num_subnetworks", to=True), r"plan\.num_subnetworks: got True, expected int"),
        (change("num_subnetworks", to=1), "num_holders must be 1 to num_subnetworks, got 2 of 1"),
        (change("num_subnetworks", to=4), r"subnetworks \[3\] hold no unit"),
        (change("num_holders", to=0), "got 0 of 3"),
        (change("num_holders", to=1), "unit 'layers.0' has 2 holders, .* num_holders = 1"),
        (change("units", to={}), r"plan\.units: got \{\}, expected list"),
        (change("units", to=[]), "0 units with no holders cannot give each of 3 subnetworks a unit"),
        (change("num_subnetworks", to=10**12), "cannot give each of 1000000000000 subnetworks a unit"),
        (change("num_subnetworks", to=10**4000), "cannot give each of"),
        (change("units", 1, to="x"), r"plan\.units\[1\]: expected a JSON object, got 'x'"),
        (remove("units", 1, "name"), r"plan\.units\[1\]: missing keys \['name'\]"),
        (change("units", 1, "name", to="layers.0"), "two units are named 'layers.0'"),
        (change("units", 1, "holders", to=[2, 1]), r"'layers\.1' must ascend without repeats, got \[2, 1\]"),
        (change("units", 1, "holders", to=[1, 1]), "ascend without repeats"),
        (change("units", 1, "holders", to=[]), "has 0 holders"),
        (change("units", 1, "holders", to=[1, 3]), r"must be 0 to 2, got \[1, 3\]"),
        (change("units", 1, "holders", to=[-1, 1]), r"must be 0 to 2, got \[-1, 1\]"),
        (change("units", 1, "holders", to=[0, 1.5]), r"plan\.units\[1\]\.holders: got 1\.5"),
        (change("units", 1, "pieces", 0, "kind", to="weight"), r"units\[1\]\.pieces\[0\]\.kind: got 'weight'"),
        (change("units", 1, "pieces", 0, "dim", to="0"), r"pieces\[0\]\.dim: got '0', expected int or NoneType"),
        (change("units", 1, "pieces", 0, "length", to=0), r"pieces\[0\]: piece of 'layers\.1\.w'"),
        (change("subnetwork_of_rank", to=[0, 1, 3]), "rank 2 has 3, expected 0 to 2"),
        (change("subnetwork_of_rank", to=[0, 1, 1]), r"equally many ranks, got \[1, 2, 0\]"),
        (change("subnetwork_of_rank", to=[]), "equally many ranks"),
        (change("subnetwork_of_rank", 0, to="0"), r"plan\.subnetwork_of_rank: got '0'"),
        (change("hash", to="0" * 64), "it was changed after it was written"),
        (change("units", 0, "holders", to=[0, 2]), "it was changed after it was written"),
    ],
)
def test_damaged_plans(tmp_path: Path, damage: Callable[[dict[str, Any]], None], expected: str) -> None:
    data = example_json()
    damage(data)
    with pytest.raises(ValueError, match=expected):
        Plan.from_json(data)
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"damaged\.json: plan"):
        Plan.load(path)


@pytest.mark.parametrize("text", ["", "{", "[1", "\x00"])
def test_files_that_are_not_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"plan\.json' is not JSON"):
        Plan.load(path)


def test_files_that_are_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"plan\.json: plan: expected a JSON object, got list"):
        Plan.load(path)
    with pytest.raises(ValueError, match="cannot be read"):
        Plan.load(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"version": ' + "1" * 5000 + "}"])
def test_json_that_python_does_not_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"plan\.json' is not JSON"):
        Plan.load(path)


def test_plans_with_more_holder_sets_still_load(tmp_path: Path) -> None:
    """As "balanced" made them before it was held to 4k sets; the hash is of that version."""
    holders = to_holders(search([COST] * 64, 8, [4] * 64))
    assert len(set(holders)) > 32
    plan = Plan("forward", "block", 8, 4, 0, units(64), holders, tuple(range(8)))
    assert plan.hash == "5195159a28167974fd8e00cce0e6c766181c42fb25df11c5ac64738fdebfc03e"
    plan.save(tmp_path / "plan.json")
    config = block(assignment=str(tmp_path / "plan.json"))
    assert make_plan(units(64), [COST] * 64, resolve(config, 8), config, 8) == plan
