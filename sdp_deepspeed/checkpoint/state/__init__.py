"""What a checkpoint holds, in the dense model's coordinates."""
