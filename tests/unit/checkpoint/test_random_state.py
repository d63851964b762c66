"""Sources of random numbers as values that a file can hold without pickles of foreign classes."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from sdp_deepspeed.checkpoint.random_state import random_state, restore_random_state
from tests.helpers.gpus import untouched_gpus


def draw() -> list[float]:
    return [torch.rand(1).item(), float(np.random.rand()), float(np.random.normal()), random.random(), random.gauss()]


def test_numbers_go_on(tmp_path: Path) -> None:
    np.random.normal()  # one more is kept for the next call
    torch.save(random_state(), tmp_path / "state.pt")
    numbers = draw()
    restore_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draw() == numbers


def test_a_run_on_cpus_starts_no_gpu(tmp_path: Path) -> None:
    with untouched_gpus():
        state = random_state()
        assert state["cuda"] is None
        restore_random_state(state | {"cuda": torch.zeros(16, dtype=torch.uint8)})  # of a run on GPUs
