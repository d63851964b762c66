"""Rules of coverage and holders in the config block: what they may say, and what is said of wrong ones."""

from __future__ import annotations

from typing import Any

import pytest

from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.plan.coverage import CoverageRule, HoldersRule


def read(**block: Any) -> Any:
    config = parse({KEY: block})
    assert config is not None
    return config


def test_numbers_stay_numbers() -> None:
    assert (read(coverage=0.5).coverage, read(coverage=1).coverage, read(holders=2).holders) == (0.5, 1.0, 2)


def test_rules_and_one_that_stands_alone() -> None:
    alone = {"coverage": 0.5, "whole_ends": 1}
    expected = (CoverageRule(coverage=0.5, whole_ends=1),)
    assert read(coverage=alone).coverage == read(coverage=[alone]).coverage == expected
    rules = [{"units": "mlp", "holders": 2}, {"profile": "linear", "first": 4, "last": 1}]
    first, second = read(holders=rules).holders
    assert first == HoldersRule(units="mlp", holders=2)
    assert (first.ends, second.ends) == ((2, 2), (4, 1))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"coverage": []}, r"coverage: got \[\], expected a number above 0 and at most 1, or rules"),
        ({"coverage": True}, "coverage: got True, expected a number"),
        ({"coverage": float("nan")}, "coverage: got nan"),
        ({"coverage": [0.5]}, r'coverage\[0\]: got 0\.5, expected an object such as \{"coverage": \.\.\.\}'),
        ({"coverage": [{"coverage": 0.5}, {"units": "mlp"}]}, r"coverage\[1\]: got \{'units': 'mlp'\}, expected"),
        ({"coverage": [{"coverage": 2}]}, r"coverage\[0\]\.coverage: got 2, expected a number above 0 and at most 1"),
        ({"coverage": [{"coverage": 0.5, "first": 1.0}]}, r"coverage\[0\]: got "),
        ({"coverage": [{"profile": "linear", "first": 1.0}]}, r"coverage\[0\]: got "),
        ({"coverage": [{"profile": "cosine", "first": 1.0, "last": 0.5}]}, r'profile: got .cosine., expected "linear"'),
        ({"coverage": [{"units": "a(", "coverage": 0.5}]}, r"coverage\[0\]\.units: got 'a\(', expected a regular"),
        ({"coverage": [{"coverge": 0.5}]}, r"coverage\[0\]\.coverge: unknown key; did you mean 'coverage'"),
        ({"coverage": {"coverge": 0.5}}, r"coverage\.coverge: unknown key"),
        ({"coverage": {"whole_ends": -1, "coverage": 0.5}}, r"coverage\.whole_ends: got -1, expected a whole number"),
        ({"holders": [{"holders": 2.5}]}, r"holders\[0\]\.holders: got 2\.5, expected a whole number"),
        ({"holders": [{"coverage": 0.5}]}, r"holders\[0\]\.coverage: unknown key"),
        ({"holders": [{"holders": 2}], "coverage": 0.5}, "got 0.5 and rules, expected one of both"),
        ({"coverage": {"coverage": 0.5}, "assignment": "a.json"}, "the plan 'a.json' decides that; remove it"),
    ],
)
def test_wrong_rules_are_named(block: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(**block)
