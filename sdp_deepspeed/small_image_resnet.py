"""ResNets for small images: Transformers' layers behind a 3x3 stem without pooling, optionally wider.

The stem of Transformers' ResNet reduces each side by a factor of four before the first layer, which leaves 8 of the 32
pixels of CIFAR. The layers are unchanged. Importing this module registers the model type with Transformers' auto
classes.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification, ResNetConfig
from transformers.models.resnet.modeling_resnet import (
    ResNetConvLayer,
    ResNetForImageClassification,
    ResNetModel,
    ResNetPreTrainedModel,
)

MODEL_TYPE = "sdp_small_image_resnet"


@strict
class SmallImageResNetConfig(ResNetConfig):
    """Config of the model; by default a ResNet-18. `hidden_sizes` follows from the arguments.

    Args:
        stage_sizes: channels of each stage before widening.
        width_factor: factor of the channels of every stage; the stem keeps `embedding_size`, as in wide residual
            networks (Zagoruyko and Komodakis, arXiv 1605.07146).

    Raises:
        ValueError: a width below 1, no stages, or a different number of depths.
    """

    model_type = MODEL_TYPE

    depths: list[int] | tuple[int, ...] | None = (2, 2, 2, 2)
    layer_type: str = "basic"
    stage_sizes: list[int] | tuple[int, ...] = field(default=(64, 128, 256, 512))
    width_factor: int = 1
    hidden_sizes: list[int] | tuple[int, ...] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.stage_sizes = list(self.stage_sizes)
        if self.width_factor < 1:
            raise ValueError(f"width_factor: got {self.width_factor}, expected at least 1")
        if not self.stage_sizes or len(self.stage_sizes) != len(self.depths or ()):
            raise ValueError(
                f"got stage_sizes {self.stage_sizes} and depths {self.depths}, expected one of each per stage"
            )
        sizes = [self.width_factor * size for size in self.stage_sizes]
        if self.hidden_sizes is not None and list(self.hidden_sizes) != sizes:
            raise ValueError(
                f"hidden_sizes: got {list(self.hidden_sizes)}, expected stage_sizes * width_factor {sizes}; leave it "
                "out"
            )
        self.hidden_sizes = sizes
        super().__post_init__(**kwargs)


class SmallImageStem(nn.Module):
    """3x3 convolution of stride 1, normalization, activation; [B, 3, H, W] to [B, embedding_size, H, W]."""

    def __init__(self, config: SmallImageResNetConfig) -> None:
        super().__init__()
        self.embedder = ResNetConvLayer(
            config.num_channels, config.embedding_size, kernel_size=3, stride=1, activation=config.hidden_act
        )

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.embedder(pixel_values)


class SmallImageResNetPreTrainedModel(ResNetPreTrainedModel):
    config_class = SmallImageResNetConfig
    config: SmallImageResNetConfig


class SmallImageResNetModel(SmallImageResNetPreTrainedModel, ResNetModel):
    """Transformers' `ResNetModel` with the other stem."""

    def __init__(self, config: SmallImageResNetConfig) -> None:
        super().__init__(config)
        self.embedder = SmallImageStem(config)
        self.post_init()


class SmallImageResNetForImageClassification(SmallImageResNetPreTrainedModel, ResNetForImageClassification):
    """Transformers' `ResNetForImageClassification` with the other stem."""

    def __init__(self, config: SmallImageResNetConfig) -> None:
        super().__init__(config)
        self.resnet.embedder = SmallImageStem(config)
        self.post_init()


# Register the model type with Transformers' auto classes.
AutoConfig.register(MODEL_TYPE, SmallImageResNetConfig, exist_ok=True)
AutoModel.register(SmallImageResNetConfig, SmallImageResNetModel, exist_ok=True)
AutoModelForImageClassification.register(SmallImageResNetConfig, SmallImageResNetForImageClassification, exist_ok=True)
