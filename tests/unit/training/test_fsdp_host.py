"""Where ranks of `--host fsdp2` run; what they do there: tests/launcher/test_pretrain_fsdp.py."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sdp_deepspeed.training.fsdp_host import FsdpHost
from tests.helpers.gpus import untouched_gpus
from tests.helpers.ports import free_port


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


def host(step_limit: int | None = None) -> FsdpHost:
    options: Any = mock.Mock(step_limit=step_limit)
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


def test_a_rank_without_a_gpu_of_its_own_is_a_mistake(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="--host fsdp2: local rank 2 has no GPU of its own: this node has 2"):
        host().start()
    assert not dist.is_initialized()
