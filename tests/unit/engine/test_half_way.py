"""What is left of a re-plan that failed is refused, and its error told; one that ends well leaves nothing behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed.engine.half_way import who_ended_is_named, wholly_or_never
from tests.helpers.last_acts import of_ranks


def test_an_error_is_for_good() -> None:
    module, (zero, one) = nn.Sequential(nn.Linear(2, 2)), of_ranks(2)
    one.note("began to re-plan")
    with pytest.raises(KeyboardInterrupt), wholly_or_never(module, one):
        raise KeyboardInterrupt
    for call in (lambda: module(torch.zeros(1, 2)), module.state_dict):
        with pytest.raises(RuntimeError, match="ended half-way in an error"):
            call()
    act = zero.of([1])[1]
    assert (act.what, act.lost) == ("began to re-plan: KeyboardInterrupt: ", True)


def test_without_an_error_nothing_stays() -> None:
    module, (zero, one) = nn.Sequential(nn.Linear(2, 2)), of_ranks(2)
    with wholly_or_never(module, one):
        pass
    module(torch.zeros(1, 2))
    module.state_dict()
    one.publish()
    assert not zero.of([1])[1].lost


@pytest.mark.parametrize(
    ("ended", "words"), [([1, 3], r"^engine\.replan: rank 1, 3 ended during .* lost$"), ([], "^lost$")]
)
def test_who_ended_is_named(ended: list[int], words: str) -> None:
    barrier: Any = SimpleNamespace(ended_ranks=lambda: ended)
    with pytest.raises(RuntimeError, match=words), who_ended_is_named(barrier):
        raise RuntimeError("lost")
