"""The norm of the averaged dense gradient: every parameter counts once, whoever holds it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.layout.fragments import Fragment
from sdp_deepspeed.tensor_parallel.group import TensorParallelGroup

# Elements of which a CPU sums squares in fp32, one after the other: of 50 million the sum would be off by 1%.
CPU_STRETCH = 2**14


def sum_of_squares(
    averages: Sequence[torch.Tensor],
    fragments: Sequence[Sequence[Fragment]],
    *,
    tp_group: TensorParallelGroup | None,
    device: torch.device,
) -> torch.Tensor:
    """Of a bucket's averages, of which this rank owns all; what tensor-parallel ranks have in common is counted on one
    of them. float64, [].

    Args:
        averages: flat, one for each entry of `fragments`, which it consists of.
        tp_group: the tensor-parallel group, None without one.
    """
    if tp_group is not None:
        averages = [
            part
            for owned, average in zip(fragments, averages, strict=True)
            for fragment, part in zip(owned, average.split([f.num_elements for f in owned]), strict=True)
            if tp_group.counts_in_norm(fragment.piece.parameter)
        ]
    if device.type == "cpu":
        averages = [part for average in averages for part in average.split(CPU_STRETCH)]
    if not averages:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(list(averages), dtype=torch.float32)  # fp16 could not hold them, bf16 would round
    return torch.stack(norms).double().square().sum()


def summed(
    squares: torch.Tensor, is_left: bool, *facts: float, dp_group: Communicator, tp_group: TensorParallelGroup | None
) -> tuple[float, bool, list[float]]:
    """In one reduction, so that the host waits once: the squares of all ranks, whether anything is left on any of them,
    and facts of the data-parallel ranks.

    Args:
        squares: what this rank counts (float64, []).
    """
    own = torch.stack([squares, *(torch.full_like(squares, fact) for fact in (is_left, *facts))])
    dp_group.sum(own)
    if tp_group is not None:
        tp_group.communicator.sum(own[:2])
    total, num_left, *sums = own.tolist()
    return total, bool(num_left), sums
