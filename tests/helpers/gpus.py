"""Tests on machines with GPUs: how to stay on the CPU there, and a pretended machine of that kind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest

# DeepSpeed takes GPUs where it sees them, but for the first; the second hides them from everybody else. DeepSpeed's
# launcher sets the second anew for its ranks, so a program on CPUs sees the machine's GPUs all the same.
ON_THE_CPU = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
ON_A_GPU = {"DS_ACCELERATOR": "cuda"}


def why_no_gpu() -> str | None:
    """None if torch can use one, which is asked elsewhere: this process must not start CUDA, and stays on the CPU."""
    question = "import torch; torch.cuda.init(); torch.cuda.get_device_name()"
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=False)
    return None if answer.returncode == 0 else (answer.stderr.strip().splitlines() or ["torch gives no reason"])[-1]


@contextmanager
def untouched_gpus(count: int = 2) -> Iterator[None]:
    """A machine on which torch sees GPUs. Whoever starts CUDA, which takes memory on one of them, fails the test."""
    import torch

    def start() -> None:
        pytest.fail("CUDA was started")

    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "device_count", return_value=count),
        mock.patch.object(torch.cuda, "is_initialized", return_value=False),  # whatever other tests have done
        mock.patch.object(torch.cuda, "_lazy_init", start),
        mock.patch.object(torch.cuda.random, "_lazy_init", start),
    ):
        yield
