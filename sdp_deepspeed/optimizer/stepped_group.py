"""What the wrapped optimizer steps on this rank: views of fp32 weights, or a flat fp32 master.

An elementwise optimizer does not care how elements are cut, so a rank hands it only the fragments that
it owns (stage 1) or holds (stage 0). One that needs whole tensors gets those that this rank owns, or holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import torch

from sdp_deepspeed.layout.cuts import Cuts, one_after_the_other
from sdp_deepspeed.layout.fragments import Fragment, Transfer, Views, locations, num_elements, read
from sdp_deepspeed.optimizer.host_step import HostStep
from sdp_deepspeed.units import Piece


def _can_view(cuts: Cuts, weights: Views) -> bool:
    """Whether stretches are views of fp32 weights, so that no master copy is needed."""
    tensors = [weights.tensor(key) for key in cuts.tensors]
    return all(t is not None and t.dtype == torch.float32 and t.is_contiguous() for t in tensors)


class SteppedGroup:
    """One optimizer param group on this rank.

    fp32 weights are stepped in place: no second copy exists. Lower precision and offload keep one flat fp32 master. An
    optimizer of whole tensors gets views of either, shaped as in the dense model.

    Args:
        fragments: what this rank steps, in the order of its flat gradient.
        weights: the module's.
        host: the optimizer's, if it steps in host memory; None to step on the device of the weights.
        factors: of the learning rate of each piece; None if all are 1.
        shapes: of dense tensors by name, if the optimizer gets whole ones, of which `fragments` are all; None if it
            steps each element by itself.

    Attributes:
        tensors: what the optimizer gets.
        factors: of the learning rate of each of them.
    """

    def __init__(
        self,
        fragments: Sequence[Fragment],
        weights: Views,
        host: HostStep | None = None,
        *,
        factors: Mapping[Piece, float] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.fragments = list(fragments) if shapes is None else joined(fragments)
        self.sizes = [fragment.num_elements for fragment in self.fragments]
        self.num_elements = sum(self.sizes)
        self.is_whole = shapes is not None
        self._weights = weights
        self._host = host
        self._cuts = Cuts(list(zip(locations(weights, self.fragments), self.sizes, strict=True)))
        self._transfer = Transfer(self.fragments, one_after_the_other(self.sizes))
        self.in_place = host is None and _can_view(self._cuts, weights)
        self._runs = self._make_runs([1.0 if factors is None else factors[f.piece] for f in self.fragments])
        self.factors = [factor for factor, _ in self._runs]
        self._shapes = self._shapes_of_tensors(shapes)
        self._master: torch.Tensor | None = None
        self.tensors = self._make_tensors()
        self._chunks = [] if host is None else host.chunks(self.fragments, self._dtype_of)

    def _make_runs(self, factors: Sequence[float]) -> list[tuple[float, list[int]]]:
        """For each tensor the factor and the sizes of its fragments: in a flat master one for neighbors that have the
        same factor, else one for each fragment."""
        pairs = list(zip(factors, self.sizes, strict=True))
        if self.in_place or self.is_whole:
            return [(factor, [size]) for factor, size in pairs]
        runs = itertools.groupby(pairs, key=lambda pair: pair[0])
        return [(factor, [size for _, size in run]) for factor, run in runs]

    def _shapes_of_tensors(self, shapes: Mapping[str, Sequence[int]] | None) -> list[tuple[int, ...]]:
        """A number has the shape [1]: else its moment would look like a step count."""
        if shapes is not None:
            return [tuple(shapes[fragment.piece.parameter]) or (1,) for fragment in self.fragments]
        return [(sum(sizes),) for _, sizes in self._runs]

    def _make_tensors(self) -> list[torch.nn.Parameter]:
        if not self.fragments:
            return []
        if self.in_place:
            return [torch.nn.Parameter(view) for view in self._shaped(self._views())]
        self._master = self._new_master(self._flat_weights())
        return [torch.nn.Parameter(view) for view in self._shaped(self._parts([self._master]))]

    def _shaped(self, flats: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not self.is_whole:
            return flats
        return [flat.view(shape) for flat, shape in zip(flats, self._shapes, strict=True)]

    def places(self) -> list[tuple[int, int]]:
        """Of each fragment: in which of `tensors` it is, and at which element it begins there."""
        return [
            (index, start)
            for index, (_, sizes) in enumerate(self._runs)
            for start in itertools.accumulate(sizes[:-1], initial=0)
        ]

    def _new_master(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Fragments in a flat fp32 tensor."""
        device = values[0].device if self._host is None else torch.device("cpu")
        master = torch.empty(self.num_elements, dtype=torch.float32, device=device)
        torch._foreach_copy_(list(master.split(self.sizes)), list(values))
        return master

    def _views(self) -> list[torch.Tensor]:
        """Flat views; an error if the weights' storage was replaced by one of another order."""
        try:
            flats = {key: self._weight(key).view(-1) for key in self._cuts.tensors}
        except RuntimeError as problem:
            raise RuntimeError(
                "a parameter got storage of another memory order (its data was made contiguous, perhaps); "
                "copy new values into it instead, or replace it by a clone"
            ) from problem
        return self._cuts.of(flats)

    def _weight(self, key: Hashable) -> torch.Tensor:
        weight = self._weights.tensor(key)
        assert weight is not None, f"no tensor {key}"
        return weight

    def _dtype_of(self, piece: Piece) -> torch.dtype:
        return self._weight(self._weights.locate(piece).tensor).dtype

    def _flat_weights(self) -> list[torch.Tensor]:
        return read(self._weights, self._cuts, device=self._device)

    @property
    def _device(self) -> torch.device:
        """Of the weights."""
        return self._weight(self._cuts.tensors[0]).device

    def set_flat_gradient(self, *stretches: torch.Tensor) -> None:
        """Give the optimizer its gradient, without a copy on its own device, but for a whole tensor that several
        stretches have parts of; after `HostStep.wait` where that is the host.

        Args:
            stretches: fp32, together [num_elements]; one, or in place any number of whole fragments.
        """
        if not self.fragments:  # of this param group other ranks own everything
            return
        if self._host is not None:
            (flat,) = stretches
            stretches = (self._host.receive(flat, id(self)),)
        for tensor, part in zip(self.tensors, self._shaped(self._parts(stretches)), strict=True):
            tensor.grad = part

    def _parts(self, stretches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each tensor's part of flat stretches that have them one after the other."""
        coming, parts = iter(stretches), list[torch.Tensor]()
        head, start = next(coming), 0
        for shape in self._shapes:
            size, found = math.prod(shape), list[torch.Tensor]()
            while size:
                if start == head.numel():
                    head, start = next(coming), 0
                taken = min(size, head.numel() - start)
                found.append(head.narrow(0, start, taken))
                size, start = size - taken, start + taken
            parts.append(found[0] if len(found) == 1 else torch.cat(found))
        return parts

    def set_gradients(self, gradients: Views, frozen: Collection[str] = ()) -> None:
        """Give the optimizer averaged gradients of all that this rank holds (stage 0).

        Args:
            frozen: tensors without one here; in a flat master theirs is zero, as in DeepSpeed's. Where another holder
                has one they are stepped as there, so that holders stay identical.
        """
        if not self.fragments:
            return
        if self.in_place:
            stretches = read(gradients, self._cuts, device=self._device)
        else:
            flat = torch.empty_like(self._flat_master)
            self._transfer.gather(gradients, [flat])
            stretches = self._parts([flat])
        for tensor, stretch in zip(self.tensors, self._shaped(stretches), strict=True):
            tensor.grad = stretch
        if frozen and self.in_place:
            here = [i for i, fragment in enumerate(self.fragments) if fragment.piece.parameter in frozen]
            has_some = torch.stack([stretches[i].any() for i in here]).tolist() if here else []  # the host waits once
            for i, is_stepped in zip(here, has_some, strict=True):
                if not is_stepped:
                    self.tensors[i].grad = None

    def link(self) -> None:
        """Point views at the weights' present storage: others replace `param.data` behind us."""
        if self.in_place:
            for tensor, view in zip(self.tensors, self._shaped(self._views()), strict=True):
                tensor.data = view

    @property
    def _flat_master(self) -> torch.Tensor:
        assert self._master is not None, "stepped in place, or nothing is stepped"
        return self._master

    def write_back(self) -> None:
        """Round the stepped master into the weights and drop the gradients."""
        for tensor in self.tensors:
            tensor.grad = None
        if not self.fragments or self.in_place:
            return
        if self._host is None or not self._host.is_elsewhere:
            self._transfer.scatter([self._flat_master], self._weights)
            return
        for chunk, values in self._host.send(self._flat_master, self._chunks):
            chunk.transfer.scatter([values], self._weights)

    def reload_master(self) -> None:
        """Take the master from the weights where they are no more the rounded master: they came from outside."""
        if self.fragments and not self.in_place:
            masters = self._flat_master.split(self.sizes)
            for master, weight in zip(masters, self._flat_weights(), strict=True):
                rounded = weight.to(master.device)
                master.copy_(torch.where(master.to(rounded.dtype) == rounded, master, rounded.float()))


def joined(fragments: Sequence[Fragment]) -> list[Fragment]:
    """The whole pieces that fragments are parts of, in the order of their first parts."""
    pieces: dict[Piece, list[Fragment]] = {}
    for fragment in fragments:
        pieces.setdefault(fragment.piece, []).append(fragment)
    wholes = [Fragment(piece, 0, num_elements(parts)) for piece, parts in pieces.items()]
    for whole in wholes:
        starts = itertools.accumulate((part.num_elements for part in pieces[whole.piece]), initial=0)
        assert all(part.start == start for part, start in zip(pieces[whole.piece], starts, strict=False)), whole
    return wholes


def repoint(optimizer: torch.optim.Optimizer, groups: Sequence[SteppedGroup]) -> None:
    """Make `optimizer` step what this rank steps instead of the model's parameters, options untouched.

    Adagrad creates its state in its constructor, so it is constructed again; all others create theirs at
    the first step.
    """
    needs_state = bool(optimizer.state)
    optimizer.state.clear()
    for options, group in zip(optimizer.param_groups, groups, strict=True):
        options["params"] = group.tensors
    if needs_state:
        kind: Any = type(optimizer)
        optimizer.state = kind([dict(options) for options in optimizer.param_groups], **optimizer.defaults).state


def check_fresh(optimizer: torch.optim.Optimizer) -> None:
    """ValueError if the optimizer already has state for its parameters (it was stepped before)."""
    started = [state for state in optimizer.state.values() if _was_stepped(state)]
    if started:
        raise ValueError(
            f"the optimizer already holds state for {len(started)} parameters; give subnetwork_data_parallel a fresh "
            "optimizer and load a checkpoint afterward"
        )


def _was_stepped(state: Mapping[str, Any]) -> bool:
    return bool(state) and float(state.get("step", 1)) > 0
