"""What a plan does to a live module."""

from .mask import Mask
from .part import MaskedPart

__all__ = ["Mask", "MaskedPart"]
