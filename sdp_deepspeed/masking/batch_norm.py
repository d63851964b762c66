"""Running statistics of batch norms: the mean over the ranks that run a norm, each of which sees batches of its own.

A running statistic is a weighted sum of the batches' own, with the same weights on all ranks that run the norm. So the
mean over these ranks is the same, to rounding, whether it is taken after every step or once at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.layout.places import in_order
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.plan.tensors import TensorInfo, pieces_by_tensor
from sdp_deepspeed.units import Piece

BatchNorm = _BatchNorm
MEAN, VARIANCE, COUNT = "running_mean", "running_var", "num_batches_tracked"


def batch_norms(module: nn.Module) -> dict[str, BatchNorm]:
    """Those that have running statistics, synchronized ones too, by dense name."""
    norms = {name: inner for name, inner in module.named_modules() if isinstance(inner, BatchNorm)}
    return {name: norm for name, norm in norms.items() if norm.running_mean is not None}


@dataclass(frozen=True)
class Estimate:
    """What a norm's running statistics are to be.

    Args:
        mean, variance: [channels of the dense model].
        count: of the batches that they are the means of.
    """

    mean: torch.Tensor
    variance: torch.Tensor
    count: int


@dataclass(frozen=True)
class _Stretch:
    """A piece of a statistic inside of what all ranks add up.

    Args:
        ranks: that run it; in the backward regime all ranks run everything.
    """

    piece: Piece
    ranks: tuple[int, ...]
    start: int
    length: int


class RunningStatistics:
    """Every data-parallel rank makes one, of the same plan, and calls `average` when the others do.

    Args:
        module: masked, with the names of the dense model.
        model: the plan, and the dense shapes.
        dp_group: the data-parallel group.
        device: where it communicates.
        stored: of a piece that this rank stores a view of its values; None for `model`'s.

    Attributes:
        norms: by dense name.
        tensors: their running statistics.
    """

    norms: Mapping[str, BatchNorm]
    tensors: tuple[TensorInfo, ...]

    def __init__(
        self,
        module: nn.Module,
        model: RankModel,
        dp_group: Communicator,
        *,
        device: torch.device,
        stored: Callable[[Piece], torch.Tensor] | None = None,
    ) -> None:
        self.norms = batch_norms(module)
        self.tensors = tuple(_infos(self.norms, model))
        self._model = model
        self._dp_group = dp_group
        self.device = device
        self._stored = stored or model.views.weight_view
        self._has_warned = False
        self._estimated: Mapping[str, int] = {}  # counts that norms had after they were last estimated anew

    def num_channels(self, norm: str) -> int:
        """Of the dense model.

        Args:
            norm: its dense name.
        """
        return int(self._model.views.shapes[_path(norm, MEAN)][0])

    @torch.no_grad()
    def average(self) -> None:
        """Make each statistic the mean over the ranks that run it, and each count of batches the largest; a collective
        of the data-parallel group, none if the model has no running statistics.

        Sums are of fp64, in which the mean of equal values is that value: averaging twice is averaging once.
        """
        if not self.norms or self._dp_group.size == 1:
            return
        with torch.inference_mode(False):
            sums = self._dp_group.sum(self._packed())
            means = sums[: self._length].div_(self._divisors)
            counts = sums[self._length :].view(self._dp_group.size, len(self._counts))
            for stretch in self._own_stretches():
                target = in_order(stretch.piece, self._stored(stretch.piece))
                target.copy_(means.narrow(0, stretch.start, stretch.length).view(target.shape))
            for (piece, ranks), of_ranks in zip(self._counts, counts.unbind(1), strict=True):
                if self._is_stored(ranks):
                    self._stored(piece).copy_(of_ranks[list(ranks)].amax())

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all data-parallel ranks, in place; all of them call it."""
        return self._dp_group.sum(values)

    @torch.no_grad()
    def write(self, estimates: Mapping[str, Estimate], *, in_module: bool) -> None:
        """Take statistics of the dense model.

        Args:
            estimates: by a norm's dense name, the same on all ranks.
            in_module: the module is whole now, and who made it so takes over what is changed in it.
        """
        values = {_path(name, of): value for name, found in estimates.items() for of, value in _named(found)}
        with torch.inference_mode(False):
            if in_module:
                for info in self.tensors:
                    name, _, of = info.name.rpartition(".")
                    if info.name in values:
                        getattr(self.norms[name], of).copy_(values[info.name])
            else:
                for piece, ranks in self._pieces:
                    if piece.parameter in values and self._is_stored(ranks):
                        self._stored(piece).copy_(piece.narrow(values[piece.parameter]))
        self._estimated = {_path(name, COUNT): found.count for name, found in estimates.items()}

    def warn_of_subnetworks(self, warn: Callable[[str], None], call: str) -> None:
        """Once, if the dense model is to be written with what subnetworks have seen.

        Args:
            call: that estimates anew.
        """
        if not self._has_warned and self.are_of_subnetworks():
            self._has_warned = True
            warn(
                "the dense model is written with running statistics of batch norms that come from subnetworks, whose "
                f"activations differ from the dense model's: call {call} before, on all ranks"
            )

    def are_of_subnetworks(self) -> bool:
        """Whether they are not known to be of the dense model, which no rank runs when it trains (forward regime)."""
        if not self.norms or self._model.stores_all or self._model.plan.is_whole:
            return False
        own = [(piece.parameter, self._stored(piece)) for piece, ranks in self._counts if self._is_stored(ranks)]
        return not self._estimated or any(int(count) != self._estimated.get(name) for name, count in own)

    @cached_property
    def _pieces(self) -> list[tuple[Piece, tuple[int, ...]]]:
        """All pieces of statistics, each with the ranks that store it, which run it."""
        everyone = tuple(range(len(self._model.plan.subnetwork_of_rank)))
        return [
            (piece, everyone if self._model.stores_all else holders)
            for pieces in pieces_by_tensor(self.tensors, self._model.plan).values()
            for piece, holders in pieces
        ]

    @property
    def _counts(self) -> list[tuple[Piece, tuple[int, ...]]]:
        return [(piece, ranks) for piece, ranks in self._pieces if piece.parameter.endswith(COUNT)]

    @cached_property
    def _stretches(self) -> list[_Stretch]:
        shapes, result, start = self._model.views.shapes, list[_Stretch](), 0
        for piece, ranks in self._pieces:
            if not piece.parameter.endswith(COUNT):
                result.append(_Stretch(piece, ranks, start, piece.num_elements(shapes[piece.parameter])))
                start += result[-1].length
        return result

    @cached_property
    def _length(self) -> int:
        return sum(stretch.length for stretch in self._stretches)

    @cached_property
    def _divisors(self) -> torch.Tensor:
        numbers = [float(len(stretch.ranks)) for stretch in self._stretches for _ in range(stretch.length)]
        return torch.tensor(numbers, dtype=torch.float64, device=self.device)

    def _packed(self) -> torch.Tensor:
        """What this rank adds: its statistics, zeros for others'; then a row of counts for each rank, all but its own
        zeros, since a largest one cannot be had from a sum."""
        size, counts = self._dp_group.size, self._counts
        flat = torch.zeros(self._length + size * len(counts), dtype=torch.float64, device=self.device)
        for stretch in self._own_stretches():
            values = in_order(stretch.piece, self._stored(stretch.piece))
            flat.narrow(0, stretch.start, stretch.length).copy_(values.reshape(-1))
        row = flat[self._length :].view(size, len(counts))[self._dp_group.rank]
        for index, (piece, ranks) in enumerate(counts):
            if self._is_stored(ranks):
                row[index] = self._stored(piece)
        return flat

    def _own_stretches(self) -> Iterator[_Stretch]:
        return (stretch for stretch in self._stretches if self._is_stored(stretch.ranks))

    def _is_stored(self, ranks: tuple[int, ...]) -> bool:
        return self._model.rank in ranks


def _infos(norms: Mapping[str, BatchNorm], model: RankModel) -> Iterator[TensorInfo]:
    shapes = model.views.shapes
    for name, norm in norms.items():
        for of in (MEAN, VARIANCE, COUNT):
            path, buffer = _path(name, of), getattr(norm, of)
            if buffer is not None:
                yield TensorInfo(path, tuple(shapes[path]), buffer.dtype, kind="buffer", trainable=False)


def _path(name: str, of: str) -> str:
    return f"{name}.{of}" if name else of


def _named(found: Estimate) -> Iterator[tuple[str, torch.Tensor]]:
    yield from (
        (MEAN, found.mean),
        (VARIANCE, found.variance),
        (COUNT, torch.tensor(found.count, dtype=torch.int64, device="cpu")),
    )
