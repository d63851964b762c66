"""Plans: hash, JSON, checks of the table, text."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.units import Piece, Unit, UnitCost

UNITS = tuple(
    Unit(f"layers.{i}", (Piece(f"layers.{i}.w", 1, 2, 3), Piece(f"layers.{i}.b", None, 0, 4, "buffer")))
    for i in range(3)
)
PLAN = Plan("forward", "block", 3, 5, UNITS, ((0, 1), (1, 2), (0, 2)), (0, 1, 2))
MIXED = replace(PLAN, holders=((0, 1, 2), (0, 1), (2,)))


@pytest.mark.parametrize("plan", [PLAN, MIXED, replace(PLAN, strategy={"attention": "neuron", "mlp": "block"})])
def test_save_and_load(tmp_path: Path, plan: Plan) -> None:
    path = tmp_path / "new" / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert os.listdir(path.parent) == ["plan.json"]
    assert path.stat().st_mode & 0o444 == 0o444


def test_a_table_made_elsewhere_needs_no_hash_and_no_seed() -> None:
    data = PLAN.to_json()
    del data["hash"], data["seed"]
    assert Plan.from_json(data) == replace(PLAN, seed=0)
    assert Plan.from_json(data | {"num_holders": 2}) == replace(PLAN, seed=0), "an earlier file"


def test_hash_covers_what_decides_the_training() -> None:
    same = [PLAN, replace(PLAN, seed=6), replace(PLAN, subnetwork_of_rank=(2, 1, 0))]
    assert len({plan.hash for plan in same}) == 1
    a, b = {"attention": "neuron", "mlp": "block"}, {"mlp": "block", "attention": "neuron"}
    assert replace(PLAN, strategy=a).hash == replace(PLAN, strategy=b).hash
    different = [
        PLAN,
        MIXED,
        replace(PLAN, regime="backward"),
        replace(PLAN, strategy="neuron"),
        replace(PLAN, strategy=a),
        replace(PLAN, holders=((0, 1), (0, 2), (1, 2))),
        replace(PLAN, units=(replace(UNITS[0], name="x"), *UNITS[1:])),
        replace(PLAN, units=(replace(UNITS[0], pieces=UNITS[0].pieces[:1]), *UNITS[1:])),
        replace(PLAN, holders=((0, 1, 2),) * 3),
    ]
    assert len({plan.hash for plan in different}) == len(different)


@pytest.mark.parametrize(
    ("keys", "value", "expected"),
    [
        (["version"], 3, r"plan\.version: got 3"),
        (["color"], 1, r"plan\.color: got 1"),
        (["regime"], "sideways", r"plan\.regime: got 'sideways'"),
        (["strategy"], {"mlp": ["block"]}, r"plan\.strategy.*: got"),
        (["num_subnetworks"], True, r"plan\.num_subnetworks: got True"),
        (["num_subnetworks"], 2, r"holders of 'layers\.1': got \[1, 2\], expected ascending, 0 to 1"),
        (["num_subnetworks"], 4, "1 of 4 subnetworks hold no unit"),
        (["units"], [], "3 of 3 subnetworks hold no unit"),
        (["units", 1, "name"], "layers.0", "two units have the same name"),
        (["units", 1, "holders"], [2, 1], r"'layers\.1': got \[2, 1\], expected ascending"),
        (["units", 1, "holders"], [], r"'layers\.1': got \[\]"),
        (["units", 1, "holders"], [-1, 1], "0 to 2"),
        (["units", 1, "holders", 1], 1.5, r"plan\.units\[1\]\.holders\[1\]: got 1\.5"),
        (["units", 1, "pieces", 0, "kind"], "weight", r"plan\.units\[1\]\.pieces\[0\]\.kind: got 'weight'"),
        (["units", 1, "pieces", 0, "length"], 0, r"piece of 'layers\.1\.w'"),
        (["subnetwork_of_rank"], [0, 1, 1], r"got \[0, 1, 1\], expected each of 3 equally often"),
        (["subnetwork_of_rank"], [0, 1, 3], "expected each of 3 equally often"),
        (["hash"], "0" * 64, r"plan\.hash: got '0000"),
        (["units", 0, "holders"], [0, 2], r"plan\.hash: got"),
    ],
)
def test_damaged_plans(tmp_path: Path, keys: list[Any], value: Any, expected: str) -> None:
    data = PLAN.to_json()
    part: Any = data
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    (tmp_path / "damaged.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"damaged\.json: .*{expected}"):
        Plan.load(tmp_path / "damaged.json")


@pytest.mark.parametrize("text", ["", "{", "\x00", "[" * 100_000, '{"version": ' + "1" * 5000 + "}"])
def test_files_that_are_not_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match=r"plan\.json' is not JSON"):
        Plan.load(tmp_path / "plan.json")
    with pytest.raises(ValueError, match="cannot be read"):
        Plan.load(tmp_path)


def test_table() -> None:
    costs = [UnitCost(4, 16, 8), UnitCost(4, 16, 8), UnitCost(4, 16, 24)]
    text = PLAN.table(costs, details=True)
    for line in (
        "layers.0  ##.",
        "layers.1  .##",
        "1.20 times the mean",
        "gap 0.7500",
        PLAN.hash[:16],
        "in 2 holder sets",
    ):
        assert line in text
    assert PLAN.table(costs) == "\n".join(text.splitlines()[:-2])
    assert "1 to 3 holders, 6 in all (coverage 0.6667)" in MIXED.table()
