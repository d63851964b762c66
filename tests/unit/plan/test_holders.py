"""How many subnetworks hold each unit, by the rules of the block."""

from __future__ import annotations

from typing import Any

import pytest

from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.plan.holders import holders_of_units

NAMES = [f"layers.{layer}.{part}" for layer in range(5) for part in ("attention", "mlp")]
LAYERS = [layer for layer in range(5) for _ in range(2)]


def of_layers(k: int, rules: Any, key: str = "coverage", num_layers: int = 5) -> list[int]:
    """p of each layer's MLP."""
    config = parse({KEY: {key: rules}})
    assert config is not None
    names = [f"layers.{layer}.mlp" for layer in range(num_layers)]
    return list(holders_of_units(config, k, names, range(num_layers), num_layers))


def test_one_number_is_that_of_all_units() -> None:
    assert of_layers(4, 0.5) == [2] * 5
    assert of_layers(4, 3, key="holders") == [3] * 5


@pytest.mark.parametrize(
    ("k", "rule", "expected"),
    [
        (8, {"profile": "linear", "first": 1.0, "last": 0.5}, [8, 7, 6, 5, 4]),
        (8, {"profile": "linear", "first": 0.25, "last": 0.75}, [2, 3, 4, 5, 6]),
        (8, {"profile": "linear", "first": 1.0, "last": 0.5, "whole_ends": 1}, [8, 7, 6, 5, 8]),
        (4, {"profile": "linear", "first": 0.5, "last": 1.0}, [2, 3, 3, 4, 4]),  # 2.5 and 3.5: the larger
        (2, {"profile": "linear", "first": 0.01, "last": 0.01}, [1] * 5),
        (64, {"profile": "linear", "first": 1.0, "last": 0.5}, [64, 56, 48, 40, 32]),  # in eighths
        (64, {"profile": "linear", "first": 0.9, "last": 0.9}, [56] * 5),
        (9, {"profile": "linear", "first": 1.0, "last": 0.5}, [9, 7, 7, 6, 5]),
        (20, {"profile": "linear", "first": 1.0, "last": 0.05}, [20, 15, 10, 5, 2]),
        (4, {"coverage": 0.5, "whole_ends": 2}, [4, 4, 2, 4, 4]),
        (3, {"coverage": 0.3333}, [1] * 5),
    ],
)
def test_profiles_and_whole_ends(k: int, rule: dict[str, Any], expected: list[int]) -> None:
    assert of_layers(k, rule) == expected


def test_a_profile_of_counts() -> None:
    assert of_layers(8, {"profile": "linear", "first": 8, "last": 4}, key="holders") == [8, 7, 6, 5, 4]


def test_a_model_of_one_layer_has_the_first_number() -> None:
    assert of_layers(4, {"profile": "linear", "first": 0.5, "last": 1.0}, num_layers=1) == [2]


def test_the_first_rule_that_matches_decides_and_the_rest_stays_whole() -> None:
    rules = [{"units": r"layers\.0\.", "coverage": 0.25}, {"units": "mlp", "coverage": 0.5}]
    config = parse({KEY: {"coverage": rules}})
    assert config is not None
    assert holders_of_units(config, 4, NAMES, LAYERS, 5) == (1, 1, 4, 2, 4, 2, 4, 2, 4, 2)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (
            {"coverage": {"units": "ffn", "coverage": 0.5}},
            r"coverage\[0\]\.units: 'ffn' matches no unit; .*0\.attention",
        ),
        ({"coverage": [{"coverage": 0.5}, {"units": "mlp", "coverage": 1}]}, r"coverage\[1\]: earlier rules match all"),
        (
            {"coverage": {"coverage": 0.5, "whole_ends": 3}},
            r"whole_ends: got 3, which keeps all .* has 5 layers; choose",
        ),
        (
            {"holders": [{"units": r"\.4\.", "holders": 2, "whole_ends": 1}, {"holders": 1}]},
            r"holders\[0\]\.whole_ends: got 1, which keeps all units of the rule whole",
        ),
        ({"coverage": [{"coverage": 0.3}]}, r"coverage\[0\]: 0\.3 of 4 subnetworks is 1\.2 holders"),
        ({"holders": [{"holders": 5}]}, r"holders\[0\]: got 5, but there are only 4 subnetworks"),
        ({"holders": [{"profile": "linear", "first": 5, "last": 1}]}, r"holders\[0\]: got 5"),
        ({"holders": 5}, "holders: got 5, but there are only 4 subnetworks"),
    ],
)
def test_rules_that_cannot_work_are_refused(block: dict[str, Any], message: str) -> None:
    config = parse({KEY: block})
    assert config is not None
    with pytest.raises(ValueError, match=message):
        holders_of_units(config, 4, NAMES, LAYERS, 5)
