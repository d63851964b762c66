"""All families that the package describes, by the qualified name of their layer class; the data is in one file for each
kind of model."""

from __future__ import annotations

from sdp_deepspeed.architectures.branch import Branch
from sdp_deepspeed.architectures.decoders import DECODERS
from sdp_deepspeed.architectures.encoder_decoders import ENCODER_DECODERS
from sdp_deepspeed.architectures.encoders import ENCODERS
from sdp_deepspeed.architectures.falcon import FALCON

FAMILIES: dict[str, tuple[Branch, ...]] = {
    **DECODERS,
    **ENCODERS,
    **ENCODER_DECODERS,
    "transformers.models.falcon.modeling_falcon.FalconDecoderLayer": FALCON,
}
