"""What a plan does to a live module."""

from .compiled import compile_in_place
from .mask import CUT, Mask
from .part import MaskedPart, mixed_in

__all__ = ["CUT", "Mask", "MaskedPart", "compile_in_place", "mixed_in"]
