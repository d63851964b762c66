"""Runs a user's script for Lightning on a CPU: `lightning_on_the_cpu.py SCRIPT ARGUMENT...`.

Lightning's DeepSpeed strategy insists on GPUs with the ranks' numbers, and takes a CPU for one device.
"""

from __future__ import annotations

import os
import runpy
import sys

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DDPStrategy, deepspeed

if __name__ == "__main__":
    deepspeed.DeepSpeedStrategy.setup_environment = DDPStrategy.setup_environment  # what it calls after the check
    deepspeed._validate_device_index_selection = lambda devices: None
    CPUAccelerator.get_parallel_devices = staticmethod(lambda devices: [torch.device("cpu", 0)] * devices)
    CPUAccelerator.auto_device_count = staticmethod(lambda: int(os.environ["WORLD_SIZE"]))
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
