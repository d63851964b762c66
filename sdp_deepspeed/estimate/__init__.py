"""Memory, traffic and FLOPs of a run before it starts."""
