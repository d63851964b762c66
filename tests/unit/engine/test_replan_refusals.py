"""What re-planning refuses of optimizer state; the rest is in tests/ranks/engine/test_replan_refused.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sdp_deepspeed.engine.replan_refusals import check_optimizer_state
from sdp_deepspeed.plan.tensors import NOT_OPTIMIZED, TensorInfo

KINDS = ("weight", "master", "exp_avg")


def of(name: str, group: int, *, is_whole: bool = False) -> TensorInfo:
    return TensorInfo(name, (2,), torch.float32, group=group, is_whole=is_whole)


def check(tensors: list[TensorInfo], keys: list[str]) -> None:
    catalog: Any = SimpleNamespace(shapes=dict.fromkeys(keys, (2,)))
    model: Any = SimpleNamespace(tensors=tensors)
    check_optimizer_state(catalog, model)


def test_tensors_of_a_param_group_have_the_same_state() -> None:
    first, second = ([f"{kind}/{name}" for kind in KINDS] for name in ("a", "b"))
    together = [of("a", 0), of("b", 0)]
    check(together, first + second)
    with pytest.raises(ValueError, match="has other state of 'b' than of 'a'"):
        check(together, first + second[:2])
    for apart in (of("b", 1), of("b", 0, is_whole=True), of("b", NOT_OPTIMIZED)):
        check([of("a", 0), apart], first + second[:2])
    check([*together, of("never_written", 0)], first + second)
