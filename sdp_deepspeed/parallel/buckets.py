"""A bucket: slices of parameters with the same holders, param group and dtype, side by side in flat buffers.

`BucketLayout` (bucket_layouts.py) says what it contains, the same on all ranks. `Bucket` is one rank's memory for it:
flat weights and gradients, and the shard that this rank steps, with its averaged gradient. What is ready to be sent,
and when, is the reducer's (reducer.py).

Whole tensors need no packing: they are views of their bucket's flat weights, and their gradients are views of its flat
gradients. A parameter that is cut stores the held slices side by side. These may have different holders, so they lie in
different buckets and are copied to and from flat buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from sdp_deepspeed.parallel.bucket_layouts import BUCKET_SIZE, BucketLayout
from sdp_deepspeed.parallel.groups import RankGroup
from sdp_deepspeed.parallel.offload import OffloadedShard
from sdp_deepspeed.units import Piece, Pieces


class FlatBuffer:
    """A flat tensor and views of its slices, with memory only while it is needed.

    Args:
        keeps_views: whether `drop` keeps the views, without memory, since creating thousands of them is slow. Other
            code must not refer to them then.

    Attributes:
        views: each slice in the slice's shape; none before `allocate`.
    """

    def __init__(
        self, layout: BucketLayout, dtype: torch.dtype, device: torch.device, *, keeps_views: bool = True
    ) -> None:
        self._size, self._dtype, self._device, self._keeps_views = layout.size, dtype, device, keeps_views
        self._like = [torch.zeros(()).expand(item.shape) for item in layout.slices]  # shapes
        self._flat: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []

    @property
    def flat(self) -> torch.Tensor:
        """The tensor, which must have memory."""
        assert self.has_memory
        assert self._flat is not None
        return self._flat

    @property
    def has_memory(self) -> bool:
        return self._flat is not None and self._flat.untyped_storage().nbytes() == self._flat.nbytes

    def allocate(self) -> torch.Tensor:
        """Return the tensor, and allocate its memory unless it has some."""
        if self._flat is None:
            self._flat = torch.empty(self._size, dtype=self._dtype, device=self._device)
            self.views = self.views_of(self._flat)
        elif not self.has_memory:
            self._flat.untyped_storage().resize_(self._flat.nbytes)
        return self._flat

    def drop(self) -> None:
        """Release the memory."""
        if not self._keeps_views:
            self._flat, self.views = None, []
        elif self._flat is not None:
            self._flat.untyped_storage().resize_(0)

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of the slices in a tensor like this one."""
        return [*torch._utils._unflatten_dense_tensors(flat, self._like)]


