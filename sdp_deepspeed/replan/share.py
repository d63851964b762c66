"""What a rank has after a re-plan, and where it comes from: this rank itself where that can be, else its owner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from sdp_deepspeed.checkpoint.state.boxes import Box
from sdp_deepspeed.replan.catalog import Catalog, Part
from sdp_deepspeed.replan.requests import Request


@dataclass(frozen=True)
class Share:
    """Of one rank.

    Args:
        moves: what comes from this rank: where it goes, and what it is.
        requests: what comes from others, by rank.
        places: where each of those goes, in the same order.
    """

    moves: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    requests: dict[int, list[Request]] = field(default_factory=dict)
    places: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, targets: Iterable[tuple[str, Box, torch.Tensor]], local: Mapping[str, Sequence[Part]], catalog: Catalog
    ) -> Share:
        """
        Args:
            targets: key, box and place of all that the rank has under the new plan.
            local: as `OwnState.local`.

        Raises:
            RuntimeError: nobody has an element, by key.
        """
        share = cls()
        for key, box, place in targets:
            left = [box]
            for source, values in local.get(key, ()):
                if not left:
                    break
                found, left = _taken(left, source)
                share.moves.extend((place[b.slices_in(box)], values[b.slices_in(source)]) for b in found)
            for owner, source in catalog.owners[key].overlapping(box) if left and key in catalog.owners else ():
                found, left = _taken(left, source)
                for part in found:
                    share.requests.setdefault(owner, []).append(Request(key, source.offsets, part))
                    share.places.setdefault(owner, []).append(place[part.slices_in(box)])
            if left:
                raise RuntimeError(f"re-planning: no rank has {key!r} from {left[0].offsets} on")
        return share

    def num_bytes(self, catalog: Catalog) -> int:
        """That must come from others: of the state that this rank has under the new plan, what it does not have yet."""
        requests = (request for of_owner in self.requests.values() for request in of_owner)
        return sum(request.box.num_elements * catalog.dtypes[request.key].itemsize for request in requests)

    @torch.no_grad()
    def copy(self) -> None:
        """What comes from this rank; what stays where it is costs nothing."""
        for place, values in self.moves:
            if place.data_ptr() != values.data_ptr() or place.stride() != values.stride():
                place.copy_(values)


def _taken(left: Sequence[Box], source: Box) -> tuple[list[Box], list[Box]]:
    """Of boxes what `source` has, and the rest."""
    found: list[Box] = []
    rest: list[Box] = []
    for box in left:
        overlap = box.overlap(source)
        if overlap is None:
            rest.append(box)
        else:
            found.append(overlap)
            rest.extend(box.without(overlap))
    return found, rest


def halves(box: Box, max_elements: int) -> Iterator[Box]:
    """The box in parts of at most so many elements, in an order that both ends know."""
    if box.num_elements <= max(1, max_elements):
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    size = box.sizes[dim] // 2
    first = Box(box.offsets, (*box.sizes[:dim], size, *box.sizes[dim + 1 :]))
    for half in (first, *box.without(first)):
        yield from halves(half, max_elements)
