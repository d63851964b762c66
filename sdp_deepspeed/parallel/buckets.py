"""One rank's memory for its buckets (bucket_layouts.py): flat weights and gradients, and the shard that it steps.

Whole tensors need no packing: they are views of their bucket's flat weight buffer, and their gradients are views of its
flat gradient buffer. A parameter that is cut stores the held slices side by side. These may have different holders, so
they lie in different buckets and are copied to and from flat buffers; the gathered weights use the memory of the
gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from sdp_deepspeed.parallel.bucket_layouts import BucketLayout, Pieces, Slice
from sdp_deepspeed.parallel.groups import HolderGroup, received_elements
from sdp_deepspeed.parallel.offload import OffloadedShard
from sdp_deepspeed.units import Piece


def row_major_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield elements [start, stop) in row-major order as boxes (offsets, sizes)."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row, inner = math.prod(shape[1:]), tuple(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        for offsets, sizes in row_major_boxes(inner, start - first * row, stop - first * row):
            yield (first, *offsets), (1, *sizes)
        return
    low, high = -(-start // row), stop // row
    yield from row_major_boxes(shape, start, low * row)
    if low < high:
        yield (low, *(0 for _ in inner)), (high - low, *inner)
    yield from row_major_boxes(shape, high * row, stop)


class ShardPart(NamedTuple):
    """Elements `start` to `stop` of a slice, in a parameter of the optimizer.

    Args:
        parameter: the parameter that the optimizer steps.
        first: index of the first element in the flattened parameter.
    """

    slice: Slice
    start: int
    stop: int
    parameter: nn.Parameter
    first: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Flat view of the elements in the parameter, or in a tensor with the same layout."""
        return tensor.detach().view(-1)[self.first : self.first + self.stop - self.start]

    @property
    def piece(self) -> Piece:
        return self.slice.piece

    def boxes(self, tensor: torch.Tensor, *, flat: bool = False) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yield the elements as a minimal number of boxes: offsets in the slice, and a view.

        Args:
            tensor: the parameter, or one with the same layout.
            flat: whether to treat the slice as a vector.
        """
        values, first = self.of(tensor), 0
        for offsets, sizes in row_major_boxes((self.slice.num_elements,) if flat else self.slice.shape, *self[1:3]):
            count = math.prod(sizes)
            yield offsets, values[first : first + count].view(sizes)
            first += count


class Bucket:
    """One rank's memory for a bucket.

    Args:
        layout: contents of the bucket.
        group: the holders; None if this rank is not a holder and only receives weights (backward regime).
        device: device of the weights.

    Attributes:
        weights: flat [size] in the weights' dtype; of cut tensors only while they are sent, else None.
        gradients: flat [size] local gradients in the accumulation dtype; None or without memory while there are none.
        weight_slots, gradient_slots: views of each slice into these, in the slice's shape.
        parameters: what the optimizer steps: the shard, or whole tensors.
        places: tensor of each slice, and index of the slice among the held slices of the tensor.
        filled: for each slice, whether its accumulated gradient was moved to the slot; False where `.grad` is the slot.
        waits_for: names of tensors whose gradients are not ready in this backward pass.
        shard: flat fp32 parameter of the optimizer: a view of `weights` of whole fp32 tensors, otherwise a copy. Empty
            on holders that are not the owner (Muon).
        average: [shard size] averaged gradient of `shard`, in `step_dtype`; None until it is available.
        offloaded: host memory of `shard` and `average` with CPU offload.
    """

    def __init__(self, layout: BucketLayout, group: HolderGroup | None, *, device: torch.device) -> None:
        self.layout, self.group, self.device = layout, group, device
        self.names = list(dict.fromkeys(part.piece.parameter for part in layout.slices))
        self.places: list[tuple[str, int]] = []
        self._has_gradients = False  # whether `gradients` have memory
        self._in_gradients: tuple[torch.Tensor, list[torch.Tensor]] | None = None  # weights in the gradients' memory
        self._like = [torch.zeros(()).expand(part.shape) for part in layout.slices]  # shapes, for `_slots`
        self.waits_for = set(self.names)
        self.filled = [False] * len(layout.slices)
        self.weights: torch.Tensor | None = None
        self.weight_slots: list[torch.Tensor] = []
        self.gradients: torch.Tensor | None = None
        self.gradient_slots: list[torch.Tensor] = []
        self.shard: nn.Parameter | None = None
        self.parameters: list[nn.Parameter] = []
        self.average: torch.Tensor | None = None
        self.offloaded: OffloadedShard | None = None

    def place_weights(self, *, reuse_gradients: bool = False) -> None:
        """Allocate `weights`, unless they are allocated.

        Args:
            reuse_gradients: whether to reuse the memory of the gradients, which must no longer be needed.
        """
        if self.weights is not None:
            return
        dtype, size = self.layout.dtype, self.layout.size
        if reuse_gradients and self.gradients is not None and self.gradients.nbytes >= size * dtype.itemsize:
            self.place_gradients(None)
            if self._in_gradients is None:
                weights = self.gradients.view(dtype)[:size]
                self._in_gradients = weights, self._slots(weights)
            self.weights, self.weight_slots = self._in_gradients
        else:
            self.weights = torch.empty(size, dtype=dtype, device=self.device)
            self.weight_slots = self._slots(self.weights)

    def drop_weights(self) -> None:
        """Release `weights` of cut tensors."""
        if not self.layout.is_whole:
            if self._in_gradients is not None and self.weights is self._in_gradients[0]:
                self.drop_gradients()
            self.weights, self.weight_slots = None, []

    def place_gradients(self, dtype: torch.dtype | None) -> None:
        """Allocate `gradients`, unless they are allocated. They exist from the first gradient to the end of the step,
        so they take no memory at the peak of activations; at stage 2, they exist only while the bucket is sent.

        Args:
            dtype: default: that of the weights.
        """
        if self._has_gradients:
            return
        if self.gradients is None:
            self.gradients = torch.empty(self.layout.size, dtype=dtype or self.layout.dtype, device=self.device)
            self.gradient_slots = self._slots(self.gradients)
        else:
            self.gradients.untyped_storage().resize_(self.gradients.nbytes)
        self._has_gradients = True

    def drop_gradients(self) -> None:
        """Release the memory of the gradients. Views of cut tensors' gradients are kept, since creating thousands of
        them is slow. Those of whole tensors were in `.grad`, so other code may refer to them."""
        if self.layout.is_whole:
            self.gradients, self.gradient_slots = None, []
        elif self.gradients is not None:
            self.gradients.untyped_storage().resize_(0)
        self._has_gradients = False

    def _slots(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [*torch._utils._unflatten_dense_tensors(flat, self._like)]

    @property
    def holder_group(self) -> HolderGroup:
        """`group`, if this rank is a holder."""
        assert self.group is not None
        return self.group

    @property
    def step_dtype(self) -> torch.dtype:
        """Dtype in which the optimizer steps."""
        return torch.promote_types(self.layout.dtype, torch.float32)

    def shard_of(self, flat: torch.Tensor) -> torch.Tensor:
        """View of the part of a flat buffer that this rank owns."""
        first, end = self.layout.shard_range(self.holder_group.position)
        return flat[first:end]

    def weights_from_module(self, view: Callable[[Piece], torch.Tensor]) -> None:
        """Copy the module's tensors to `weights`."""
        self.place_weights()
        assert self.weights is not None
        self.weights[self.layout.num_elements :].zero_()
        torch._foreach_copy_(self.weight_slots, [view(part.piece) for part in self.layout.slices])

    def make_shard(self, *, offload: bool = False, pin_memory: bool = False) -> None:
        """Create `shard` from `weights`: a copy for cut tensors and low precision; in host memory with offload."""
        assert self.weights is not None
        values = self.shard_of(self.weights)
        dtype = self.step_dtype
        if offload:
            self.offloaded = OffloadedShard(values, pin_memory=pin_memory)
            self.shard = nn.Parameter(self.offloaded.weights)
        else:
            is_view = self.layout.is_whole and dtype == values.dtype
            self.shard = nn.Parameter(values if is_view else values.to(dtype, copy=True))
        self.parameters = [self.shard]
        if self.layout.owner is not None:
            self.parameters = [nn.Parameter(tensor) for tensor in self._stepped_tensors(self.shard.detach())]

    def add_average(self, average: torch.Tensor) -> None:
        """Store an averaged gradient of the shard in `average`, or add it to that of earlier micro-steps."""
        if self.offloaded is not None:
            self.average = self.offloaded.receive_gradient(average, adds=self.average is not None)
        else:
            self.average = average if self.average is None else self.average.add_(average)

    def zero_average(self, names: Collection[str]) -> None:
        """Set the averaged gradients of some tensors to zero."""
        if self.average is not None:
            before = self.layout.shard_range(self.holder_group.position)[0]
            for part in self.parts():
                if part.piece.parameter in names:
                    first = part.slice.start - before
                    self.average[first + part.start : first + part.stop].zero_()

    def set_gradients(self, gradient: torch.Tensor | None) -> None:
        """Set the gradient of `shard` for the optimizer; None removes it."""
        gradients: Sequence[torch.Tensor | None] = [gradient]
        if gradient is None:
            gradients = [None] * len(self.parameters)
        elif self.layout.owner is not None:
            gradients = self._stepped_tensors(gradient)
        for parameter, own in zip(self.parameters, gradients, strict=True):
            parameter.grad = own

    def parts(self) -> Iterator[ShardPart]:
        """Yield the parts of slices that this rank owns, and steps."""
        position = self.holder_group.position
        before = self.layout.shard_range(position)[0]
        for part, start, stop in self.layout.owned(position):
            if self.layout.owner is not None:
                yield ShardPart(part, start, stop, self.parameters[self.layout.slices.index(part)], start)
            else:
                yield ShardPart(part, start, stop, self.parameters[0], part.start + start - before)

    def _stepped_tensors(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of the whole tensors in what this rank steps: all of the bucket's, or none."""
        return self._slots(flat) if flat.numel() else []

    @property
    def steps_in_place(self) -> bool:
        """Whether `shard` is a view of `weights`."""
        assert self.shard is not None
        if self.weights is None:
            return False
        return self.shard.data_ptr() == self.shard_of(self.weights).data_ptr()

    def shard_from_weights(self) -> None:
        """Copy into `shard` the elements of `weights` that no longer equal the rounded shard."""
        assert self.shard is not None
        assert self.weights is not None
        if not self.steps_in_place:
            shard = self.shard.detach()
            values = self.shard_of(self.weights).to(shard.device)
            shard.copy_(torch.where(shard.to(values.dtype) == values, shard, values.to(shard.dtype)))

    def shard_to_weights(self) -> None:
        """Round `shard` into `weights`."""
        assert self.shard is not None
        assert self.weights is not None
        if self.offloaded is not None:
            self.offloaded.send_weights(self.shard_of(self.weights))
        elif not self.steps_in_place:
            self.shard_of(self.weights).copy_(self.shard.detach())

    def weights_to_module(self, view: Callable[[Piece], torch.Tensor]) -> None:
        """Copy `weights` into cut tensors; whole ones are views of it."""
        if not self.layout.is_whole:
            torch._foreach_copy_([view(part.piece) for part in self.layout.slices], self.weight_slots)


class HeldTensor(NamedTuple):
    """A trained tensor of which this rank holds slices.

    Args:
        dim: dimension along which it is cut; None for a whole tensor.
        lengths: lengths of the held slices, which are adjacent in the parameter.
        slots: bucket and slot of each held slice; buckets by their index among the held ones.
        buckets: their indices, ascending.
    """

    parameter: nn.Parameter
    dim: int | None
    lengths: list[int]
    slots: list[tuple[int, int]]
    buckets: list[int]

    def slices(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Views of the held slices of the parameter, or of its gradient."""
        return (tensor,) if self.dim is None else tensor.split(self.lengths, self.dim)


def held_tensors(
    buckets: Sequence[Bucket], parameters: Mapping[str, nn.Parameter], pieces: Pieces, rank: int
) -> dict[str, HeldTensor]:
    """The tensors of which a rank holds slices, by name; also sets `places` of its buckets.

    Args:
        buckets: that the rank holds.
        parameters: trained tensors.
        rank: data-parallel index.
    """
    slots = {
        part.piece: (index, number)
        for index, bucket in enumerate(buckets)
        for number, part in enumerate(bucket.layout.slices)
    }
    tensors: dict[str, HeldTensor] = {}
    places: dict[Piece, int] = {}
    for name, parameter in parameters.items():
        if held := [piece for piece, holders in pieces[name] if rank in holders]:
            own = [slots[piece] for piece in held]
            indices = sorted({index for index, _ in own})
            tensors[name] = HeldTensor(parameter, held[0].dim, [piece.length for piece in held], own, indices)
            places |= {piece: place for place, piece in enumerate(held)}
    for bucket in buckets:
        bucket.places = [(part.piece.parameter, places[part.piece]) for part in bucket.layout.slices]
    return tensors


def coalesced(buckets: Sequence[Bucket], bucket_size: int, *, gathers: bool = False) -> Iterator[list[Bucket]]:
    """Yield lists of consecutive buckets whose messages are posted together: over gloo, those whose holders exchange
    shards point-to-point, so that a rank waits for others less often. Other buckets are sent one by one.

    Args:
        bucket_size: maximum number of elements that this rank receives for a group of several.
        gathers: whether they are all-gathered, not reduce-scattered.
    """
    together: list[Bucket] = []
    num_received = 0
    for bucket in buckets:
        group = bucket.holder_group
        is_direct = group.gathers_directly if gathers else group.scatters_directly
        is_direct = is_direct and bucket.layout.owner is None
        count = received_elements(bucket.layout.size, group)
        fits = is_direct and num_received + count <= bucket_size
        if together and not (fits and bucket.layout.dtype == together[0].layout.dtype):
            yield together
            together, num_received = [], 0
        together.append(bucket)
        num_received += count if is_direct else bucket_size
    if together:
        yield together
