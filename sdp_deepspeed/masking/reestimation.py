"""Running statistics of the dense model, estimated anew: in the forward regime training has seen subnetworks alone,
whose activations have other means and variances.

Each batch norm takes its batch's statistics and normalizes with them, as in training, while all else is as in
evaluation. A norm does so by itself where it has no running statistics, so they are taken away while it runs: no mode
changes, a synchronized norm asks no other rank, and whatever a subclass does beside is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.distributed.agreement import Gatherer, run_on_all_ranks
from sdp_deepspeed.distributed.monitored_barrier import Phase
from sdp_deepspeed.masking.batch_norm import MEAN, VARIANCE, BatchNorm, Estimate, RunningStatistics
from sdp_deepspeed.masking.dense_view import DenseView
from sdp_deepspeed.messages import listed

CALL = "reestimate_batch_norm"


@dataclass(frozen=True)
class Reestimation:
    """Of one model, on all ranks.

    Args:
        model: what is called with batches: the masked module, or what a host has put around it.
        view: of the module.
        world: all ranks.
        report: told on every rank what was done.
    """

    model: nn.Module
    view: DenseView
    world: Gatherer
    report: Callable[[str], None]

    def run(self, batches: Iterable[Any], num_batches: int) -> int:
        """As `sdp_deepspeed.reestimate_batch_norm`."""
        statistics = self.view.statistics
        if not statistics.norms:
            self.report(f"{CALL}: the model has no batch norm with running statistics, so nothing was done")
            return 0
        self.view.meet(Phase.REESTIMATE)
        _check_number(num_batches, self.world)
        sums = {name: _Sums(norm) for name, norm in statistics.norms.items()}
        with ExitStack() as context:
            context.enter_context(torch.no_grad())
            context.enter_context(_in_evaluation_mode(self.model))
            context.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code does not know new hooks
            for of_norm in sums.values():
                context.enter_context(of_norm.watching())
            context.enter_context(self.view())
            self._run(iter(batches), num_batches)
            found = _over_all_ranks(sums, statistics)
            statistics.write(found, in_module=self.view.is_whole)
        ranks = self.world.size
        self.report(f"{CALL}: {len(found)} batch norms, from {num_batches} batches on each of {ranks} ranks")
        return len(found)

    def _run(self, batches: Iterator[Any], num_batches: int) -> None:
        """A forward pass may be a collective, so all ranks agree on each that there is one."""
        for number in range(num_batches):
            batch = run_on_all_ranks(self.world, partial(_take, batches, number, num_batches))
            run_on_all_ranks(self.world, partial(_call, self.model, batch))


class _Sums:
    """Over the batches of one norm on this rank.

    Attributes:
        mean, variance: sums of those of batches, fp64 [channels]; None before the first.
        count: of batches.
    """

    def __init__(self, norm: BatchNorm) -> None:
        self._norm = norm
        self._away: dict[str, torch.Tensor | None] = {}
        self.mean: torch.Tensor | None = None
        self.variance: torch.Tensor | None = None
        self.count = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which the norm normalizes with its batch's statistics, which are added up here."""
        hooks = [
            self._norm.register_forward_pre_hook(self._before, with_kwargs=True),
            self._norm.register_forward_hook(self._after, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._after()  # what was interrupted by no Exception ran no hook

    def _before(self, norm: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = next(iter((*args, *kwargs.values()))).detach()
        values = given if given.dtype == torch.float64 else given.float()
        variance, mean = torch.var_mean(values, dim=[0, *range(2, values.dim())], correction=1)
        self.mean = mean.double() if self.mean is None else self.mean.add_(mean)
        self.variance = variance.double() if self.variance is None else self.variance.add_(variance)
        self.count += 1
        for name in (MEAN, VARIANCE):
            self._away[name] = norm._buffers[name]
            norm._buffers[name] = None

    def flat(self, num_channels: int) -> torch.Tensor:
        """What ranks add up, fp64 [2 * num_channels + 1]: means, variances, the count."""
        if self.mean is None or self.variance is None:
            return torch.zeros(2 * num_channels + 1, dtype=torch.float64, device="cpu")
        return torch.cat([self.mean, self.variance, self.mean.new_full((1,), self.count)])

    def _after(self, *_: Any) -> None:
        self._norm._buffers.update(self._away)
        self._away.clear()


def _over_all_ranks(sums: Mapping[str, _Sums], statistics: RunningStatistics) -> dict[str, Estimate]:
    """The means over all batches of all ranks, for norms that ran; every rank calls it."""
    sizes = {name: statistics.num_channels(name) for name in sums}
    flat = [own.flat(sizes[name]).to(statistics.device) for name, own in sums.items()]
    totals = statistics.total(torch.cat(flat)).split([2 * size + 1 for size in sizes.values()])
    found = {}
    for (name, own), total in zip(sums.items(), totals, strict=True):
        if total[-1] > 0:
            mean, variance = (total[:-1] / total[-1]).chunk(2)
            found[name] = Estimate(mean, variance, own.count)
    return found


@contextmanager
def _in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Context in which each module is, whatever its `train` does; afterwards each is as it was."""
    modes = {module: module.training for module in model.modules()}
    try:
        for module in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _take(batches: Iterator[Any], number: int, num_batches: int) -> Any:
    try:
        return next(batches)
    except StopIteration:
        raise ValueError(
            f"{CALL}: got {number} batches, expected num_batches={num_batches} on each rank; give more, or ask for "
            "fewer. The running statistics are as they were"
        ) from None


def _call(model: nn.Module, batch: Any) -> None:
    """The model on a batch; what it returns is not needed."""
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, tuple | list):
        model(*batch)
    else:
        model(batch)


def _check_number(num_batches: object, world: Gatherer) -> None:
    """ValueError on all ranks if it is no number of batches, or not the same on all."""
    numbers = world.gather_objects(num_batches)
    if any(type(number) is not int or number < 1 for number in numbers) or len(set(numbers)) > 1:
        raise ValueError(f"{CALL}: num_batches: got {listed(numbers)} on the ranks, expected one number above 0 on all")
