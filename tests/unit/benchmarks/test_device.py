"""Benchmarks run on the device that is there, and read no clock before it is done."""

from __future__ import annotations

import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from benchmarks.common import device


def accelerator(name: str) -> mock.Mock:
    index = ":1" if name != "cpu" else ""
    return mock.Mock(
        **{"device_name.return_value": name, "current_device_name.return_value": f"{name}{index}"},
    )


@pytest.mark.parametrize(("name", "backend"), [("cpu", "gloo"), ("cuda", None), ("xpu", None)])
def test_the_device_and_its_backend(name: str, backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    there = accelerator(name)
    monkeypatch.setattr(device, "get_accelerator", lambda: there)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    monkeypatch.setenv("LOCAL_RANK", "1")
    device.take_device()
    there.set_device.assert_called_once_with(1)
    assert (device.device().type, device.backend()) == (name, backend)
    assert device.device_name() == {"cpu": "CPU", "cuda": "H200", "xpu": "XPU"}[name]


def test_the_clock_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    there = accelerator("cuda")
    there.synchronize.side_effect = lambda: said.append("done")
    monkeypatch.setattr(device, "get_accelerator", lambda: there)
    monkeypatch.setattr(time, "perf_counter", lambda: said.append("read"))
    device.seconds()
    assert said == ["done", "read"]


def test_what_ran_on_a_gpu_is_told_from_what_started_it() -> None:
    kinds = torch.autograd.DeviceType
    kernel = SimpleNamespace(name="gemm", device_type=kinds.CUDA, is_user_annotation=False)
    others = [
        SimpleNamespace(name="cudaLaunchKernel", device_type=kinds.CPU),
        SimpleNamespace(name="Optimizer.step", device_type=kinds.CUDA, is_user_annotation=True),
    ]
    assert device.device_events(mock.Mock(**{"events.return_value": [*others, kernel]})) == [kernel]
