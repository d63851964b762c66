"""Running statistics of batch norms.

In training each rank normalizes with its own batch, as in data parallelism. A running statistic is a weighted sum of
batch statistics, with the same weights on all ranks that run the norm. So the mean over these ranks is the same, up to
rounding, whether it is taken after each step or once before evaluation, export and checkpoint. Below C = 1 it is that
of subnetworks; `reestimate_batch_norm` estimates the dense model's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.messages import listed
from sdp_deepspeed.parallel.consistency import gather_objects, run_on_all_ranks
from sdp_deepspeed.parallel.groups import Groups, RankGroup
from sdp_deepspeed.units import Piece

_MEANS, _COUNT = ("running_mean", "running_var"), "num_batches_tracked"


def running_statistics(mask: Mask) -> list[tuple[Piece, tuple[int, ...]]]:
    """Pieces of all running statistics, the same on every rank, each with the ranks that run the norm: its holders, or
    in the backward regime all ranks."""
    names = [f"{norm}.{statistic}".lstrip(".") for norm in mask.batch_norms for statistic in (*_MEANS, _COUNT)]
    return [
        (piece, mask.plan.all_ranks if mask.plan.regime == "backward" else holders)
        for name in names
        for piece, holders in mask.buffer_pieces.get(name, ())
    ]


@torch.inference_mode(False)
@torch.no_grad()
def average_running_statistics(mask: Mask, group: RankGroup, device: torch.device) -> None:
    """Average each running mean and variance over the ranks that run the norm; take the maximum of batch counts.

    Two all-reduces over the data-parallel ranks; none without running statistics. The mask must be applied. Sums are in
    fp64, where the mean of equal values is exact, so averaging twice equals averaging once.

    Args:
        group: the data-parallel ranks.
    """
    statistics = running_statistics(mask)
    if not statistics or group.size == 1:
        return
    means = [(piece, ranks) for piece, ranks in statistics if not piece.parameter.endswith(_COUNT)]
    counts = [(piece, ranks) for piece, ranks in statistics if piece.parameter.endswith(_COUNT)]
    sizes = [piece.num_elements(mask.shapes[piece.parameter]) for piece, _ in means]
    sums = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
    largest = torch.zeros(len(counts), dtype=torch.int64, device=device)
    means_of_rank = []
    for (piece, ranks), summed in zip(means, sums.split(sizes), strict=True):
        if mask.rank in ranks:
            summed.copy_(mask.view(piece))
            means_of_rank.append((piece, summed))
    for index, (piece, ranks) in enumerate(counts):
        if mask.rank in ranks:
            largest[index] = mask.view(piece)
    dist.all_reduce(sums, group=group.process_group)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group.process_group)
    divisors = torch.tensor([float(len(ranks)) for _, ranks in means], dtype=torch.float64, device=device)
    sums /= divisors.repeat_interleave(torch.tensor(sizes, device=device))
    for piece, mean in means_of_rank:
        mask.view(piece).copy_(mean)
    for (piece, ranks), count in zip(counts, largest, strict=True):
        if mask.rank in ranks:
            mask.view(piece).copy_(count)


def estimate_on_all_ranks(
    model: nn.Module, batches: Iterable[Any], num_batches: int, groups: Groups, *, run: nn.Module | None = None
) -> None:
    """Set the running statistics of the dense model to their means over batches of all ranks; collective. Arguments and
    errors are those of `reestimate_batch_norm` and `estimate_statistics`."""

    def take() -> list[Any]:
        taken = list(itertools.islice(batches, num_batches))
        if len(taken) < num_batches or num_batches < 1:
            raise ValueError(
                f"num_batches: got {num_batches}, but found {len(taken)} batches; pass at most that many, at least 1"
            )
        return taken

    taken = run_on_all_ranks(take, groups.control)
    if len(set(numbers := gather_objects(num_batches, groups.control))) > 1:
        raise ValueError(f"num_batches: got {listed(numbers)} on the ranks; pass the same number on all")
    statistics = run_on_all_ranks(lambda: estimate_statistics(model, taken, run=run), groups.control)
    write_statistics(statistics, groups.data_parallel.process_group)


@torch.no_grad()
def estimate_statistics(
    model: nn.Module, batches: Iterable[Any], *, run: nn.Module | None = None
) -> dict[_BatchNorm, list[torch.Tensor]]:
    """Estimate the running statistics of the dense model as means over `batches`, like
    `torch.optim.swa_utils.update_bn`. Batch norms use batch statistics; other modules are in evaluation mode.

    Args:
        model: dense (`Mask.undo`); unchanged afterwards, including its statistics.
        batches: dicts of keyword arguments, tuples or lists of arguments, or single arguments of the model.
        run: callable to use in place of the model.

    Returns:
        Mean, variance (fp64) and number of batches of each batch norm; the current ones if the norm did not run.
    """
    norms = tracking_norms(model)
    modes = {module: module.training for module in model.modules()}
    before = {norm: [getattr(norm, name).clone() for name in (*_MEANS, _COUNT)] for norm in norms}
    momenta = {norm: norm.momentum for norm in norms}
    sums: dict[_BatchNorm, list[torch.Tensor]] = {}

    def add(norm: _BatchNorm, *_: Any) -> None:
        values = [getattr(norm, name).double() for name in _MEANS]
        if norm in sums:
            values = [total + value for total, value in zip(sums[norm], values, strict=True)]
        sums[norm] = values

    hooks = [norm.register_forward_hook(add) for norm in norms]
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.train()
        norm.momentum = 1.0  # use batch statistics
    try:
        for batch in batches:
            _call(run or model, batch)
        counts = {norm: getattr(norm, _COUNT).clone() for norm in sums}
        statistics = {norm: [value.double() for value in before[norm]] for norm in norms}
        for norm, totals in sums.items():
            statistics[norm] = [*(total / counts[norm] for total in totals), counts[norm]]
        return statistics
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training
        for norm in norms:
            norm.momentum = momenta[norm]
            write_statistics({norm: before[norm]})


@torch.no_grad()
def write_statistics(
    statistics: Mapping[_BatchNorm, Sequence[torch.Tensor]], group: dist.ProcessGroup | None = None
) -> None:
    """Set running means and variances to the means over the ranks of a group, which have run equally many batches, and
    set batch counts."""
    for norm, values in statistics.items():
        for name, value in zip((*_MEANS, _COUNT), values, strict=True):
            if group is not None and name != _COUNT:
                dist.all_reduce(value, group=group)
                value = value / dist.get_world_size(group)
            getattr(norm, name).copy_(value)


def tracking_norms(model: nn.Module) -> list[_BatchNorm]:
    """Batch norms with running statistics."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


def _call(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, dict):
        model(**batch)
    elif isinstance(batch, (tuple, list)):
        model(*batch)
    else:
        model(batch)
