"""State of this process's random number generators, as plain values and tensors."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """State of the generators of PyTorch, the accelerator, NumPy and Python."""
    numpy_state: Any = np.random.get_state()
    kind, keys, position, has_gauss, cached = numpy_state
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # do not start CUDA
        "numpy": [str(kind), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "python": [version, list(words), gauss],
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restore the result of `random_state`."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))


@contextmanager
def unchanged_random_state() -> Iterator[None]:
    """Context that restores the state of all generators on exit."""
    before = random_state()
    try:
        yield
    finally:
        restore_random_state(before)
