"""Benchmarks run on the device that is there, and read no clock before it is done."""

from __future__ import annotations

import time
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
