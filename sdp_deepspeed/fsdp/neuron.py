"""Neuron strategy: a branch's body becomes a sum over sets of holders, each addend a narrower body of its own.

FSDP2 shards whole parameters. So neurons or heads that different ranks hold must be different parameters: all those of
a branch with the same holders make one piece, a module that FSDP2 shards over these holders, and whose reduce-scatter
averages over just them. A rank builds the pieces that it holds and no others; what the branch has once (output bias,
norms of each head, dropout at its end) stays in the body itself, is shared, and counts once.

    model.layers.0.mlp                            the body: sums, adds the bias
    model.layers.0.mlp.pieces.3.down_proj.weight  of the piece whose holders are the fourth set of holders

In the dense model the body runs as it was built, on whole parameters that somebody gives it for a while.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.fsdp.narrow_copies import Changes, Heads, make_piece
from sdp_deepspeed.fsdp.pieces import HeldTensor
from sdp_deepspeed.fsdp.splittable import PIECES
from sdp_deepspeed.fsdp.whole_layers import WholeLayers
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.masking.counts import Counts
from sdp_deepspeed.masking.halves import leave_out_caches
from sdp_deepspeed.masking.mixins import Mixin, mix_in
from sdp_deepspeed.masking.outputs import Outputs


@dataclass(frozen=True)
class BranchPiece:
    """What ranks of one set hold of a branch, on one of them.

    Args:
        index: of the set in the plan's order.
        holders: the set, ascending.
        module: the narrower body.
        tensors: all its parameters.
    """

    index: int
    holders: tuple[int, ...]
    module: nn.Module
    tensors: tuple[HeldTensor, ...]


class SplitBranch:
    """A branch whose neurons or heads are not all held by all ranks, on one rank.

    Args:
        module: the model, of which `branch` is still whole.
        model: the plan, and the module's tensors.
        branch: the branch; `check_splittable` has passed.
        holder_sets: all sets of holders in the order that all ranks agree on.

    Attributes:
        name: of the branch.
        body_name: of the module that is split.
        sets: the sets of holders that hold something of this branch, each with its index, in that order.
        pieces: that this rank holds, in that order; they run in it, too.
        dense: whether the body has all its parameters for the moment.
    """

    def __init__(
        self,
        module: nn.Module,
        model: RankModel,
        branch: LocatedBranch,
        holder_sets: Sequence[tuple[int, ...]],
    ) -> None:
        assert branch.description.inner is not None, "units of neurons come from a description of them"
        self.name = branch.name
        self.inner = branch.description.inner
        self.outputs = Outputs.of(branch.description)
        self.pieces: tuple[BranchPiece, ...] = ()
        self.dense = False
        self._branch = branch
        self._model = model
        self._body = module.get_submodule(branch.root)
        self.body_name = branch.root
        of_branch = {holders for _, _, holders in self._cells()}
        self.sets = [(index, holders) for index, holders in enumerate(holder_sets) if holders in of_branch]
        self._whole = WholeLayers(self._body, {path: tensor.parameter for path, tensor in self._cut().items()})

    def apply(self) -> None:
        """Make the pieces that this rank holds, and leave what is shared; what it lacks has no storage any more."""
        counts = Counts(self._branch, [self._body])
        self.pieces = tuple(
            self._make_piece(index, holders, counts) for index, holders in self.sets if self._model.rank in holders
        )
        self._whole.remove()
        self._body.add_module(PIECES, self._as_children())
        mix_in(SumModule, self._body)
        object.__setattr__(self._body, "_sdp_part", self)

    def show(self, values: Mapping[str, torch.Tensor]) -> None:
        """Make the body that of the dense model.

        Args:
            values: by dense name whole tensors for all that is cut.
        """
        delattr(self._body, PIECES)
        self._whole.give(values)
        self.dense = True

    def release(self) -> None:
        """Inverse of `show`."""
        self._whole.remove()
        self._body.add_module(PIECES, self._as_children())
        self.dense = False

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Of the dense model, by the dense names of all that is cut."""
        return self._whole.shapes

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The body's output on this rank: the sum over the pieces that it holds.

        All ranks run the pieces of a branch in the order of the sets of holders. Autograd runs what was recorded later
        first, so the backward pass has finished a piece before it begins one that ran earlier.
        """
        body = self._body
        leave_out_caches(self.inner, self.name, body, kwargs, way="from the dense model")
        total: Any = None
        for piece in self.pieces:
            if piece.module.training != body.training:  # it was no child of the body while that was dense
                piece.module.train(body.training)
            output = piece.module(*args, **kwargs)
            addend = output[0] if self.outputs.count > 1 else output
            total = addend if total is None else total + addend
        for bias in self._whole.biases():
            total = total + bias.to(total.dtype)
        for name in self.inner.tail:
            total = body.get_submodule(name)(total)
        if self.inner.tail_dropout:
            total = functional.dropout(total, p=getattr(body, self.inner.tail_dropout), training=body.training)
        return self.outputs.around(total, kwargs)

    def _as_children(self) -> nn.ModuleDict:
        return nn.ModuleDict({f"{piece.index}": piece.module for piece in self.pieces})

    def _cut(self) -> dict[str, Any]:
        """By path in the body what runs over neurons or heads."""
        prefix = len(self._branch.root) + 1
        return {tensor.parameter[prefix:]: tensor for tensor in self._branch.cut_tensors}

    def _parts(self, dense_name: str) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Start, length and holders along the cut dim, in dense order."""
        for piece, holders in self._model.pieces["parameter", dense_name]:
            yield piece.start, piece.length, holders

    def _cells(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """As `_parts`, of neurons or key/value heads."""
        tensor = next(tensor for tensor in self._branch.cut_tensors if tensor.cut.is_output)
        width = tensor.size // self._branch.num_cells
        return [(start // width, length // width, holders) for start, length, holders in self._parts(tensor.parameter)]

    def _make_piece(self, index: int, holders: tuple[int, ...], counts: Counts) -> BranchPiece:
        parameters: dict[str, nn.Parameter | None] = {}
        tensors = []
        for path, cut in self._cut().items():
            parts = self._parts(cut.parameter)
            intervals = merged((start, length) for start, length, ranks in parts if ranks == holders)
            parameters[path] = _narrowed(self._body.get_parameter(path), cut.dim, intervals)
            name = f"{self._branch.root}.{PIECES}.{index}.{path}"
            tensors.append(HeldTensor(name, cut.parameter, cut.dim, intervals, holders))
        parameters |= dict.fromkeys(self._whole.bias_paths)
        owners = [path.rpartition(".")[0] for path in self.inner.scaled if not path.startswith("config.")]
        changes = Changes(parameters, {name: nn.Identity() for name in self.inner.tail}, owners)
        cells = [
            cell for start, length, ranks in self._cells() if ranks == holders for cell in range(start, start + length)
        ]
        heads = Heads(self.inner.by_head, tuple(cells), self._branch.num_cells, self.outputs)
        module = make_piece(self._body, changes, heads)
        if self.inner.tail_dropout:
            setattr(module, self.inner.tail_dropout, 0.0)
        counts.set([module])
        return BranchPiece(index, holders, module, tuple(tensors))


class SumModule(Mixin):
    """Mixed in before the class of a body that is cut."""

    _sdp_part: SplitBranch

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._sdp_part.dense:
            return super().forward(*args, **kwargs)
        return self._sdp_part.run(args, kwargs)


def merged(parts: Iterator[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ascending (start, length), with neighbors as one."""
    result: list[tuple[int, int]] = []
    for start, length in parts:
        if result and sum(result[-1]) == start:
            result[-1] = (result[-1][0], result[-1][1] + length)
        else:
            result.append((start, length))
    return tuple(result)


def _narrowed(dense: torch.Tensor, dim: int, intervals: Sequence[tuple[int, int]]) -> nn.Parameter:
    """A parameter with storage of its own, and what users noted on the dense one."""
    parts = [dense.detach().narrow(dim, start, length) for start, length in intervals]
    result = nn.Parameter(torch.cat(parts, dim), requires_grad=dense.requires_grad)
    vars(result).update(vars(dense))
    return result
