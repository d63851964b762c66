"""Runs a user's script for torchtitan on a CPU: `torchtitan_on_the_cpu.py SCRIPT ARGUMENT...`.

torchtitan knows accelerators only, and its attention needs a compiled kernel that has no backward pass on a CPU.
"""

from __future__ import annotations

import runpy
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torchtitan.tools import utils

utils.device_type, utils.device_module = "cpu", torch.cpu  # before they are imported from there

from torchtitan.components import metrics  # noqa: E402
from torchtitan.distributed import utils as distributed  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402


class _NoMemory(SimpleNamespace):
    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


if __name__ == "__main__":
    utils.get_local_device = lambda: torch.device("cpu")
    metrics.build_device_memory_monitor = lambda: _NoMemory(device_name="cpu")
    distributed.set_pg_timeouts = lambda **_: None
    llama3.get_attention_config = lambda backend: ScaledDotProductAttention.Config()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
