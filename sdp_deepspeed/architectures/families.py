"""All families that the package describes, by the qualified name of their layer class; the data is in one file for each
kind of model."""

from __future__ import annotations

from sdp_deepspeed.architectures.branch import Branch
from sdp_deepspeed.architectures.decoders import DECODERS
from sdp_deepspeed.architectures.encoder_decoders import ENCODER_DECODERS
from sdp_deepspeed.architectures.encoders import ENCODERS
from sdp_deepspeed.architectures.falcon import FALCON
from sdp_deepspeed.architectures.mixtures import MIXTURES
from sdp_deepspeed.architectures.registry import branches_of, described

FAMILIES: dict[str, tuple[Branch, ...]] = {
    **DECODERS,
    **ENCODERS,
    **ENCODER_DECODERS,
    **MIXTURES,
    "transformers.models.falcon.modeling_falcon.FalconDecoderLayer": FALCON,
}


def is_of_package(layer_class: type) -> bool:
    """Whether the description that a class takes is one of FAMILIES, and not a user's."""
    known = described()
    names = [f"{base.__module__}.{base.__qualname__}" for base in layer_class.__mro__]
    name = next((name for name in names if name in known), None)
    return name in FAMILIES and branches_of(layer_class) == FAMILIES[name]
