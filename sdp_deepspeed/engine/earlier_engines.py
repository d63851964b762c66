"""Models that an earlier engine has masked: each model has one engine."""

from __future__ import annotations

import weakref
from typing import Protocol
from weakref import WeakKeyDictionary

from torch import nn

from sdp_deepspeed.masking.mask import Mask, is_masked
from sdp_deepspeed.messages import KEY


class MaskingEngine(Protocol):
    """An engine that has reduced its model to a subnetwork."""

    @property
    def mask(self) -> Mask: ...

    def release(self) -> None: ...


_engines: WeakKeyDictionary[nn.Module, weakref.ref[MaskingEngine]] = WeakKeyDictionary()  # by their model


def record_engine(model: nn.Module, engine: MaskingEngine) -> None:
    """Remember the engine of a model, for `make_whole`."""
    _engines[model] = weakref.ref(engine)


def make_whole(model: nn.Module) -> frozenset[str]:
    """Make a model dense again that an earlier engine has masked, and end that engine. Collective.

    Returns:
        Names of parameters that only the earlier mask had frozen on this rank.

    Raises:
        ValueError: the model is a copy, or a part, of a masked model.
    """
    frozen: frozenset[str] = frozenset()
    reference = _engines.pop(model, None)
    earlier = None if reference is None else reference()
    if earlier is not None:
        mask = earlier.mask
        frozen = frozenset(n for n, p in mask.parameters.items() if mask.trainable[n] and not p.requires_grad)
        earlier.release()
    refuse_masked(model)
    return frozen


def refuse_masked(model: nn.Module) -> None:
    """Raise ValueError for a masked model."""
    if any(map(is_masked, model.modules())):
        raise ValueError(
            f"{KEY}: an earlier engine reduced this model to a subnetwork; build a new one, or use copy.deepcopy "
            "inside `with engine.dense():`"
        )
