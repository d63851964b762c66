"""Checkpoints in the dense model's coordinates: complete or absent, and loadable on any layout."""
