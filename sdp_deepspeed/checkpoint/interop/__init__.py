"""Checkpoints of others, and for others."""
