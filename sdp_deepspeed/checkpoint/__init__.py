"""Checkpoints of the dense model with `torch.distributed.checkpoint`, between any two layouts."""
