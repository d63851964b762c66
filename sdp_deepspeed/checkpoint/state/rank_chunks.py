"""Where one rank's tensors lie in the dense model: its weights, masters and moments as chunks, to write and to fill."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch

from sdp_deepspeed.checkpoint.state.boxes import Box, box_of, boxes_of, in_dense
from sdp_deepspeed.checkpoint.state.chunks import Chunks, StateDict
from sdp_deepspeed.checkpoint.storage.names import WEIGHT
from sdp_deepspeed.layout.fragments import Fragment
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.optimizer.stepped_group import SteppedGroup
from sdp_deepspeed.plan.tensors import NOT_OPTIMIZED, TensorInfo
from sdp_deepspeed.units import Piece


class RankChunks:
    """Chunks of this rank.

    Args:
        model: parameters with their optimizer groups; shapes are those of this tensor-parallel rank.
        buffers: persistent ones.
    """

    def __init__(self, model: RankModel, buffers: Sequence[TensorInfo]) -> None:
        self._model = replace(model, tensors=(*model.tensors, *buffers))
        self._views, self._shards = model.views, model.shards
        self.tensors = {info.name: info for info in self._model.tensors}

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the dense tensor."""
        info = self.tensors[name]
        division = self._shards.divisions.get(name) if info.kind == "parameter" else None
        return division.shape if division is not None else info.shape

    def stored_weights(self) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """All pieces that this rank stores: dense name, where they lie in the dense tensor, and their live values."""
        for (_, name), pieces in self._model.pieces.items():
            for piece, holders in pieces:
                if prod(self.shape(name)) and (self._model.stores_all or self._model.rank in holders):
                    box = box_of(piece, self._local_shape(piece))
                    yield name, in_dense(box, piece, self._shards), self._weight(piece)

    def owned_weights(self, fragments: Iterable[Fragment], *, exclude_frozen: bool = False) -> StateDict:
        """Weights that this rank writes: each element of the dense model is written by one rank.

        Args:
            fragments: that this rank owns among the optimized ones; it takes its part of all others.
            exclude_frozen: leave out parameters that need no gradients.
        """
        result: StateDict = {}
        for fragment in [*fragments, *self._unoptimized(exclude_frozen=exclude_frozen)]:
            piece = fragment.piece
            shape = self._local_shape(piece)
            whole = box_of(piece, shape)
            for box in boxes_of(fragment, shape):
                values = self._weight(piece)[box.slices_in(whole)]
                self._add(result, WEIGHT, piece, box, values)
        return result

    def add_stretches(
        self, target: StateDict, key: str, fragments: Iterable[Fragment], flat_of: Callable[[Fragment], torch.Tensor]
    ) -> None:
        """Add to `target` what belongs to `fragments`, element by element: masters, moments.

        Args:
            flat_of: values of a fragment, 1-D in its order, as a view.
        """
        for fragment in fragments:
            piece, flat, start = fragment.piece, flat_of(fragment), 0
            for box in boxes_of(fragment, self._local_shape(piece)):
                values = in_box(flat.narrow(0, start, box.num_elements), box, piece.dim or 0)
                self._add(target, key, piece, box, values)
                start += box.num_elements

    def of_one_writer(self, chunks: StateDict) -> StateDict:
        """What of `chunks` this rank writes: of tensors that tensor-parallel ranks all have, each chunk one of them."""
        if self._shards.size == 1:
            return chunks
        is_even = all(division.is_even for division in self._shards.divisions.values())
        result: StateDict = {}
        for key, values in chunks.items():
            if key.partition("/")[2] in self._shards.divisions:
                result[key] = values
            elif is_even:
                result[key] = values.share(self._shards.index, self._shards.size)
            elif self._shards.index == 0:
                result[key] = values
        return result

    def own_buffers(self) -> dict[str, torch.Tensor]:
        """Buffers that this rank stores, on the host; each rank's own, but for batch norms' statistics. Of one that is
        cut, the pieces that this rank stores, side by side."""
        return {name: _joined(pieces, [view.cpu() for view in views]) for name, pieces, views in self._buffers()}

    def restore_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Inverse of `own_buffers`."""
        for name, pieces, views in self._buffers():
            if pieces[0].dim is None:
                views[0].copy_(buffers[name])
                continue
            for view, values in zip(views, buffers[name].split([p.length for p in pieces], pieces[0].dim), strict=True):
                view.copy_(values)

    def _buffers(self) -> Iterator[tuple[str, list[Piece], list[torch.Tensor]]]:
        """Those of which this rank stores something: the pieces, and where they lie."""
        for (kind, name), pieces in self._model.pieces.items():
            own = [piece for piece, holders in pieces if self._model.stores_all or self._model.rank in holders]
            if kind == "buffer" and own:
                yield name, own, [self._views.weight_view(piece).detach() for piece in own]

    def _unoptimized(self, *, exclude_frozen: bool) -> Iterator[Fragment]:
        """Of tensors that no optimizer has: each piece by one of its holders, in turn."""
        count = 0
        for (_, name), pieces in self._model.pieces.items():
            info = self.tensors[name]
            if info.kind == "parameter" and (info.group != NOT_OPTIMIZED or (exclude_frozen and not info.trainable)):
                continue
            for piece, holders in pieces:
                if holders[count % len(holders)] == self._model.rank:
                    yield Fragment(piece, 0, piece.num_elements(info.shape))
                count += 1

    def _local_shape(self, piece: Piece) -> tuple[int, ...]:
        """Of what this tensor-parallel rank has of the piece's tensor; flat if nobody knows how that was divided."""
        shape = self.tensors[piece.parameter].shape
        division = self._shards.division_of(piece)
        return shape if division is None or division.is_known else (prod(shape),)

    def _weight(self, piece: Piece) -> torch.Tensor:
        weight = self._views.weight_view(piece)
        return weight if len(self._local_shape(piece)) == weight.dim() else weight.view(-1)

    def _add(self, target: StateDict, key: str, piece: Piece, box: Box, values: torch.Tensor) -> None:
        name = piece.parameter
        chunks = target.setdefault(f"{key}/{name}", Chunks(self.shape(name), values.dtype))
        chunks.add(in_dense(box, piece, self._shards), values)


