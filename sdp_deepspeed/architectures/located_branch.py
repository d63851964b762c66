"""Where a live model's described branches are, which pieces belong to each, and how they may be cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import torch
from torch import nn

from sdp_deepspeed.architectures.branch import Branch, Cut, InnerLayers
from sdp_deepspeed.architectures.registry import branches_in, described
from sdp_deepspeed.units import Piece

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class CutTensor:
    """A weight or bias that runs over the cells of a branch.

    Args:
        cut: the layer that it belongs to, and how it is cut.
        parameter: dense name.
        dim: stored dimension that runs over the cells.
        size: number of indices along `dim`.
    """

    cut: Cut
    parameter: str
    dim: int
    size: int

    def pieces(self, cells: range, num_cells: int) -> list[Piece]:
        """The pieces of a stretch of cells, one per block."""
        block = self.size // self.cut.blocks
        width = block // num_cells
        starts = range(cells.start * width, self.size, block)
        return [Piece(self.parameter, self.dim, start, len(cells) * width) for start in starts]


@dataclass(frozen=True)
class LocatedBranch:
    """A residual branch in a live model.

    Args:
        layer: dense name of its layer, as in `named_modules()`.
        description: of the branch, by its class.
        pieces: all of the branch's parameters and buffers, whole.
        num_cells: neurons or heads (key/value heads) inside; 0 if the description names none.
        cut_tensors: what runs over them.
        uncuttable_reason: why this branch cannot be cut, if it cannot: its layers are not as described.
    """

    layer: str
    description: Branch
    pieces: tuple[Piece, ...]
    num_cells: int = 0
    cut_tensors: tuple[CutTensor, ...] = ()
    uncuttable_reason: str = ""

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.description.name}"

    @property
    def body(self) -> str:
        """Dense name of the module that does the work."""
        return f"{self.layer}.{self.description.body}"

    def pieces_of_cells(self, cells: range) -> tuple[Piece, ...]:
        """The pieces of a stretch of cells, in model order of their tensors."""
        return tuple(piece for tensor in self.cut_tensors for piece in tensor.pieces(cells, self.num_cells))

    @property
    def modules(self) -> tuple[str, ...]:
        """Dense module names in the order in which they run."""
        return tuple(f"{self.layer}.{name}" for name in self.description.modules)


def locate_branches(model: nn.Module) -> list[LocatedBranch]:
    """All residual branches of the described layers, in model order.

    Raises:
        ValueError: no layer is described, one runs other code than its description is of, a described submodule is
            missing, or a branch shares a tensor with another part of the model.
    """
    branches = []
    for name, module in model.named_modules():
        for branch in branches_in(name, module):
            pieces = _pieces(name, module, branch)
            try:
                cells = _cells(name, module.get_submodule(branch.body), branch)
            except (AttributeError, ValueError) as problem:  # of no concern to the block strategy
                branches.append(LocatedBranch(name, branch, pieces, uncuttable_reason=f"{problem}"))
            else:
                branches.append(LocatedBranch(name, branch, pieces, *cells))
    if not branches:
        raise ValueError(
            f"{type(model).__name__} has no layer whose residual branches are known; known are "
            f"{', '.join(described())}. Describe yours with sdp_deepspeed.architectures.register (see its docstring)"
        )
    _refuse_tied(model, branches)
    _refuse_common_modules(model, branches)
    return branches


def _refuse_common_modules(model: nn.Module, branches: Sequence[LocatedBranch]) -> None:
    """A rank that lacks one of two branches would lack the module in the other, too."""
    owners: dict[nn.Module, str] = {}
    for branch in branches:
        for name in branch.modules:
            module = model.get_submodule(name)
            if owners.setdefault(module, branch.name) != branch.name:
                raise ValueError(
                    f"{name!r} is the same {type(module).__name__} in the branches {owners[module]} and {branch.name}: "
                    "give each branch a module of its own"
                )


def _pieces(layer_name: str, layer: nn.Module, branch: Branch) -> tuple[Piece, ...]:
    pieces = []
    for path in branch.modules:
        try:
            module = layer.get_submodule(path)
        except AttributeError:
            raise ValueError(
                f"{layer_name} ({type(layer).__name__}) has no submodule {path!r}, which the description of its "
                f"branch {branch.name!r} names; its submodules are {[name for name, _ in layer.named_children()]}"
            ) from None
        prefix = f"{layer_name}.{path}"
        pieces += [Piece(name, None, 0, p.numel()) for name, p in module.named_parameters(prefix)]
        pieces += [Piece(name, None, 0, b.numel(), "buffer") for name, b in module.named_buffers(prefix)]
    return tuple(pieces)


def _cells(layer_name: str, body: nn.Module, branch: Branch) -> tuple[int, tuple[CutTensor, ...]]:
    """Number of cells of a branch, and its tensors that run over them; an error if they are not as described."""
    if branch.inner is None:
        raise ValueError("its description names no neurons or heads; register it with architectures.InnerLayers")
    tensors = [tensor for cut in branch.inner.cuts for tensor in _cut_tensors(f"{layer_name}.{branch.body}", body, cut)]
    path, start = branch.inner.heads, cast(Any, body)
    num_cells = tensors[0].size if path is None else int(reduce(getattr, path.split("."), start))
    for tensor in tensors:
        if num_cells < 1 or tensor.size % (num_cells * tensor.cut.blocks):
            raise ValueError(
                f"{tensor.parameter} has {tensor.size} indices along dim {tensor.dim}, which do not divide into "
                f"{tensor.cut.blocks} x {num_cells} cells of the branch {branch.name!r}: correct its description"
            )
    _refuse_other_tensors(f"{layer_name}.{branch.body}", body, branch.inner, tensors[0].size)
    return num_cells, tuple(tensors)


def _refuse_other_tensors(body_name: str, body: nn.Module, inner: InnerLayers, size: int) -> None:
    """A norm over the neurons, such as a BatchNorm, has an element for each of them, and would meet fewer."""
    known = {*(cut.module for cut in inner.cuts), *inner.per_head, *inner.tail}
    outputs = {n for cut in inner.cuts if cut.is_output for n in body.get_parameter(f"{cut.module}.weight").shape}
    for name, module in body.named_modules():
        # Of heads, or where the output is as wide, a vector of this size may be one over the output.
        is_certain = isinstance(module, _BATCH_NORMS) or (inner.heads is None and outputs != {size})
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if is_certain and name not in known and tensor.shape == (size,):
                raise ValueError(
                    f"{body_name}.{name} ({type(module).__name__}) has an element for each of the {size} neurons and "
                    "is not cut with them: use the block strategy for this part"
                )


def _cut_tensors(body_name: str, body: nn.Module, cut: Cut) -> list[CutTensor]:
    parameters = dict(body.get_submodule(cut.module).named_parameters(recurse=False))
    name = f"{body_name}.{cut.module}"
    if "weight" not in parameters:
        raise ValueError(f"{name} has no weight of its own (a {type(body.get_submodule(cut.module)).__name__})")
    result = [CutTensor(cut, f"{name}.weight", cut.dim, parameters["weight"].shape[cut.dim])]
    if "bias" in parameters and not cut.is_output:
        result.append(CutTensor(cut, f"{name}.bias", 0, parameters["bias"].shape[0]))
    return result


def _refuse_tied(model: nn.Module, branches: Sequence[LocatedBranch]) -> None:
    owners: dict[int, str] = {}
    inside = {piece.parameter: branch.name for branch in branches for piece in branch.pieces}
    tensors: Iterable[tuple[str, torch.Tensor]] = itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    for name, tensor in tensors:
        place = inside.get(name, "the shared part")
        if owners.setdefault(id(tensor), place) != place:
            raise ValueError(
                f"{name!r} is the same tensor in {owners[id(tensor)]} and in {place}: a unit must not share "
                "tensors; untie them, or do not describe this layer"
            )
