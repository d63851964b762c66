"""All described families, by the qualified name of their layer class. To add one, describe its branches in the file of
its kind: decoders.py, encoders.py, mixtures.py, vision.py and so on."""

from __future__ import annotations

from torch import nn

from sdp_deepspeed.architectures.branch import Branch
from sdp_deepspeed.architectures.convolutional import CONVOLUTIONAL
from sdp_deepspeed.architectures.decoders import DECODERS
from sdp_deepspeed.architectures.diffusers_models import DIFFUSERS
from sdp_deepspeed.architectures.encoder_decoders import ENCODER_DECODERS
from sdp_deepspeed.architectures.encoders import ENCODERS
from sdp_deepspeed.architectures.falcon import FALCON
from sdp_deepspeed.architectures.layer_code import is_in_its_source, is_wrapper_of_its_class
from sdp_deepspeed.architectures.mixtures import MIXTURES
from sdp_deepspeed.architectures.registry import branches_of, described_as
from sdp_deepspeed.architectures.timm_models import TIMM
from sdp_deepspeed.architectures.torchvision_models import TORCHVISION
from sdp_deepspeed.architectures.vision import VISION

FAMILIES: dict[str, tuple[Branch, ...]] = {
    **CONVOLUTIONAL,
    **DECODERS,
    **DIFFUSERS,
    **ENCODERS,
    **ENCODER_DECODERS,
    **MIXTURES,
    **TIMM,
    **TORCHVISION,
    **VISION,
    "transformers.models.falcon.modeling_falcon.FalconDecoderLayer": FALCON,
}


# Files whose modules may occur inside the layers of any family.
_COMMON = (
    "torch.nn.",
    "diffusers.models.",
    "timm.layers.",
    "torchvision.ops.",
    "transformers.activations",
    "transformers.pytorch_utils",
)


def is_described_here(layer_class: type) -> bool:
    """Whether a class has a description of FAMILIES, or none."""
    name = described_as(layer_class)
    return not name or branches_of(layer_class) == FAMILIES.get(name)


def is_of_package(layer: nn.Module) -> bool:
    """Whether a layer uses a description of FAMILIES, and consists of the modules that it was written for: from the
    file of the described class, or common building blocks, with their original `forward`."""
    name = described_as(type(layer))
    if name not in FAMILIES or branches_of(type(layer)) != FAMILIES[name]:
        return False
    file = name.rpartition(".")[0]
    return all(_is_known(module, file) for module in layer.modules() if module is not layer)


def _is_known(module: nn.Module, file: str) -> bool:
    kind = type(module)
    forward = vars(module).get("forward")
    if not is_in_its_source(kind) or (forward is not None and not is_wrapper_of_its_class(forward, kind)):
        return False
    return kind.__module__ == file or f"{kind.__module__}.".startswith(_COMMON)