def locate(group: SteppedGroup) -> Callable[[Fragment, Sequence[torch.Tensor]], torch.Tensor]:
    """From a fragment of what `group` steps, and tensors laid out like `group.tensors`, to the fragment's values."""
    positions: dict[Piece, list[tuple[Fragment, int, int]]] = {}
    for fragment, where in zip(group.fragments, group.places(), strict=True):
        positions.setdefault(fragment.piece, []).append((fragment, *where))

    def find(fragment: Fragment, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        for stepped, index, begin in positions[fragment.piece]:
            if stepped.start <= fragment.start and fragment.stop <= stepped.stop:
                start = begin + fragment.start - stepped.start
                return tensors[index].detach().view(-1).narrow(0, start, fragment.stop - fragment.start)
        raise AssertionError(f"{fragment} is not stepped here")

    return find


def _joined(pieces: Sequence[Piece], values: Sequence[torch.Tensor]) -> torch.Tensor:
    dim = pieces[0].dim
    return values[0] if dim is None else torch.cat(list(values), dim)


def in_box(flat: torch.Tensor, box: Box, dim: int) -> torch.Tensor:
    """Elements of a box, which travel with `dim` first, shaped like the box."""
    if not box.sizes:
        return flat.view(())
    sizes = box.sizes
    return flat.view(sizes[dim], *sizes[:dim], *sizes[dim + 1 :]).movedim(0, dim)


def persistent_buffers(
    module: torch.nn.Module, shapes: Mapping[str, Sequence[int]], *, also: Collection[str] = ()
) -> list[TensorInfo]:
    """Buffers that state dicts have.

    Args:
        shapes: of the buffers before units were dropped, by name.
        also: names of others, which come last: who writes a buffer depends on those before it.
    """
    persistent: list[TensorInfo] = []
    others: list[TensorInfo] = []
    for prefix, inner in module.named_modules():
        for name, buffer in inner._buffers.items():
            path = f"{prefix}.{name}" if prefix else name
            if buffer is None:
                continue
            if name not in inner._non_persistent_buffers_set:
                persistent.append(_buffer(path, shapes[path], buffer))
            elif path in also:
                others.append(_buffer(path, shapes[path], buffer))
    return persistent + others


def _buffer(path: str, shape: Sequence[int], buffer: torch.Tensor) -> TensorInfo:
    return TensorInfo(path, tuple(shape), buffer.dtype, kind="buffer", trainable=False)
