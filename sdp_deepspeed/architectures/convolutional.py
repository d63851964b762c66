"""The convolutional families of Transformers (read in 5.23.0), by the qualified name of their layer class.

What a layer has up to the addition is its branch; the activation after it is on the stream. Where the skip connection
projects (a stage's first layer), the branch is no block, but its inner channels are cut as anywhere.
"""

from __future__ import annotations

from torch import nn

from sdp_deepspeed.architectures.branch import Branch

_BYPASSED = (("shortcut", nn.Identity),)
_BASIC = (Branch("convolution", body="layer", bypassed=_BYPASSED),)
_BOTTLENECK = (Branch("convolution", body="layer", bypassed=_BYPASSED),)

CONVOLUTIONAL: dict[str, tuple[Branch, ...]] = {
    "transformers.models.resnet.modeling_resnet.ResNetBasicLayer": _BASIC,
    "transformers.models.resnet.modeling_resnet.ResNetBottleNeckLayer": _BOTTLENECK,
}
