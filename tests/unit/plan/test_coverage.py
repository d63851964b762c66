"""Rules of coverage and holders in the config block: what they may say, and what is said of wrong ones."""

from __future__ import annotations

from typing import Any

import pytest

from sdp_deepspeed.plan.coverage import default_subnetworks, holders_of_units
from tests.helpers.models import parsed


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"coverage": []}, r"coverage: got \[\], expected a number above 0 and at most 1, or rules"),
        ({"coverage": [0.5]}, r'coverage\[0\]: got 0\.5, expected an object such as \{"coverage": \.\.\.\}'),
        ({"coverage": [{"coverage": 0.5}, {"units": "mlp"}]}, r"coverage\[1\]: got \{'units': 'mlp'\}, expected"),
        ({"coverage": [{"coverage": 2}]}, r"coverage\[0\]\.coverage: got 2, expected a number above 0 and at most 1"),
        ({"coverage": [{"coverage": 0.5, "first": 1.0}]}, r"coverage\[0\]: got "),
        ({"coverage": [{"profile": "linear", "first": 1.0}]}, r"coverage\[0\]: got "),
        ({"coverage": [{"profile": "cosine", "first": 1.0, "last": 0.5}]}, r'profile: got .cosine., expected "linear"'),
        ({"coverage": [{"units": "a(", "coverage": 0.5}]}, r"coverage\[0\]\.units: got 'a\(', expected a regular"),
        ({"coverage": [{"coverge": 0.5}]}, r"coverage\[0\]\.coverge: unknown key; did you mean 'coverage'"),
        ({"coverage": {"coverge": 0.5}}, r"coverage\.coverge: unknown key"),
        ({"coverage": {"whole_ends": -1, "coverage": 0.5}}, r"coverage\.whole_ends: got -1, expected an integer"),
        ({"holders": [{"holders": 2.5}]}, r"holders\[0\]\.holders: got 2\.5, expected an integer"),
        ({"holders": [{"coverage": 0.5}]}, r"holders\[0\]\.coverage: unknown key"),
        ({"coverage": {"coverage": 0.5}, "assignment": "a.json"}, "has no effect with a plan file"),
    ],
)
def test_wrong_rules_are_named(block: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parsed(**block)


NAMES = [f"layers.{layer}.{part}" for layer in range(5) for part in ("attention", "mlp")]


def numbers(k: int, names: list[str] = NAMES, **block: Any) -> tuple[int, ...]:
    config: Any = parsed(**block)
    given = config.coverage if config.holders is None else config.holders
    return holders_of_units(given, next(iter(block)), k, names, [int(name.split(".")[1]) for name in names], 5)


@pytest.mark.parametrize(
    ("k", "block", "expected"),
    [
        (4, {"coverage": 0.5}, [2] * 5),
        (4, {"holders": 3}, [3] * 5),
        (8, {"coverage": {"profile": "linear", "first": 1.0, "last": 0.5}}, [8, 7, 6, 5, 4]),
        (8, {"coverage": {"profile": "linear", "first": 1.0, "last": 0.5, "whole_ends": 1}}, [8, 7, 6, 5, 8]),
        (4, {"coverage": {"profile": "linear", "first": 0.5, "last": 1.0}}, [2, 3, 3, 4, 4]),  # 2.5 and 3.5: the larger
        (64, {"coverage": {"profile": "linear", "first": 1.0, "last": 0.5}}, [64, 56, 48, 40, 32]),  # in eighths
        (8, {"holders": {"profile": "linear", "first": 8, "last": 4}}, [8, 7, 6, 5, 4]),
        (4, {"coverage": {"coverage": 0.5, "whole_ends": 2}}, [4, 4, 2, 4, 4]),
        (3, {"coverage": {"coverage": 0.3333}}, [1] * 5),
    ],
)
def test_numbers_over_depth(k: int, block: dict[str, Any], expected: list[int]) -> None:
    assert list(numbers(k, NAMES[1::2], **block)) == expected


def test_the_first_rule_that_matches_decides_and_the_rest_stays_whole() -> None:
    rules = [{"units": r"layers\.0\.", "coverage": 0.25}, {"units": "mlp", "coverage": 0.5}]
    assert numbers(4, coverage=rules) == (1, 1, 4, 2, 4, 2, 4, 2, 4, 2)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"coverage": {"units": "ffn", "coverage": 0.5}}, r"coverage\[0\]\.units: 'ffn' matches no unit; .*0\.att"),
        ({"coverage": [{"coverage": 0.5}, {"units": "mlp", "coverage": 1}]}, r"coverage\[1\]: earlier rules match all"),
        ({"coverage": {"coverage": 0.5, "whole_ends": 3}}, r"whole_ends: got 3, but .* has 5 layers"),
        (
            {"coverage": [{"coverage": 0.3}]},
            r"coverage\[0\]: 0\.3 of 4 subnetworks is 1\.2 .* 0\.25 \(holders 1\), 0\.5",
        ),
        ({"holders": [{"holders": 5}]}, r"holders\[0\]: got 5, but there are only 4 subnetworks"),
        ({"holders": [{"profile": "linear", "first": 5, "last": 1}]}, r"holders\[0\]: got 5"),
        ({"holders": 5}, "holders: got 5, but there are only 4 subnetworks"),
        ({"coverage": 0.3}, "coverage: 0.3 of 4 subnetworks is 1.2 holders per unit"),
    ],
)
def test_rules_that_cannot_work_are_refused(block: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        numbers(4, **block)


@pytest.mark.parametrize(
    ("num_ranks", "block", "k"),
    [
        (4, {"coverage": 0.5}, 4),
        (16, {"coverage": 0.5}, 16),
        (64, {"coverage": 0.5}, 16),
        (64, {"coverage": 0.125}, 64),
        (64, {"coverage": 0.75}, 8),
        (64, {"coverage": 1.0}, 64),
        (64, {"coverage": 0.9375}, 16),  # 15 holders: no number of subnetworks has fewer
        (64, {"holders": 32}, 64),  # the user's own choice
        (24, {"coverage": {"units": "mlp", "coverage": 0.5}}, 12),
        (64, {"coverage": {"profile": "linear", "first": 1.0, "last": 0.5}}, 16),
        (6, {"coverage": 0.3}, 6),  # refused later, by name
    ],
)
def test_a_unit_has_at_most_eight_holders_by_default(num_ranks: int, block: dict[str, Any], k: int) -> None:
    config: Any = parsed(**block)
    assert default_subnetworks(config.holders or config.coverage, num_ranks, 8) == k
