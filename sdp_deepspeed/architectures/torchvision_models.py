"""The families of torchvision 0.28.0, by the qualified name of their layer class; torchvision need not be installed.

Its attention derives the width of a head from that of the residual stream, so heads cannot be cut. Its ResNet uses one
ReLU for branches and stream; it is in no branch, and maps zero to zero.
"""

from __future__ import annotations

from sdp_deepspeed.architectures.branch import Branch, Cut, InnerLayers

_UNCUT = "torchvision's attention takes the width of a head from that of the residual stream"
# Linear, GELU, Dropout, Linear, Dropout.
_MLP = InnerLayers((Cut("0", 0), Cut("3", 1, is_output=True)), tail=("4",))

_VIT = (
    Branch("attention", norm="ln_1", body="self_attention", num_outputs=2, uncut_reason=_UNCUT),
    Branch("mlp", norm="ln_2", body="mlp", inner=_MLP),
)
# One `stochastic_depth` serves both branches: it multiplies by a random factor.
_SWIN = (
    Branch("attention", norm="norm1", body="attn", uncut_reason=_UNCUT),
    Branch("mlp", norm="norm2", body="mlp", inner=_MLP),
)
_SWIN_V2 = (
    Branch("attention", body="attn", after=("norm1",), uncut_reason=_UNCUT),
    Branch("mlp", body="mlp", after=("norm2",), inner=_MLP),
)
# `block` permutes dimensions before and after the neurons.
_CONVNEXT = (
    Branch(
        "layer",
        norm=("block.0", "block.2"),
        body=("block.3", "block.4", "block.5"),
        after=("stochastic_depth",),
        inner=InnerLayers((Cut("block.3", 0), Cut("block.5", 1, is_output=True))),
        parameters=("layer_scale",),
    ),
)
_BYPASSED = (("downsample", None),)


def _resnet(last: int) -> Branch:
    """Cut like ResNet in `convolutional.py`: channels before the last convolution."""
    first = tuple(f"{kind}{index}" for index in range(1, last) for kind in ("conv", "bn"))
    return Branch(
        "convolution",
        body=(*first, f"conv{last}"),
        after=(f"bn{last}",),
        inner=InnerLayers(
            (Cut(f"conv{last - 1}", 0), Cut(f"bn{last - 1}", 0), Cut(f"conv{last}", 1, is_output=True)),
            before=first[:-2],
        ),
        bypassed=_BYPASSED,
    )


TORCHVISION: dict[str, tuple[Branch, ...]] = {
    "torchvision.models.convnext.CNBlock": _CONVNEXT,
    "torchvision.models.resnet.BasicBlock": (_resnet(2),),
    "torchvision.models.resnet.Bottleneck": (_resnet(3),),
    "torchvision.models.swin_transformer.SwinTransformerBlock": _SWIN,
    "torchvision.models.swin_transformer.SwinTransformerBlockV2": _SWIN_V2,
    "torchvision.models.vision_transformer.EncoderBlock": _VIT,
}
