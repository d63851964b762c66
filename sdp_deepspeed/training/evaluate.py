"""The validation loss of the dense model, in training and after it."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from sdp_deepspeed.data import ValidationBatches


@torch.no_grad()
def dense_validation_loss(engine: Any, batches: ValidationBatches) -> dict[str, float]:
    """Mean loss per predicted token over all held-out blocks; a collective of all ranks.

    In evaluation mode our engine's forward is the dense model, as a stock engine's always is. What that fetches stays
    until `train` where memory allows. Every rank has the same number of batches, and a batch of padding alone weighs
    nothing.

    Returns:
        `dense_validation_loss` (nats per token), `num_tokens`, `seconds`.
    """
    start = time.perf_counter()
    sums = torch.zeros(2, dtype=torch.float64, device=engine.device)
    engine.eval()
    for inputs, weight in batches:
        loss = engine(**to_device(inputs, engine.device), use_cache=False).loss
        sums += torch.stack([loss.double() * weight, loss.new_tensor(weight, dtype=torch.float64)])
    engine.train()
    dist.all_reduce(sums, group=engine.seq_data_parallel_group)  # tensor-parallel ranks have the same batches
    loss_sum, num_tokens = sums.tolist()
    seconds = time.perf_counter() - start
    return {"dense_validation_loss": loss_sum / num_tokens, "num_tokens": int(num_tokens), "seconds": seconds}


def to_device(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
