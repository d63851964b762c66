"""Apply a plan to a live module: what each rank stores, runs and trains."""

from sdp_deepspeed.masking.mask import Mask

__all__ = ["Mask"]
