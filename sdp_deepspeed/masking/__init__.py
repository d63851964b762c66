"""What a plan does to a live module."""

from .mask import CUT, Mask
from .part import MaskedPart

__all__ = ["CUT", "Mask", "MaskedPart"]
