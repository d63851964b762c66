"""Gives a masked model that was built under `Init` its storage, and what a rank has of the initial values."""

from __future__ import annotations

import torch

from sdp_deepspeed.core.init import DeferredWeights, give
from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.plan.tensors import named_tensors


@torch.no_grad()
def materialize(deferred: DeferredWeights, mask: Mask, device: torch.device, seed: int) -> None:
    """Tensors stay the objects that they are, and random states what they were.

    Args:
        mask: applied.
        seed: the same on every rank.
    """
    random_state, views = torch.get_rng_state(), mask.model.views
    twins = [twin for part in mask.parts for twin in getattr(part, "twins", ())]
    inside = [tensor for twin in twins for tensor in named_tensors(twin).values()]
    storages: dict[int, list[torch.Tensor]] = {}  # halves of a tensor may share one
    for tensor in {id(t): t for t in (*views.tensors.values(), *views.lacking.values(), *inside)}.values():
        if tensor.is_meta:
            storages.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        elif tensor.device != device:
            tensor.data = tensor.data.to(device)
    for tensors in list(storages.values()):
        storage = torch.zeros(tensors[0].untyped_storage().nbytes(), dtype=torch.uint8, device=device).untyped_storage()
        for tensor in tensors:
            empty = torch.empty(0, dtype=tensor.dtype, device=device)
            give(tensor, empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride()))
    dropped = mask.dropped_names()
    for name in (name for name in deferred.names if name not in dropped):
        dense, pieces = deferred.value(name, seed), views.cut_pieces(name)
        if not pieces:
            views.tensors[name].detach().copy_(dense)
        for piece in pieces:
            views.weight_view(piece).copy_(piece.narrow(dense))
    deferred.restore_attributes(device, seed)
    torch.set_rng_state(random_state)
