"""Where ranks of `--host fsdp2` run; what they do there: tests/launcher/test_pretrain_fsdp.py."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sdp_deepspeed.config import KEY, SILENCE_LIMIT
from sdp_deepspeed.training.fsdp_engine import ShardedEngine
from sdp_deepspeed.training.fsdp_host import FsdpHost
from sdp_deepspeed.training.fsdp_settings import read_settings
from tests.helpers.gpus import untouched_gpus
from tests.helpers.ports import free_port

CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """One rank, where torch sees two GPUs."""
    place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with untouched_gpus(2):
        yield monkeypatch


def host(step_limit: int | None = None, **config: Any) -> FsdpHost:
    options: Any = mock.Mock(step_limit=step_limit, deepspeed_config=CONFIG | config)
    return FsdpHost(options)


@pytest.mark.parametrize("given", [None, 77])
def test_a_run_on_cpus_starts_no_gpu(machine: pytest.MonkeyPatch, given: int | None) -> None:
    machine.setenv("DS_ACCELERATOR", "cpu")
    started = host(given)
    started.start()
    try:
        group: Any = dist.group.WORLD
        assert dist.get_backend() == "gloo"
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=given or 600)
    finally:
        started.close()
    assert not dist.is_initialized()


def test_values_are_tried_and_nothing_is_pinned_without_a_gpu(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("DS_ACCELERATOR", "cpu")
    started = host(zero_optimization={"offload_param": {"device": "cpu", "pin_memory": True}})
    started.start()
    try:
        with pytest.raises(ValueError, match=r"optimizer.params: torch.optim.AdamW refuses them: Invalid learning"):
            host(optimizer={"type": "AdamW", "params": {"lr": -1.0}}).check()
        started.check()
        assert (started._settings.offloads, started._settings.pin_memory) == (True, False)
    finally:
        started.close()


@pytest.mark.parametrize("block", [None, {"coverage": 0.5, "silence_limit": 12.0}])
def test_ranks_are_watched_as_the_block_says(monkeypatch: pytest.MonkeyPatch, block: dict[str, Any] | None) -> None:
    started, engine, levels = host(), mock.Mock(), []
    started._settings = read_settings(CONFIG if block is None else CONFIG | {KEY: block}, 2)
    started.log.setLevel(logging.INFO)

    def build(*_: Any) -> Any:
        levels.append(started.log.level)
        return engine

    monkeypatch.setattr(ShardedEngine, "build", build)
    monkeypatch.setattr("sdp_deepspeed.training.fsdp_host.watch_ranks", watch := mock.Mock())
    assert started.build(mock.Mock()) == (engine, engine.world)
    watch.assert_called_once_with(engine, dist, engine.world, 12.0 if block else SILENCE_LIMIT)
    assert levels == [logging.INFO if block else logging.WARNING]  # a plan in which all hold all says nothing
    assert started.log.level == logging.INFO


def test_a_rank_without_a_gpu_of_its_own_is_a_mistake(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="--host fsdp2: local rank 2 has no GPU of its own: this node has 2"):
        host().start()
    assert not dist.is_initialized()
