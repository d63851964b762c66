"""What the dense view sees of a masked module: parts that become dense together and go back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from sdp_deepspeed.units import Piece

Fetch = Callable[[Mapping[Piece, torch.Tensor]], None]
"""Fills tensors, one per lacking piece and shaped as in the dense model; a collective in the forward regime."""


@dataclass
class DenseTensors:
    """What makes a part dense on one rank.

    Args:
        targets: per lacking piece where its values go, shaped as in the dense model.
        values: per tensor of the module what is in its place; complete once `targets` are filled.
    """

    targets: dict[Piece, torch.Tensor]
    values: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)


class MaskedPart(ABC):
    """Modules of which ranks lack pieces; every rank has the same parts in the same order.

    Attributes:
        name: of the unit or branch, for messages.
        units: indices in the plan of all units that it takes.
        modules: the modules in the order in which they run.
        whole: whether this rank's subnetwork has all of it, as in the dense model.
        filled: whether it was made dense, between `show` and `release`.
    """

    def __init__(self, name: str, units: Sequence[int], modules: Sequence[nn.Module], *, whole: bool) -> None:
        self.name = name
        self.units = tuple(units)
        self.modules = list(modules)
        self.whole = whole
        self.filled = False

    @abstractmethod
    def apply(self) -> None:
        """Cut the modules down to what this rank's subnetwork has; called once."""

    @property
    def dense(self) -> bool:
        """Whether all of it is here now."""
        return self.whole or self.filled

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """What its `DenseTensors` take."""

    @abstractmethod
    def allocate(self) -> DenseTensors:
        """Room for what is lacking, beside what this rank stores."""

    @abstractmethod
    def complete(self, dense: DenseTensors) -> None:
        """Its targets were filled; called once for each."""

    @abstractmethod
    def show(self, dense: DenseTensors) -> None:
        """Make the part dense; `dense` stays as it is, and may be shown again."""

    def fill(self, fetch: Fetch) -> None:
        """Make the part dense; calls `fetch` once."""
        dense = self.allocate()
        fetch(dense.targets)
        self.complete(dense)
        self.show(dense)

    @abstractmethod
    def release(self) -> None:
        """Go back to what this rank's subnetwork has."""

    @abstractmethod
    def take_over(self) -> None:
        """Keep what was changed in the dense model (a state dict was loaded) in what this rank stores."""

    def keep_statistics(self) -> None:  # noqa: B027
        """Keep what a pass of the dense model in training mode changed of buffers that are cut."""

    @abstractmethod
    def stand_ins(self) -> dict[torch.Tensor, torch.Tensor]:
        """Per tensor of which this rank has less than all a tensor of its dense shape, which takes no memory and has no
        values."""

    def undo(self) -> None:
        """Inverse of `apply`, but for the values of what has a stand-in now; called once, and never while it is dense.
        The classes of its modules are changed back by `mixins.unmix`."""
        for tensor, dense in self.stand_ins().items():
            replace_data(tensor, dense)


def give_storage(tensors: Mapping[str, torch.Tensor], formats: Mapping[str, torch.memory_format]) -> None:
    """Where tensors still are stand-ins, memory for their values; both by name."""
    for name, tensor in tensors.items():
        if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
            with torch.inference_mode(False):
                tensor.data = empty_like(tensor, tensor.shape, formats[name])


def empty_like(tensor: torch.Tensor, shape: torch.Size, memory_format: torch.memory_format) -> torch.Tensor:
    """Of another shape, without values."""
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=memory_format)


def stand_in(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """One element that is read as all of them."""
    with torch.inference_mode(False):
        return torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tuple(shape))


def replace_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Data of another shape; autograd forgets the one that it knew, which a graph that somebody keeps would hold."""
    with torch.inference_mode(False):
        if tensor.is_floating_point():
            other = torch.float32 if tensor.dtype == torch.float64 else torch.float64
            tensor.data = torch.empty(0, dtype=other, device=tensor.device)
        tensor.data = data
