"""The call for models of both hosts: what it takes, and whom it asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch import nn

import sdp_deepspeed


def test_an_engine_is_asked_itself() -> None:
    asked: list[Any] = []

    def reestimate_batch_norm(batches: Any, *, num_batches: int) -> int:
        asked.append((batches, num_batches))
        return 4

    engine = SimpleNamespace(reestimate_batch_norm=reestimate_batch_norm)
    assert sdp_deepspeed.reestimate_batch_norm(engine, [1, 2], num_batches=2) == 4
    assert asked == [([1, 2], 2)]


def test_a_sharded_model_is_found_in_what_is_around_it() -> None:
    module = nn.Linear(2, 2)
    for given in (module, SimpleNamespace(module=module)):
        with (
            mock.patch("sdp_deepspeed.fsdp.sharded_model.is_sharded", lambda other: other is module),
            mock.patch("sdp_deepspeed.fsdp.export.reestimate_batch_norm", return_value=3) as called,
        ):
            assert sdp_deepspeed.reestimate_batch_norm(given, [], num_batches=1) == 3
        called.assert_called_once_with(module, [], num_batches=1)


def test_others_are_refused() -> None:
    for given in (nn.BatchNorm2d(3), SimpleNamespace(module=nn.BatchNorm2d(3)), SimpleNamespace()):
        with pytest.raises(ValueError, match=r"reestimate_batch_norm: got \w+, expected the engine .*fully_shard"):
            sdp_deepspeed.reestimate_batch_norm(given, [], num_batches=1)
