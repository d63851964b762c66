"""The convolutional families of Transformers (read in 5.23.0), by the qualified name of their layer class.

What a layer has up to the addition is its branch; the activation after it is on the stream. Where the skip connection
projects (a stage's first layer), the branch is no block, but its inner channels are cut as anywhere.
"""

from __future__ import annotations

from torch import nn

from sdp_deepspeed.architectures.branch import Branch, Cut, InnerLayers

_BYPASSED = (("shortcut", nn.Identity),)


def _cut_before(last: int) -> InnerLayers:
    """Cells are what the last convolution but one puts out; the norm after the last runs on the sum over all."""
    return InnerLayers(
        (
            Cut(f"{last - 1}.convolution", 0),
            Cut(f"{last - 1}.normalization", 0),
            Cut(f"{last}.convolution", 1, is_output=True),
        ),
        tail=(f"{last}.normalization", f"{last}.activation"),
        before=tuple(f"{index}" for index in range(last - 1)),
    )


_BASIC = (Branch("convolution", body="layer", inner=_cut_before(1), bypassed=_BYPASSED),)
# Its 3x3 convolution lies between two inner widths: with both cut, its pieces would belong to two units each.
_BOTTLENECK = (Branch("convolution", body="layer", inner=_cut_before(2), bypassed=_BYPASSED),)

CONVOLUTIONAL: dict[str, tuple[Branch, ...]] = {
    "transformers.models.resnet.modeling_resnet.ResNetBasicLayer": _BASIC,
    "transformers.models.resnet.modeling_resnet.ResNetBottleNeckLayer": _BOTTLENECK,
}
