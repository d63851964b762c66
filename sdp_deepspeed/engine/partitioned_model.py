"""Models built under `deepspeed.zero.Init`, as by `from_pretrained` at stage 3, of which each rank has a part."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from torch import nn

from sdp_deepspeed.masking import Mask
from sdp_deepspeed.masking.tensor_data import move_in_place
from sdp_deepspeed.recording import is_meta


def is_partitioned(model: nn.Module) -> bool:
    """Whether a model was built under `zero.Init`, at least in part."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


class PartitionedModel:
    """Weights of a model built under `zero.Init`. They are reduced to a subnetwork one parameter at a time, so that no
    rank has all of them.

    The constructor turns the model's parameters into ordinary ones on the meta device, to which a mask may be applied.
    """

    def __init__(self, model: nn.Module) -> None:
        self._ids: dict[str, int] = {}  # by which DeepSpeed knows its parameters, by dense name
        parameter: Any
        for name, parameter in model.named_parameters():
            if hasattr(parameter, "ds_id"):
                self._ids[name], self._device = vars(parameter).pop("ds_id"), parameter.device
                move_in_place(parameter, torch.empty(parameter.ds_shape, dtype=parameter.dtype, device="meta"))

    @torch.no_grad()
    def reduce(self, mask: Mask) -> None:
        """Divide among the ranks of the team what its subnetwork has of each parameter. Collective.

        Args:
            mask: applied.
        """
        for tensor in mask.tensors():
            if is_meta(tensor) and not isinstance(tensor, nn.Parameter):  # frozen slices (backward regime)
                move_in_place(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device))
        for name, ds_id in self._ids.items():
            parameter: Any = mask.parameters[name]
            shape, stored = parameter.shape, mask.stored_pieces(name)
            move_in_place(parameter, torch.empty(0, dtype=parameter.dtype, device=self._device))
            if not stored:
                parameter.ds_tensor = None
                continue
            parameter.ds_id = ds_id
            with deepspeed.zero.GatheredParameters([parameter]):
                dense = parameter.detach().clone()
            del parameter.ds_id
            parameter.data = torch.empty(shape, dtype=parameter.dtype, device=self._device)
            for piece in stored:
                mask.view(piece).copy_(piece.narrow(dense))
            parameter.convert_to_zero_parameters([parameter])
