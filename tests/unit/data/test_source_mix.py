"""Shares of several texts: whole numbers of a period, as near to the weights as can be."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.data import DataConfig
from sdp_deepspeed.data.source_mix import PERIOD, shares
from tests.helpers.properties import examples


@given(st.lists(st.integers(1, 1000) | st.floats(0.01, 1000), min_size=1, max_size=6))
@examples(60)
def test_shares_are_the_weights_to_one_sample(weights: list[float]) -> None:
    counts, problems = shares([{"weight": weight} for weight in weights])
    assert sum(counts) == PERIOD
    exact = [Fraction(weight) / sum(map(Fraction, weights)) * PERIOD for weight in weights]
    assert all(abs(count - share) < 1 for count, share in zip(counts, exact, strict=True))
    assert len(problems) == counts.count(0)


def test_weights_need_not_sum_to_one() -> None:
    assert shares([{"weight": 6}, {"weight": 2}])[0] == [3072, 1024]
    assert shares([{"weight": 0.1}, {}])[0] == [372, 3724]


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ([], "sources is empty"),
        ([{"sorce": "stdlib"}], "sources[0] has an unknown key 'sorce' (did you mean 'source'?)"),
        ([{"sequence_length": 8}], "sources[0] has an unknown key 'sequence_length'"),
        ([{}, {"weight": 0}], "sources[1]: weight is 0, expected a number above 0"),
        ([{"weight": True}], "weight is True"),
        ([{"weight": float("nan")}], "weight is nan"),
        ([{"weight": "1"}], "weight is '1'"),
        ([{"weight": 1}, {"weight": 1e-6}], "sources[1]: weight is 1e-06 of 1, expected a share of at least 1/4096"),
        ([{"source": "files"}], "sources[0]: source 'files' needs path"),
        ([{"source": "hub", "path": 5}], "sources[0]: path is 5"),
        ([{"path": "x"}], "sources[0]: path has no effect with source 'stdlib'"),
    ],
)
def test_mistakes_are_told(sources: Any, said: str) -> None:
    with pytest.raises(ValueError, match=r"^data: ") as error:
        DataConfig.from_dict({"sources": sources, "validation_fraction": 0})
    assert said in str(error.value)


def test_settings_of_a_source_are_given_in_it() -> None:
    with pytest.raises(ValueError, match="max_bytes has no effect beside sources: move it into one of them"):
        DataConfig.from_dict({"sources": [{}], "max_bytes": 5, "validation_fraction": 0})
    with pytest.raises(ValueError, match="sources need validation_blocks"):
        DataConfig.from_dict({"sources": [{}]})
    config = DataConfig.from_dict(
        {"sources": [{"max_bytes": 5}, {"source": "files", "path": "x", "weight": 2}], "validation_blocks": 3}
    )
    assert [(one.source, one.path, one.max_bytes, one.sources) for one in config.each_source()] == [
        ("stdlib", None, 5, None),
        ("files", "x", None, None),
    ]
