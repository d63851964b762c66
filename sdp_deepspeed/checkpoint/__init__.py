"""Checkpoints of the dense model on `torch.distributed.checkpoint`, from any layout to any other."""
