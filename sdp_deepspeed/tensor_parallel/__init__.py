"""Tensor parallelism: divided models and their groups."""
