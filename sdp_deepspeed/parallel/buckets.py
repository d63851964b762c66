"""A bucket: slices of parameters with the same holders, param group and dtype, side by side in flat buffers.

`BucketLayout` (bucket_layouts.py) says what it contains, the same on all ranks. `Bucket` is one rank's memory for it:
flat weights and gradients, and the shard that this rank steps, with its averaged gradient. What is ready to be sent,
and when, is the reducer's (reducer.py).

Whole tensors need no packing: they are views of their bucket's flat weights, and their gradients are views of its flat
gradients. A parameter that is cut stores the held slices side by side. These may have different holders, so they lie in
different buckets and are copied to and from flat buffers; the gathered weights use the memory of the gradients.
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


class Bucket:
    """One rank's memory for a bucket.

    Args:
        group: the holders, over which it is sharded. None if this rank is not one and only receives weights (backward
            regime).

    Attributes:
        weights: flat [size] in the weights' dtype; of cut tensors only while they are sent, else None.
        gradients: flat [size] local gradients in the accumulation dtype; None or without memory while there are none.
        weight_views, gradient_views: view of each slice in these, in the slice's shape.
        parameters: what the optimizer steps: the shard, or whole tensors.
        places: where each slice is; set by `place_in_buckets`.
        shard: flat fp32 parameter of the optimizer: a view of `weights` of whole fp32 tensors, otherwise a copy. Empty
            on holders at other positions than `stepping_position` (Muon).
        average: [shard size] averaged gradient of `shard`, in `step_dtype`; None until it is there. At stage 1 maybe
            a view of `gradients`.
        offloaded: host memory of `shard` and `average` with CPU offload.
    """

    def __init__(self, layout: BucketLayout, group: RankGroup | None, *, device: torch.device) -> None:
        self.layout, self._group, self.device = layout, group, device
        self.places: list[Place] = []
        self._has_gradients = False  # whether `gradients` have memory
        self._in_gradients: tuple[torch.Tensor, list[torch.Tensor]] | None = None  # weights in the gradients' memory
        self._like = [torch.zeros(()).expand(item.shape) for item in layout.slices]  # shapes, for `_views`
        self.weights: torch.Tensor | None = None
        self.weight_views: list[torch.Tensor] = []
        self.gradients: torch.Tensor | None = None
        self.gradient_views: list[torch.Tensor] = []
        self.shard: nn.Parameter | None = None
        self.parameters: list[nn.Parameter] = []
        self.average: torch.Tensor | None = None
        self.offloaded: OffloadedShard | None = None

    def allocate_weights(self, *, reuse_gradients: bool = False) -> torch.Tensor:
        """Return `weights`, and allocate them if needed.

        Args:
            reuse_gradients: whether to reuse the memory of the gradients, which must no longer be needed.
        """
        if self.weights is not None:
            return self.weights
        dtype, size = self.layout.dtype, self.layout.size
        if reuse_gradients and self.gradients is not None and self.gradients.nbytes >= size * dtype.itemsize:
            self.allocate_gradients(None)
            if self._in_gradients is None:
                weights = self.gradients.view(dtype)[:size]
                self._in_gradients = weights, self._views(weights)
            self.weights, self.weight_views = self._in_gradients
        else:
            self.weights = torch.empty(size, dtype=dtype, device=self.device)
            self.weight_views = self._views(self.weights)
        return self.weights

    def drop_weights(self) -> None:
        """Release `weights` of cut tensors."""
        if self.layout.is_cut:
            if self._in_gradients is not None and self.weights is self._in_gradients[0]:
                self.drop_gradients()
            self.weights, self.weight_views = None, []

    def allocate_gradients(self, dtype: torch.dtype | None) -> None:
        """Allocate `gradients`, unless they are allocated. They exist from the first gradient to the end of the step,
        so they take no memory at the peak of activations; at stage 2, they exist only while the bucket is sent.

        Args:
            dtype: default: that of the weights.
        """
        if self._has_gradients:
            return
        if self.gradients is None:
            self.gradients = torch.empty(self.layout.size, dtype=dtype or self.layout.dtype, device=self.device)
            self.gradient_views = self._views(self.gradients)
        else:
            self.gradients.untyped_storage().resize_(self.gradients.nbytes)
        self._has_gradients = True

    def drop_gradients(self) -> None:
        """Release the memory of the gradients. Views of cut tensors' gradients are kept, since creating thousands of
        them is slow. Those of whole tensors were in `.grad`, so other code may refer to them."""
        if not self.layout.is_cut:
            self.gradients, self.gradient_views = None, []
        elif self.gradients is not None:
            self.gradients.untyped_storage().resize_(0)
        self._has_gradients = False

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [*torch._utils._unflatten_dense_tensors(flat, self._like)]

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
        self.allocate_weights()[self.layout.num_elements :].zero_()
        torch._foreach_copy_(self.weight_views, [view(item.piece) for item in self.layout.slices])

    def make_shard(self, *, offload: bool = False, pin_memory: bool = False) -> None:
        """Create `shard` from `weights`: a copy for cut tensors and low precision; in host memory with offload."""
        assert self.weights is not None
        values = self.shard_of(self.weights)
        dtype = self.step_dtype
        if offload:
            self.offloaded = OffloadedShard(values, pin_memory=pin_memory)
            self.shard = nn.Parameter(self.offloaded.weights)
        else:
            is_view = not self.layout.is_cut and dtype == values.dtype
            self.shard = nn.Parameter(values if is_view else values.to(dtype, copy=True))
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
        return self._views(flat) if flat.numel() else []

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

    def shard_to_weights(self) -> torch.Tensor:
        """Round `shard` into `weights`; returns this rank's shard of these."""
        assert self.shard is not None
        assert self.weights is not None
        rounded = self.shard_of(self.weights)
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
        for item, view in zip(self.layout.slices, self.weight_views, strict=True):
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
    """The tensors of which a rank holds slices, by name; also sets `places` of its buckets."""
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
