"""A masked module with the weights of a copy for a while: an average of weights, say, to evaluate or export."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.messages import listed
from sdp_deepspeed.plan.tensors import named_tensors


class OtherWeights:
    """Puts the weights of copies into a module.

    Args:
        module: of the engine.
        mask: applied to it.

    Attributes:
        are_shown: whether the module has those of a copy now.
    """

    def __init__(self, module: nn.Module, mask: Mask) -> None:
        self._module = module
        self._mask = mask
        self.are_shown = False

    @contextmanager
    def shown(self, copied: nn.Module) -> Iterator[None]:
        """Context in which the module's tensors have the values of `copied`; those of one dtype share their memory.

        Raises:
            ValueError: by name, tensors that are missing or of other shapes: it is no copy of this subnetwork.
        """
        own, others = named_tensors(self._module), named_tensors(copied)
        self._check({name: tuple(tensor.shape) for name, tensor in others.items()})
        before = {name: tensor.data for name, tensor in own.items()}
        self.are_shown = True
        try:
            for name, tensor in own.items():
                tensor.data = others[name].detach().to(device=tensor.device, dtype=tensor.dtype)
            yield
        finally:
            for name, tensor in own.items():
                tensor.data = before[name]
            self.are_shown = False

    def _check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        if self._mask.model.stores_all and self._mask.parts:
            raise ValueError(
                "engine.dense(weights=...): in the backward regime with neurons a copy has the held ones only; copy "
                "and average inside `with engine.dense(resident=True):`, which moves nothing between ranks there"
            )
        wrong = [
            f"{name!r} ({shapes.get(name, 'missing')}, here {tuple(tensor.shape)})"
            for name, tensor in named_tensors(self._module).items()
            if shapes.get(name) != tuple(tensor.shape)
        ]
        if wrong:
            raise ValueError(
                f"engine.dense(weights=...): {listed(wrong)}: give a copy of engine.module that was made on this rank "
                "by copy.deepcopy outside of engine.dense"
            )
