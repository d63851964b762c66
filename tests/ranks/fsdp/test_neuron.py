"""Neurons and heads under FSDP2 against the reference, plain FSDP2 and the DeepSpeed host, on 2 to 4 ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.helpers.models import SPECIMENS
from tests.helpers.ranks import Check, Rank
from tests.helpers.sharded import check_against_reference

NEURON = {"strategy": "neuron", "coverage": 0.5}


def agrees_with_the_reference(
    rank: Rank, *, name: str = "llama_biases", block: dict[str, Any] | None = None, **options: Any
) -> None:
    check_against_reference(rank, SPECIMENS[name].build(), block or NEURON, **options)


def _cases(size: int, config: pytest.Config) -> list[tuple[str, Check]]:
    made: dict[str, Any] = {}
    match size:
        case 2:
            made |= {"llama": agrees_with_the_reference}
    return list(made.items())


@pytest.mark.checks((2,), _cases)
def test_on_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome
