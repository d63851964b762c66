"""What a plan does to a live module."""
