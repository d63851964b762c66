"""What a plan does to a live module."""

from .block import BlockMask, UnitModules

__all__ = ["BlockMask", "UnitModules"]
