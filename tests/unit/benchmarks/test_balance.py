"""The best balance, against all tables of small problems; what is measured of a plan, by hand."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks import balance
from benchmarks.common.best_balance import best_maximum
from benchmarks.tables.balance import balance as table_of
from tests.helpers.properties import examples

pytestmark = pytest.mark.slow


@examples(30)
@given(st.lists(st.sampled_from((3, 5, 9)), min_size=1, max_size=4), st.integers(2, 4), st.integers(1, 3))
def test_no_table_is_better_and_one_is_as_good(sizes: list[int], k: int, p: int) -> None:
    assume(p <= k <= p * len(sizes))
    sets = list(itertools.combinations(range(k), p))
    maxima = []
    for holders in itertools.product(sets, repeat=len(sizes)):
        loads = [sum(s for s, own in zip(sizes, holders, strict=True) if one in own) for one in range(k)]
        maxima += [max(loads)] if min(loads) else []
    assert best_maximum(sizes, k, p) == min(maxima)


def test_too_many_sizes_are_not_searched() -> None:
    assert best_maximum(list(range(1, 30)), 8, 4) is None


def test_five_blocks_that_cost_the_same_cannot_be_even() -> None:
    """Of a ResNet-18: two and a half of them on average, three at most; the rest of the model evens it out."""
    record = balance.measure(balance.build(balance.MODELS["ResNet-18"]), {"coverage": 0.5}, 4)
    assert record["units"] == 5
    assert record["flops"] == record["best"] == pytest.approx(1.2)
    unit, shared = (1 - record["shared"]) / 5, record["shared"]
    assert record["flops_with_shared"] == pytest.approx((3 * unit + shared) / (2.5 * unit + shared))
    assert record["flops_by_weights_alone"] >= record["flops"]
    assert record["bytes"] >= record["bytes_bound"]


def test_flops_of_an_image_are_those_of_the_model() -> None:
    """1.8 billion products (He et al., arXiv 1512.03385, Table 1, there with 1000 classes): the stem, the 3 x 3
    convolutions, of which three have half as many inputs, three projections and a head of two classes."""
    convolution, projection = 9 * 64 * 64 * 56**2, 64 * 128 * 28**2
    products = 49 * 3 * 64 * 112**2 + 16 * convolution - 3 * convolution // 2 + 3 * projection + 2 * 512
    assert balance.image_flops(balance.build(balance.MODELS["ResNet-18"])) == 2 * products


@pytest.mark.parametrize(("name", "blocks"), [("ResNet-50", 12), ("WideResNet-18, twice as wide", 4)])
def test_even_where_whole_blocks_allow_it(name: str, blocks: int) -> None:
    for k, coverage in itertools.product((4, 8), balance.COVERAGES):
        record = balance.measure(balance.build(balance.MODELS[name]), {"coverage": coverage}, k)
        assert record["units"] == blocks
        assert record["flops"] <= 1.05, (k, coverage)


def test_what_is_refused_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command, its raw figures and its table."""
    shapes: dict[str, Any] = {"ResNet-18": balance.MODELS["ResNet-18"]}
    monkeypatch.setattr(balance, "MODELS", shapes)
    monkeypatch.setattr(balance, "STRATEGIES", {"block": {"strategy": "block"}, "layers": {"strategy": {"x": "block"}}})
    balance.main(["--output", str(tmp_path / "raw.json"), "--subnetworks", "4", "32"])
    result = json.loads((tmp_path / "raw.json").read_text())
    assert [record["coverage"] for record in result["records"]] == [*balance.COVERAGES] * 2
    text = table_of(result)
    assert "| ResNet-18 | block | C = 1/2 | 5 | 1.200 | 1.200 | 1.094 |" in text
    assert "4 and 32 subnetworks" in text


def test_models_have_no_storage() -> None:
    model = balance.build(balance.MODELS["ResNet-50"])
    assert isinstance(model, transformers.ResNetForImageClassification)
    assert all(parameter.device == torch.device("meta") for parameter in model.parameters())
