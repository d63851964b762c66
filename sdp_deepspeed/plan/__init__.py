"""The plan: who holds what."""