class Bucket:
    """One rank's memory for a bucket.

    Args:
        group: the holders, over which it is sharded. None if this rank is not one and only receives weights (backward
            regime).
        gradient_dtype: dtype in which gradients are accumulated; None for that of the weights.

    Attributes:
        weights: [size] in the weights' dtype; of cut tensors only while they are sent.
        gradients: [size] local gradients, from the first one to the end of the step, so they take no memory at the peak
            of activations; at stage 2 only while the bucket is sent.
        parameters: what the optimizer steps: the shard, or whole tensors.
        places: where each slice is; set by `place_in_buckets`.
        shard: flat fp32 parameter of the optimizer: a view of `weights` of whole fp32 tensors, otherwise a copy. Empty
            on holders at other positions than `stepping_position` (Muon).
        steps_in_place: whether `shard` is that view.
        average: [shard size] averaged gradient of `shard`, in `step_dtype`; None until it is there. At stage 1 maybe
            a view of `gradients`.
        offloaded: host memory of `shard` and `average` with CPU offload.
    """

    def __init__(
        self,
        layout: BucketLayout,
        group: RankGroup | None,
        *,
        device: torch.device,
        gradient_dtype: torch.dtype | None = None,
    ) -> None:
        self.layout, self._group = layout, group
        self.places: list[Place] = []
        self.weights = FlatBuffer(layout, layout.dtype, device)
        # Gradients of whole tensors are in `.grad`, so other code may refer to them.
        self.gradients = FlatBuffer(layout, gradient_dtype or layout.dtype, device, keeps_views=layout.is_cut)
        self.shard: nn.Parameter | None = None
        self.steps_in_place = False
        self.parameters: list[nn.Parameter] = []
        self.average: torch.Tensor | None = None
        self.offloaded: OffloadedShard | None = None

    def drop_weights(self) -> None:
        """Release the memory of `weights` of cut tensors."""
        if self.layout.is_cut:
            self.weights.drop()

    @property
    def is_held(self) -> bool:
        """Whether this rank is a holder."""
        return self._group is not None

    @property
    def group(self) -> RankGroup:
        """The holders, of which this rank must be one."""
        assert self._group is not None
        return self._group

    @property
    def step_dtype(self) -> torch.dtype:
        """Dtype in which the optimizer steps."""
        return torch.promote_types(self.layout.dtype, torch.float32)

    def shard_of(self, flat: torch.Tensor) -> torch.Tensor:
        """View of this rank's shard in a flat buffer."""
        first, end = self.layout.shard_range(self.group.position)
        return flat[first:end]

    def weights_from_module(self, view: Callable[[Piece], torch.Tensor]) -> None:
        """Copy the module's tensors to `weights`."""
        self.weights.allocate()[self.layout.num_elements :].zero_()
        torch._foreach_copy_(self.weights.views, [view(item.piece) for item in self.layout.slices])

    def make_shard(self, *, offload: bool = False, pin_memory: bool = False) -> None:
        """Create `shard` from `weights`: a copy for cut tensors and low precision; in host memory with offload."""
        values = self.shard_of(self.weights.flat)
        dtype = self.step_dtype
        if offload:
            self.offloaded = OffloadedShard(values, pin_memory=pin_memory)
            self.shard = nn.Parameter(self.offloaded.weights)
        else:
            self.steps_in_place = not self.layout.is_cut and dtype == values.dtype
            self.shard = nn.Parameter(values if self.steps_in_place else values.to(dtype, copy=True))
        self.parameters = [self.shard]
        if self.layout.stepping_position is not None:
            self.parameters = [nn.Parameter(tensor) for tensor in self.stepped(self.shard.detach())]

    def add_average(self, average: torch.Tensor) -> None:
        """Store an averaged gradient of the shard in `average`, or add it to that of earlier micro-steps."""
        if self.offloaded is not None:
            self.average = self.offloaded.receive_gradient(average, adds=self.average is not None)
        else:
            self.average = average if self.average is None else self.average.add_(average)

    def expose_average(self) -> torch.Tensor:
        """Make `average` the gradient of `parameters`, and return it."""
        assert self.average is not None
        for parameter, gradient in zip(self.parameters, self.stepped(self.average), strict=True):
            parameter.grad = gradient
        return self.average

    def drop_average(self) -> None:
        """Release `average`, also as a gradient."""
        self.average = None
        for parameter in self.parameters:
            parameter.grad = None

    def stepped(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """What belongs to each of `parameters` in a tensor like `shard`: all of it, or views of whole tensors."""
        if self.layout.stepping_position is None:
            return [flat]
        return self.weights.views_of(flat) if flat.numel() else []

    def shard_from_weights(self) -> None:
        """Copy into `shard` the elements of `weights` that no longer equal the rounded shard."""
        assert self.shard is not None
        if not self.steps_in_place:
            shard = self.shard.detach()
            values = self.shard_of(self.weights.flat).to(shard.device)
            shard.copy_(torch.where(shard.to(values.dtype) == values, shard, values.to(shard.dtype)))

    def shard_to_weights(self) -> torch.Tensor:
        """Round `shard` into `weights`; returns this rank's shard of these."""
        assert self.shard is not None
        rounded = self.shard_of(self.weights.flat)
        if self.offloaded is not None:
            self.offloaded.send_weights(rounded)
        elif not self.steps_in_place:
            rounded.copy_(self.shard.detach())
        return rounded

    def restore_views(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Make whole tensors views of `weights`, with their current values, unless they are. Users may replace
        `.data`."""
        if self.layout.is_cut:
            return
        for item, view in zip(self.layout.slices, self.weights.views, strict=True):
            parameter = parameters[item.piece.parameter]
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.detach())
                parameter.data = view


class Place(NamedTuple):
    """Where a held slice is, in the module and in the buckets.

    Args:
        bucket_index: index of its bucket among the held ones.
    """

    name: str
    index_in_tensor: int
    bucket_index: int
    index_in_bucket: int


class HeldTensor(NamedTuple):
    """A trained tensor of which this rank holds slices.

    Args:
        dim: dimension along which it is cut; None for a whole tensor.
        lengths: lengths of the held slices, which are adjacent in the parameter.
        bucket_indices: of the buckets with these slices, ascending.
    """

    parameter: nn.Parameter
    dim: int | None
    lengths: list[int]
    places: list[Place]
    bucket_indices: list[int]

    def slices(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Views of the held slices of the parameter, or of its gradient."""
        return (tensor,) if self.dim is None else tensor.split(self.lengths, self.dim)


def place_in_buckets(
    buckets: Sequence[Bucket], parameters: Mapping[str, nn.Parameter], pieces: Pieces, rank: int
) -> dict[str, HeldTensor]:
    """The tensors of which a rank (its data-parallel index) holds slices, by name; also sets `places` of its
    buckets."""
    in_buckets: dict[Piece, tuple[int, int]] = {}
    for number, bucket in enumerate(buckets):
        for index, item in enumerate(bucket.layout.slices):
            in_buckets[item.piece] = number, index
    tensors: dict[str, HeldTensor] = {}
    place_of: dict[Piece, Place] = {}
    for name, parameter in parameters.items():
        held = [piece for piece, holders in pieces[name] if rank in holders]
        if not held:
            continue
        for index, piece in enumerate(held):
            place_of[piece] = Place(name, index, *in_buckets[piece])
        places = [place_of[piece] for piece in held]
        lengths = [piece.length for piece in held]
        touched = sorted({place.bucket_index for place in places})
        tensors[name] = HeldTensor(parameter, held[0].dim, lengths, places, touched)
    for bucket in buckets:
        bucket.places = [place_of[item.piece] for item in bucket.layout.slices]
    return tensors


def sent_together(
    buckets: Sequence[Bucket], bucket_size: int | None, *, gathers: bool = False
) -> Iterator[list[Bucket]]:
    """Yield lists of consecutive buckets whose messages are sent together: over gloo, those whose holders exchange
    shards point-to-point, so that a rank waits for others less often. Other buckets are sent one by one.

    Args:
        bucket_size: maximum number of elements that this rank receives for a list of several; None for BUCKET_SIZE.
        gathers: whether they are all-gathered, not reduce-scattered.
    """
    together: list[Bucket] = []
    num_received = 0
    for bucket in buckets:
        group = bucket.group
        is_direct = group.gathers_directly if gathers else group.scatters_directly
        is_alone = not is_direct or bucket.layout.stepping_position is not None
        count = group.num_received(bucket.layout.size)
        is_full = num_received + count > (bucket_size or BUCKET_SIZE)
        if together and (is_alone or is_full or bucket.layout.dtype != together[0].layout.dtype):
            yield together
            together, num_received = [], 0
        together.append(bucket)
        num_received += count
        if is_alone:
            yield together
            together, num_received = [], 0
    if together:
        yield together
