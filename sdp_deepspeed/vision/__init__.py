"""Images: data, models and the program behind launch/train_vision.py.

Its import registers `sdp_small_image_resnet` with Transformers' automatic classes.
"""

from sdp_deepspeed.vision.small_image_resnet import (
    SmallImageResNetConfig,
    SmallImageResNetForImageClassification,
    SmallImageResNetModel,
    register,
)

register()

__all__ = ["SmallImageResNetConfig", "SmallImageResNetForImageClassification", "SmallImageResNetModel"]
