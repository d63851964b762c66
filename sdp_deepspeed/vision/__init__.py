"""Images: data, models and the program behind launch/train_vision.py."""

import sdp_deepspeed.architectures.small_image_resnet  # noqa: F401
