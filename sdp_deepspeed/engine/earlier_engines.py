"""Models that an earlier engine has masked: each model has one engine."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn

from sdp_deepspeed.masking.mask import is_masked
from sdp_deepspeed.messages import KEY

engines: WeakKeyDictionary[nn.Module, ref[Any]] = WeakKeyDictionary()  # `SubnetworkEngine`s by their model


def make_whole(model: nn.Module) -> frozenset[str]:
    """Make a model dense again that an earlier engine has masked, and end that engine. Collective.

    Returns:
        Names of parameters that only the earlier mask had frozen on this rank.

    Raises:
        ValueError: the model is a copy, or a part, of a masked model.
    """
    frozen: frozenset[str] = frozenset()
    reference = engines.pop(model, None)
    earlier = None if reference is None else reference()
    if earlier is not None:
        frozen = earlier.release()
    refuse_masked(model)
    return frozen


def refuse_masked(model: nn.Module) -> None:
    """Raise ValueError for a masked model."""
    if any(map(is_masked, model.modules())):
        raise ValueError(
            f"{KEY}: an earlier engine reduced this model to a subnetwork; build a new one, or use copy.deepcopy "
            "inside `with engine.dense():`"
        )
