"""What follows from the batch sizes of a DeepSpeed config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def micro_steps(config: Mapping[str, Any], num_ranks: int) -> tuple[int, int]:
    """Micro-batch of a rank, and micro-steps, from two or three of DeepSpeed's batch sizes.

    Raises:
        ValueError: they do not say it, or contradict each other.
    """
    for key in BATCH_SIZES:
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{key}: got {value!r}, expected a whole number of at least 1")
    whole, micro, accumulation = map(config.get, BATCH_SIZES)
    if micro is None and whole is not None:
        micro = whole // (num_ranks * (accumulation or 1))
    if not micro:
        raise ValueError("give train_micro_batch_size_per_gpu, or a larger train_batch_size")
    if accumulation is None:
        accumulation = 1 if whole is None else whole // (micro * num_ranks)
    if whole is not None and whole != micro * accumulation * num_ranks:
        raise ValueError(
            f"train_batch_size is {whole}, but {num_ranks} ranks with micro-batches of {micro} and "
            f"{accumulation} micro-steps make {micro * accumulation * num_ranks}"
        )
    return micro, accumulation
