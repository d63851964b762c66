"""The convolutional families of Transformers 5.23.0, by the qualified name of their layer class.

The branch ends at the addition; the activation after it is on the residual stream. If the skip connection projects (the
first layer of a stage), the branch cannot be a block, but its inner channels can be cut.
"""

from __future__ import annotations

from torch import nn

from sdp_deepspeed.architectures.branch import Branch, Cut, InnerLayers

_BYPASSED = (("shortcut", nn.Identity),)


def _cut_before(last: int) -> InnerLayers:
    """Cells are the output channels of the second to last convolution; the last norm runs on the sum over all."""
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
# The 3x3 convolution of a bottleneck is cut along its outputs only: otherwise its pieces would belong to two units.
_BOTTLENECK = (Branch("convolution", body="layer", inner=_cut_before(2), bypassed=_BYPASSED),)

CONVOLUTIONAL: dict[str, tuple[Branch, ...]] = {
    "transformers.models.resnet.modeling_resnet.ResNetBasicLayer": _BASIC,
    "transformers.models.resnet.modeling_resnet.ResNetBottleNeckLayer": _BOTTLENECK,
}
