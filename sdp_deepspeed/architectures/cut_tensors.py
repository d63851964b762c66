"""Tensors over a branch's neurons or heads, and how they are cut."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from sdp_deepspeed.architectures.branch import BATCH_NORMS, Cut
from sdp_deepspeed.units import Piece, TensorKind


@dataclass(frozen=True)
class CutTensor:
    """A weight, bias or running statistic over the cells of a branch.

    Args:
        cut: the layer that it belongs to, and how it is cut.
        dim: stored dimension that runs over the cells.
        shares: number in proportion to the width of each block.
    """

    cut: Cut
    parameter: str
    dim: int
    size: int
    shares: tuple[int, ...] = (1,)
    kind: TensorKind = "parameter"

    def has_blocks_of(self, num_cells: int) -> bool:
        """Whether each block divides into `num_cells` cells of equal width."""
        return num_cells > 0 and all(
            self.size * share % (sum(self.shares) * num_cells) == 0 and share for share in self.shares
        )

    def pieces(self, cells: range, num_cells: int) -> list[Piece]:
        """Pieces of a range of cells, one per block."""
        result, start = [], 0
        for share in self.shares:
            block = self.size * share // sum(self.shares)
            width = block // num_cells
            begin, length = start + cells.start * width, len(cells) * width
            result.append(Piece(self.parameter, self.dim, begin, length, self.kind))
            start += block
        return result


def cut_tensors_of(root_name: str, root: nn.Module, cut: Cut) -> list[CutTensor]:
    """Tensors of one layer of a body, from live shapes.

    Args:
        root_name: dense name of the module to which names of `cut` are relative.

    Raises:
        AttributeError: the submodule is missing.
        ValueError: it has no weight, or one that does not fit the description.
    """
    parameters = dict(root.named_parameters())
    weight, bias = cut.names(parameters)
    module = None if weight == cut.module else root.get_submodule(cut.module)
    if isinstance(module, BATCH_NORMS):
        return _vectors(f"{root_name}.{cut.module}", module, cut)
    if weight not in parameters:
        raise ValueError(f"{root_name}.{cut.module} has no weight of its own (a {type(module).__name__})")
    shares = (1,) * cut.blocks if isinstance(cut.blocks, int) else cut.blocks
    result = [CutTensor(cut, f"{root_name}.{weight}", cut.dim, parameters[weight].shape[cut.dim], shares)]
    if bias in parameters and not cut.is_output:
        last = parameters[bias].dim() - 1
        result.append(CutTensor(cut, f"{root_name}.{bias}", last, parameters[bias].shape[last], shares))
    return result


def _vectors(name: str, norm: nn.Module, cut: Cut) -> list[CutTensor]:
    """Tensors of a batch norm."""
    vectors: list[tuple[TensorKind, str, torch.Tensor]] = [
        ("parameter", path, p) for path, p in norm.named_parameters()
    ]
    vectors += [("buffer", path, buffer) for path, buffer in norm.named_buffers() if buffer.dim()]
    return [CutTensor(cut, f"{name}.{path}", 0, len(vector), kind=kind) for kind, path, vector in vectors]
